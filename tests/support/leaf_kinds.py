"""One tree that holds every kind of leaf, and what any clip must make of it.

Expected values are those of the registry's float64 oracles for the dense gradient of
moduli: a complex leaf is clipped as its moduli are, a BCOO leaf as what it stands for.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

from tests.support import helpers

# All of jax.numpy's but float8_e8m0fnu (no zero, no sign), float64 (needs x64) and the
# six-bit formats, which XLA cannot compute with yet.
FLOATS = ["bfloat16", "float16", "float32", "float4_e2m1fn", *helpers.FP8]
# A few per program, because each kind costs compile time.
GROUPS = {
    "a": (*FLOATS[::3], "complex64", "unique"),
    "b": (*FLOATS[1::3], "weak", "twice", "entries"),
    "c": (*FLOATS[2::3], "complex64", "batched"),
    # Eagerly, each dtype compiles each operation of its own.
    "eager": ("bfloat16", "float8_e4m3fn", "weak", "twice"),
}
# Numbers that all of these have.
EXACT = np.array([[-2, 1, 0, 1.5], [2, -0.5, 1, 2], [-1, 3, 0.5, 0], [1, 1, -2, 4]])
# Thresholds at which every leaf of the tree is clipped and none vanishes, where those
# of the registry are not.
LIMITS = {
    "average-norm": 0.1,
    "rms": 0.5,
    "rms-axis": 0.5,
    "group-norm": 2.5,
    "user-scope": 2.5,
    "global-norm": 10.0,
    "smooth": 10.0,
    "normalize": 10.0,
}


def make(entry: Any) -> Any:
    """The transformation, clipping all of the tree."""
    return helpers.strict(entry.make(LIMITS.get(entry.id)))


def gradients(entry: Any, group: str, *, flipped: bool = False) -> Any:
    """The kinds of a group that are clipped; `flipped`, with other values.

    No BCOO leaf for norms along its first axis, which is in its indices, and of
    matrices, which have to be dense.
    """
    values = EXACT[::-1] if flipped else EXACT
    dense = {name: jnp.asarray(values, getattr(jnp, name)) for name in FLOATS}
    dense["complex64"] = jnp.asarray(values * np.exp(0.7j), jnp.complex64)
    # The same number all over: only a broadcast scalar is a weak array.
    dense["weak"] = jnp.broadcast_to(jnp.asarray(-2.5 if flipped else 2.5), (3, 4))
    some = GROUPS[group]
    return {
        "dense": {name: dense[name] for name in some if name in dense},
        "out": {
            name: x
            for name, x in sparse(values).items()
            if name in some and entry.scope != "axes" and not entry.of_matrices
        },
    }


def sparse(values: np.ndarray) -> dict[str, BCOO]:
    """BCOO leaves: rows once; twice and past the end; a batch of these; entries."""
    rows = jnp.asarray(values, jnp.float32)

    def mat(data, indices, shape, **flags):
        # A copy: a buffer cannot be donated twice.
        return BCOO((jnp.array(data), jnp.array(indices)), shape=shape, **flags)

    return {
        "unique": mat(
            rows,
            [[0], [1], [4], [5]],
            (7, 4),
            indices_sorted=True,
            unique_indices=True,
        ),
        # What is past the end is no part of the gradient, however large.
        "twice": mat(rows.at[2].set(1e30), [[3], [1], [7], [1]], (7, 4)),
        "batched": mat(
            jnp.stack([rows[:3], rows[1:]]),
            [[[0], [4], [0]], [[2], [9], [1]]],
            (2, 5, 4),
        ),
        "entries": mat(
            rows[1].astype(jnp.float16),
            [[2, 3], [0, 0], [1, 1], [0, 1]],
            (3, 4),
            unique_indices=True,
        ),
    }


def beside() -> dict[str, Any]:
    """Leaves that pass untouched and enter no norm, for any tracing."""
    return {
        "bool": jnp.array([True, False]),
        "e8m0": jnp.array([1, 2, 4]).astype(jnp.float8_e8m0fnu),
        "empty": jnp.zeros((0, 3)),
        "int": jnp.arange(4),
        "key": jax.random.key(0),
        "masked": optax.MaskedNode(),
        "none": None,
        "uint8": jnp.arange(3, dtype=jnp.uint8),
    }


def is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, BCOO)


def wide(leaf: Any) -> np.ndarray:
    """A leaf as a dense array in float64 or complex128."""
    if not is_sparse(leaf):
        kind = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
        return np.asarray(leaf).astype(kind)
    out = np.zeros(leaf.shape)
    data, indices = np.asarray(leaf.data, np.float64), np.asarray(leaf.indices)
    for at in np.ndindex(indices.shape[:-1]):
        target = (*at[:-1], *indices[at])
        if all(i < n for i, n in zip(target, leaf.shape, strict=False)):
            out[target] += data[at]
    return out


def expected(entry: Any, tree: chex.ArrayTree) -> chex.ArrayTree:
    """What the oracle gives, dense."""
    dense = jax.tree.map(wide, tree, is_leaf=is_sparse)
    return entry.expected(dense, LIMITS.get(entry.id))


def assert_clipped(
    found: chex.ArrayTree,
    tree: chex.ArrayTree,
    wanted: chex.ArrayTree,
    roundings: int = 0,
) -> None:
    """Types are those of `tree`, values those of `wanted`; every leaf has changed."""
    helpers.assert_same_types(found, tree)
    pairs = zip(
        jax.tree.leaves_with_path(found, is_leaf=is_sparse),
        jax.tree.leaves(tree, is_leaf=is_sparse),
        jax.tree.leaves(wanted),
        strict=True,
    )
    for (path, leaf), before, middle in pairs:
        name = jax.tree_util.keystr(path)
        got = wide(leaf)
        assert not np.array_equal(got, wide(before)), f"{name} is not clipped"
        finfo = jnp.finfo(leaf.dtype)
        size = np.abs(middle)
        step = float(finfo.eps) * np.maximum(size, float(finfo.tiny))
        # To nearest, after an error of a few ULP of float32.
        slack = 0.5 * step + (8 + roundings) * 2.0**-23 * np.max(size, initial=0.0)
        assert np.all(np.abs(got - middle) <= slack), name
