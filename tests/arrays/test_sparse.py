"""BCOO leaves in all their layouts, as the dense gradients they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from tests.support import helpers, oracles

ROWS = jnp.array([[1], [3], [1]])


def rows(data, **kwargs):
    return BCOO((jnp.asarray(data), ROWS), shape=(5, 2), **kwargs)


def test_what_is_of_the_dense_shape_is_refused():
    mat = rows([[4.0, -4.0], [9.0, 1.0], [2.0, -3.0]])
    upper = jnp.arange(10.0).reshape(5, 2)
    with pytest.raises(
        ValueError, match=r"leaf 'a', a BCOO matrix, got an array .*Give a"
    ):
        F.clip_by_value({"a": mat}, lower=None, upper={"a": upper})
    for axis in (0, -2):
        with pytest.raises(ValueError, match=r"BCOO leaf, got .* of shape \(5, 2\)"):
            F.clip_by_norm(mat, 1.0, axis=axis)
    with pytest.raises(ValueError, match=r"todense\(\)"):
        F.clip_by_norm(mat.update_layout(n_dense=0), 1.0, axis=1)


def test_a_scope_sees_a_matrix_as_one_leaf():
    @dataclasses.dataclass(frozen=True)
    class ByKind(optclip.scopes.Scope):
        def blocks(self, tree):
            block = optclip.norms.Block(jax.tree.leaves(tree))
            (leaf,) = block.leaves
            assert (leaf.shape, leaf.ndim, leaf.dtype) == ((5, 2), 2, jnp.float32)
            assert leaf.size == 10
            return {"all": block}

        def spread(self, values, tree):
            return jax.tree.map(lambda _: values["all"], tree)

    tx = optclip.clip_by(1.0, over=ByKind())
    mat = rows([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
    found, _ = tx.update(mat, tx.init(mat))
    np.testing.assert_allclose(found.todense(), mat.todense() / 5, rtol=1e-6)


def test_all_axes_are_the_leaf(run):
    mat = rows([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
    found = run(lambda m: F.clip_by_norm(m, 1.0, axis=(0, 1)))(mat)
    np.testing.assert_allclose(found.todense(), mat.todense() / 5, rtol=1e-6)


def test_nothing_sparse_about_it(run):
    """A matrix whose axes are all batch or dense axes."""
    indices = jnp.zeros((3, 1, 0), jnp.int32)
    mat = BCOO((jnp.full((3, 1, 4), 2.0), indices), shape=(3, 4))
    found, norm = run(lambda m: F.clip_by_global_norm(m, 1.0))(mat)
    np.testing.assert_allclose(norm, np.sqrt(48), rtol=1e-6)
    np.testing.assert_allclose(oracles.norm(found.data), 1.0, rtol=1e-6)


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_batches_with_duplicates_and_nan(policy, run):
    indices = jnp.array([[[0], [2], [0]], [[1], [1], [4]]])
    data = jnp.array([[3.0, 4.0, jnp.nan], [3.0, 3.0, 8.0]])
    mat = BCOO((data, indices), shape=(2, 5))
    found = run(lambda m: F.clip_by_norm(m, 5.0, nonfinite=policy))(mat)
    exact = np.zeros((2, 5))
    if policy == "propagate":
        exact[[0, 0, 1, 1], [0, 2, 1, 4]] = np.nan
    if policy == "drop":
        # 3 + NaN, one entry of the dense gradient, is dropped as one.
        exact[[0, 1, 1], [2, 1, 4]] = np.array([4, 6, 8]) * 5 / np.sqrt(116)
    np.testing.assert_allclose(found.todense(), exact, rtol=1e-6)


def test_duplicates_are_summed_in_float32(run):
    """In float16 they would overflow, and in bfloat16 lose the small ones."""
    mat = rows(jnp.array([[4e4, 0], [3.0, 0], [4e4, 0]], jnp.float16))
    found, norm = run(lambda m: F.clip_by_global_norm(m, 1.0))(mat)
    np.testing.assert_allclose(norm, 8e4, rtol=1e-3)
    np.testing.assert_allclose(found.todense()[1, 0], 1.0, rtol=1e-3)
    many = BCOO((jnp.ones(1001, jnp.bfloat16), jnp.zeros((1001, 1), int)), shape=(3,))
    assert F.global_norm(many) == 1001


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_strict_holds_for_the_sums(dtype):
    """Rounding duplicates one by one, towards zero, could make a sum larger."""
    rng = np.random.default_rng(3)
    clip = jax.jit(lambda m, c: F.clip_by_global_norm(m, c, strict=True)[0])
    for _ in range(50):
        data = rng.normal(size=(3, 2))
        data[2] = -data[0] * (1 + 0.02 * rng.normal(size=2))
        mat = rows(jnp.asarray(data, dtype))
        # Rounded duplicates all but cancel.
        c = np.float32(rng.uniform(0.05, 0.9) * float(F.global_norm(mat)))
        out = clip(mat, c)
        dense = np.zeros((5, 2))
        inside = np.ravel(out.indices) < 5
        values = helpers.as_float64(out.data)
        np.add.at(dense, np.ravel(out.indices)[inside], values[inside])
        assert oracles.norm(dense) <= c
        assert helpers.differs(out.data, mat.data)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_clipped_stays_to_the_bit(dtype, run):
    """Duplicates are not summed then, nor rounded."""
    mat = rows(jnp.asarray([[1.0, 1.0], [2.0, 3.0], [0.0041, 1.0]], dtype))
    for clip in (
        lambda m: F.clip_by_global_norm(m, 10.0)[0],
        lambda m: F.clip_by_norm(m, 10.0, axis=1, nonfinite="drop"),
        lambda m: F.clip_by_value(m, lower=-10.0, upper=10.0, nonfinite="zero"),
    ):
        helpers.assert_identical(run(clip)(mat), mat)
    clipped = run(lambda m: F.clip_by_global_norm(m, 1.0)[0])(mat)
    np.testing.assert_allclose(oracles.norm(clipped.todense()), 1.0, rtol=1e-2)


def test_what_is_not_finite_is_dropped_inside_the_threshold_too(run):
    mat = rows([[jnp.nan, 1.0], [2.0, jnp.inf], [4.0, 3.0]])
    found = run(lambda m: F.clip_by_norm(m, 100.0, nonfinite="drop"))(mat)
    exact = np.zeros((5, 2))
    exact[1, 1] = 4
    exact[3, 0] = 2
    np.testing.assert_array_equal(found.todense(), exact)


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_infinite_thresholds_keep_entries_as_they_came(policy, run):
    mat = rows([[jnp.nan, 1.0], [2.0, 3.0], [4.0, jnp.inf]])
    clips = [
        lambda m: F.clip_by_value(m, lower=-jnp.inf, upper=jnp.inf, nonfinite=policy),
        lambda m: F.clip_by_norm(m, jnp.inf, nonfinite=policy),
        lambda m: F.clip_by_norm(m, jnp.inf, axis=1, nonfinite=policy),
    ]
    for clip in clips:
        helpers.assert_identical(run(clip)(mat), mat)


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"nonfinite": "drop"}])
def test_sums_above_the_largest_number_stay_finite(options):
    """Two halves of a row that the dtype has no number for."""
    mat = BCOO((jnp.full(2, 6e4, jnp.float16), jnp.zeros((2, 1), int)), shape=(3,))
    found, norm = F.clip_by_global_norm(mat, 1e5, **options)
    assert norm == pytest.approx(1.2e5, rel=1e-3)
    dense = np.sum(np.asarray(found.data, np.float64))
    assert dense == pytest.approx(1e5 if not options else 65504, rel=1e-3)
    by_row = F.clip_by_norm(
        rows(jnp.full((3, 2), 6e4, jnp.float16)), jnp.inf, axis=1, **options
    )
    helpers.assert_identical(by_row.data, jnp.full((3, 2), 6e4, jnp.float16))


def test_the_slope_of_a_coefficient_of_one():
    """Of a response that bends there, as for a dense leaf."""
    tx = optclip.clip_by(5.0, response="normalize")

    def dense(data):
        return tx.update(data, tx.init(data))[0][0]

    def sparse(data):
        mat = BCOO((data, jnp.arange(2)[:, None]), shape=(2,), unique_indices=True)
        return tx.update(mat, tx.init(mat))[0].data[0]

    x = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(jax.grad(dense)(x), [0.64, -0.48], rtol=1e-5)
    np.testing.assert_allclose(jax.grad(sparse)(x), [0.64, -0.48], rtol=1e-5)


def test_one_batch_stored_for_several_is_refused():
    mat = BCOO((jnp.ones((1, 2)), jnp.array([[[0], [1]]])), shape=(4, 3))
    with pytest.raises(
        ValueError, match=r"The leaf 'w'.*one batch stored for several.*Give"
    ):
        F.global_norm({"w": mat})
