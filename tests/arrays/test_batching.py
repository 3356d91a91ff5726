"""Many norms are computed as one vector, each as if it were alone."""

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import _thresholds, functional, responses

# Private: the number of norms from which on they are stacked.
from optclip._arrays._batching import MANY
from tests.support.helpers import quick_jit, tx_without_promotion

SCALES = np.float32([5, 0.1, 1e30, 0, 1e-30])


def leaves(dtype=np.float32):
    """Return norms above and below 1, zero, huge and tiny; five of one shape."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 3)).astype(np.float32) * SCALES[:, None]
    square = rng.normal(size=(2, 2)) * 3
    assert len(rows) > MANY
    return [np.asarray(x, np.float32).astype(jnp.dtype(dtype)) for x in (*rows, square)]


def assert_close(actual, expected):
    """XLA's functions of vectors and of numbers differ by an ulp."""
    for a, b in zip(actual, expected, strict=True):
        rtol = max(1e-6, float(jnp.finfo(b.dtype).eps))
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol)


def test_clip_many_leaves_derivative_stays_with_its_leaf():
    """Compare with x / sqrt(1 + x^2), the smooth response for a single number."""
    x = np.arange(1, 6, dtype=np.float32) / 2
    weights = np.arange(5)

    def loss(x):
        clipped = functional.clip_by_norm(list(x), 1.0, response="smooth")
        return sum(i * leaf for i, leaf in enumerate(clipped))

    slope = weights / (1 + x**2) ** 1.5
    bend = np.diag(-3 * weights * x / (1 + x**2) ** 2.5)
    first, second = quick_jit(lambda x: (jax.grad(loss)(x), jax.hessian(loss)(x)))(x)
    np.testing.assert_allclose(first, slope, rtol=1e-5)
    np.testing.assert_allclose(second, bend, rtol=1e-5)


def own(norm, threshold):
    return jnp.minimum(1, threshold / (norm + 1))


@pytest.mark.covering(
    over=["leaf", optclip.axes(-1)],
    response=["hard", responses.band(0.5), responses.detached("hard"), own],
    is_strict=[False, True],
    dtype=["float32", "bfloat16"],
    policy=["propagate", "zero"],
)
def test_clip_leaf_among_many_matches_leaf_alone(
    over, response, is_strict, dtype, policy
):
    tree = leaves(dtype)
    tree[1][0] = np.inf
    tree[3][:] = np.nan
    tx = tx_without_promotion(
        optclip.clip_by(
            1.0, over=over, response=response, strict=is_strict, nonfinite=policy
        )
    )
    clip = quick_jit(lambda updates: tx.update(updates, tx.init(updates))[0])
    clipped = clip(tree)
    assert_close(clipped, [clip([x])[0] for x in tree])
    assert np.all(np.abs(clipped[0]) < np.abs(tree[0]))
    assert np.any(clipped[1] == 0) == (policy != "propagate")


def nines(*names):
    return {name: np.full(1, 9, np.float32) for name in names}


def by_thresholds(tree, limit):
    """Thresholds may be traced or None, and an axis may be a number."""
    limits = {"a": limit, "b": np.full(1, 2, np.float32), "c": None}
    return functional.clip_by_norm(tree, limits, axis=0)


def by_bounds(tree, limit):
    lower = {"a": -1.0, "b": np.full(1, -2, np.float32), "c": None}
    upper = {"a": limit[None], "b": 2.0, "c": None}
    tx = tx_without_promotion(
        optclip.clip_by(_thresholds.bounds(lower, upper), over="element")
    )
    return tx.update(tree, tx.init(tree))[0]


@pytest.mark.parametrize("clip", [by_thresholds, by_bounds])
def test_thresholds_of_several_shapes_keep_to_their_leaves(clip):
    clipped = quick_jit(clip)(nines("a", "b", "c"), np.float32(3))
    assert {key: float(x[0]) for key, x in clipped.items()} == {"a": 3, "b": 2, "c": 9}


def halved(norm, threshold):
    return 0.5 if norm > threshold else 1.0


def test_user_response_eager_few_norms_gets_numbers():
    """Python's `if` works outside jit; four norms are one vector."""
    tree = [np.full(3, x, np.float32) for x in (9, 0.1, 9)]
    tx = optclip.clip_by_norm(1.0, response=halved)
    clipped, _ = tx.update(tree, tx.init(tree))
    chex.assert_trees_all_equal(clipped, [tree[0] / 2, tree[1], tree[2] / 2])


@dataclasses.dataclass(frozen=True)
class Keeps:
    """Remember the result of `keep` for a plain number."""

    limit: Any

    def init(self, norm):
        return norm

    def update(self, seen, memory):
        return jnp.float32(1), seen.keep(self.limit)


@pytest.mark.parametrize(
    ("limit", "kept", "options"),
    [
        (2.0, 2.0, {"over": "element"}),
        (1e300, np.finfo(np.float32).max, {"over": "leaf", "response": "normalize"}),
        (0.1, np.float32(0.1) * (1 - 2**-13), {"over": "leaf", "strict": True}),
    ],
)
def test_keep_plain_number_is_rounded_down_to_a_finite_one(limit, kept, options):
    shapes = [(1,), (1, 1), (4,)]
    tree = [np.full(shape, 8, np.float32) for shape in shapes]
    tx = optclip.clip_by(Keeps(limit), **options)
    _, state = quick_jit(tx.update)(tree, tx.init(tree))
    memory = jax.tree.leaves(state.clip_memory)
    assert [x.shape for x in memory] == (shapes if limit == 2 else [(3,)])
    for x in memory:
        np.testing.assert_allclose(x, kept, rtol=1e-5)
        assert np.all(np.isfinite(x) & (np.float64(x) <= limit))


def test_clip_by_norm_axis_split_over_one_device_keeps_sharding():
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:1])
    place = NamedSharding(mesh, P(None, "x"))
    values = [np.full((4, 1), x, np.float32) for x in (3, 0.1, 0.1, 0.1)]
    with jax.set_mesh(mesh):
        tree = jax.device_put(values, place)
        clipped = quick_jit(lambda t: functional.clip_by_norm(t, 1.0, axis=0))(tree)
    np.testing.assert_allclose(clipped[0], np.full((4, 1), 0.5), rtol=1e-6)
    chex.assert_trees_all_equal(clipped[1:], values[1:])
    assert all(x.sharding == place for x in clipped)


def kernels(method, num_leaves):
    """Return the distinct kernels of clipping per leaf, as XLA for CPU prints them."""
    tree = [jax.ShapeDtypeStruct((5,), jnp.float32)] * num_leaves
    tx = method()
    state = jax.eval_shape(tx.init, tree)
    text = quick_jit(tx.update).lower(tree, state, tree).compile().as_text()
    bodies = re.findall(r"^%fused_computation\S* [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    plain = re.compile(r", metadata=\{[^}]*\}|(?<=[a-z_])[\d.]+|\.\d+")
    return {plain.sub("", body) for body in bodies}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(lambda: optclip.clip_by_norm(1.0, record="leaves"), id="recorded"),
        pytest.param(optclip.recipes.agc, id="agc"),
    ],
)
def test_clip_by_norm_leaves_share_their_kernels(method):
    """A kernel with the number of its leaf in it would be compiled for each leaf."""
    of_few, of_many = kernels(method, 10), kernels(method, 20)
    assert of_few
    # A kernel compiled for each leaf would add ten.
    assert len(of_many) <= len(of_few) + 5
