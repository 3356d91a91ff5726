"""Build trees with every kind of leaf, and the expected results of clipping.

Expected values come from the registry's float64 oracles: complex leaves are clipped by
their moduli, and BCOO leaves like the dense arrays that they represent.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

from tests.support import helpers

# All of jax.numpy except float8_e8m0fnu (no zero, no sign), float64 (needs x64) and the
# six-bit formats, which XLA does not support yet.
FLOATS = ["bfloat16", "float16", "float32", "float4_e2m1fn", *helpers.FP8]
# A few kinds per program, because each adds compile time.
GROUPS = {
    "a": (*FLOATS[::3], "complex64", "unique"),
    "b": (*FLOATS[1::3], "complex64", "weak", "twice", "entries"),
    "c": (*FLOATS[2::3], "complex64", "batched"),
    # Few, since each dtype compiles every eager operation.
    "eager": ("bfloat16", "float8_e4m3fn", "complex64", "weak", "twice"),
}
# Numbers that all dtypes represent exactly.
EXACT = np.array([[-2, 1, 0, 1.5], [2, -0.5, 1, 2], [-1, 3, 0.5, 0], [1, 1, -2, 4]])
# Thresholds that clip every leaf without flushing any to zero, where the registry's do
# not.
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
    """Build a transformation that clips every leaf of the tree."""
    return helpers.tx_without_promotion(entry.make(LIMITS.get(entry.id)))


def gradients(entry: Any, group: str, *, flipped: bool = False) -> Any:
    """Return the leaves of a group that are clipped; with other values if `flipped`.

    Without BCOO leaves for norms along axes and for matrices, which do not support
    them.
    """
    values = EXACT[::-1] if flipped else EXACT
    dense = {name: jnp.asarray(values.astype(jnp.dtype(name))) for name in FLOATS}
    dense["complex64"] = jnp.asarray(values * np.exp(0.7j), jnp.complex64)
    # Equal numbers, since only a broadcast scalar is a weakly typed array.
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
    """Return BCOO leaves with unique rows, duplicates, a batch, and single entries."""
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
        # Padding past the end is not part of the gradient.
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


def unclipped() -> dict[str, Any]:
    """Return leaves that clipping leaves unchanged and excludes from norms."""
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
    """Convert a leaf to a dense array in float64 or complex128."""
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
    """Return the oracle's result as dense arrays."""
    dense = jax.tree.map(wide, tree, is_leaf=is_sparse)
    return entry.expected(dense, LIMITS.get(entry.id))


def assert_clipped(
    actual: chex.ArrayTree,
    tree: chex.ArrayTree,
    wanted: chex.ArrayTree,
    roundings: int = 0,
) -> None:
    """Check types and values, and that every leaf changed."""
    helpers.assert_same_types(actual, tree)
    pairs = zip(
        jax.tree.leaves_with_path(actual, is_leaf=is_sparse),
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
        # Rounded to nearest, after an error of a few float32 ulps.
        slack = 0.5 * step + (8 + roundings) * 2.0**-23 * np.max(size, initial=0.0)
        assert np.all(np.abs(got - middle) <= slack), name
