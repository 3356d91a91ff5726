"""Derivatives through casts, masks, sparse rows and complex numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from optclip import functional as F
from tests.clip.test_derivatives_edges import clip, weighed
from tests.support import differences, helpers, oracles


@functools.partial(helpers.quick_jit, static_argnames=("kind", "strict"))
def slopes(x, kind, strict):
    over = "tree" if kind == "tree" else "element"

    def number(x, c):
        return weighed(clip(x, c, over=over, strict=strict))

    return jax.grad(number, (0, 1))(x, jnp.float32(1.3))


@pytest.mark.covering(
    kind=["tree", "element"],
    dtype=["float32", "bfloat16", "float16"],
    strict=[False, True],
)
def test_casts_have_derivatives(kind, dtype, strict):
    """Rounding, to nearest or towards zero, is no part of the derivative."""
    x = jnp.asarray(np.linspace(-3, 3, 16), dtype)
    found, by_threshold = slopes(x, kind, strict)
    wide, wide_by_threshold = slopes(x.astype(jnp.float32), kind, False)
    assert found.dtype == dtype
    size = float(jnp.max(jnp.abs(wide)))
    tolerance = 4 * float(jnp.finfo(dtype).eps) + (1.3e-4 if strict else 0)
    np.testing.assert_allclose(found.astype(jnp.float32), wide, atol=tolerance * size)
    np.testing.assert_allclose(by_threshold, wide_by_threshold, rtol=1e-2)


def test_a_mixed_tree_in_every_policy():
    """Each leaf as if all were float32; what is not clipped is in nobody's way."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    index = jnp.array([[0], [2], [0], [1]])

    def number(x, mixed, policy="propagate"):
        kinds = (jnp.bfloat16, jnp.float16, jnp.float32)
        leaves = [a.astype(k) if mixed else a for a, k in zip(x, kinds, strict=True)]
        rows = BCOO((leaves[2], index), shape=(3,))
        tree = [leaves[0], leaves[1], rows, None, jnp.arange(3), jax.random.key(0)]
        out, _ = F.clip_by_global_norm(tree, 1.0, nonfinite=policy)
        parts = [*out[:2], out[2].todense()]
        return sum(weighed(part) for part in parts)

    def all_of_them(x):
        found = [
            jax.grad(number)(x, True, p) for p in ("propagate", "zero", "drop", "raise")
        ]
        return jnp.stack(found), jax.grad(number)(x, False)

    found, wide = helpers.quick_jit(all_of_them)(x)
    np.testing.assert_allclose(found, jnp.broadcast_to(wide, found.shape), atol=0.02)
    assert helpers.differs(wide, jnp.tile(jnp.arange(1.0, 5.0), (3, 1)))


def _check(clipped, formula, x):
    """All orders and modes of a function of a vector, in float64."""
    along = np.random.default_rng(5).uniform(-1, 1, x.shape) * differences.sizes(x)
    by_jax = helpers.quick_jit(functools.partial(differences.by_jax, clipped))
    with jax.enable_x64(True):
        found = jax.device_get(by_jax(x, along))
    expected = differences.by_differences(formula, x, along)
    for part in differences.OF_UPDATES:
        a, b = getattr(found, part), getattr(expected, part)
        differences.assert_close(a, b, part)


ONE, OTHER = {"a": True, "b": False}, {"a": False, "b": True}


@pytest.mark.parametrize(
    ("norm_mask", "clip_mask"), [(ONE, None), (None, OTHER), (ONE, OTHER)]
)
def test_masked_leaves_have_the_derivative_of_their_part(norm_mask, clip_mask):
    x = np.array([1.0, -2.0, 0.5, 3.0, 0.0])

    def clipped(x):
        tree = {"a": x[:2], "b": x[2:]}
        masks = {"norm_mask": norm_mask, "clip_mask": clip_mask}
        out, _ = F.clip_by_global_norm(tree, 1.0, **masks)
        return jnp.concatenate([out["a"], out["b"]])

    def formula(x):
        k = oracles.hard(oracles.norm(x[:2] if norm_mask else x), 1.0)
        return x * np.array([1 if clip_mask else k] * 2 + [k] * 3)

    _check(clipped, formula, x)


ROWS = np.array([0, 2, 0, 1])
BY_DENSE = {
    "global": (lambda g: F.clip_by_global_norm(g, 1.0)[0], lambda g: oracles.by_tree(g, 1.0)),
    "rows": (lambda g: F.clip_by_norm(g, 1.0, axis=1), lambda g: oracles.by_first_axis(g.T, 1.0).T),
    "value": (lambda g: F.clip_by_value(g, lower=-0.4, upper=0.7), lambda g: oracles.by_value(g, -0.4, 0.7)),
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_DENSE)
def test_sparse_data_has_the_derivative_of_the_dense(kind):
    """As of the dense gradient, to which two entries at one row add."""
    clip_rows, clip_dense = BY_DENSE[kind]

    def clipped(data):
        rows = BCOO((data.reshape(4, 2), jnp.asarray(ROWS)[:, None]), shape=(4, 2))
        return clip_rows(rows).todense().ravel()

    def formula(data):
        dense = np.zeros((4, 2))
        np.add.at(dense, ROWS, data.reshape(4, 2))
        return clip_dense(dense).ravel()

    _check(clipped, formula, np.random.default_rng(3).normal(size=8))


COMPLEX = {
    "global": (lambda z: F.clip_by_global_norm(z, 1.0)[0], lambda z: oracles.by_tree(z, 1.0)),
    "3": (lambda z: F.clip_by_norm(z, 1.0, ord=3.0), lambda z: oracles.by_tree(z, 1.0, 3.0)),
    "inf": (lambda z: F.clip_by_norm(z, 1.0, ord=np.inf), lambda z: oracles.by_tree(z, 1.0, np.inf)),
    "value": (lambda z: F.clip_by_value(z, lower=-1.0, upper=1.0), lambda z: z / np.maximum(np.abs(z), 1.0)),
    "strict": (lambda z: F.clip_by_value(z, lower=-1.0, upper=1.0, strict=True), lambda z: z / np.maximum(np.abs(z), 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMPLEX)
def test_complex_leaves_have_the_derivative_of_both_parts(kind):
    """By the real and the imaginary part, a complex zero among them."""
    ours, theirs = COMPLEX[kind]

    def clipped(x):
        out = ours(x[:4] + 1j * x[4:])
        return jnp.concatenate([jnp.real(out), jnp.imag(out)])

    def formula(x):
        out = theirs(x[:4] + 1j * x[4:])
        return np.concatenate([out.real, out.imag])

    x = np.array([3.0, -0.3, 0.0, 1.0, -4.0, 0.2, 0.0, 2.0])
    # The third power of a modulus has a third derivative that jumps at zero.
    x += 0.1 * (x == 0) if kind == "3" else 0.0
    _check(clipped, formula, x)
