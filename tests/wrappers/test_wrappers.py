"""Test error feedback, periodic resets, and clipping before and after an optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers
from tests.support.running_rules import UserRule
from tests.support.steps import over_steps, unstacked


def steps_of(tx, updates):
    """Return the updates of each step, and the last state."""
    stacked = jax.tree.map(lambda *x: np.stack(x), *updates)
    outs, states = map(unstacked, over_steps(tx, stacked))
    return outs, states[-1]


def vectors(*numbers):
    return [np.float32([number]) for number in numbers]


def test_error_feedback_carries_rounding_and_keeps_dtypes():
    half = np.asarray(jnp.array([3.0, 0.1], jnp.bfloat16))
    tree = {"h": half, "n": np.arange(2), "none": None}
    tx = optclip.recipes.uclip(optclip.clip_by_value(1.0))
    updates, state = steps_of(tx, [tree, tree])
    helpers.assert_same_types(updates[0], tree)
    residual = state.feedback_residual
    assert residual["h"].dtype == np.float32
    assert residual["n"] is None
    np.testing.assert_array_equal(updates[0]["n"], tree["n"])
    total = sum(x["h"].astype(np.float32) for x in updates) + residual["h"]
    np.testing.assert_allclose(total, 2 * half.astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "size", "c"),
    [("bfloat16", 1.0, 1.1), ("float16", 6e4, 7e4), ("float8_e4m3fn", 440, 500)],
)
def test_error_feedback_rounds_within_strict_threshold(dtype, size, c):
    """Entries whose sum with the residual exceeds the largest float16 stay finite."""
    clip = optclip.clip_by_global_norm(c, strict=True)
    rows = np.array([[1.0, 0.9], [1.0, 0.1], [0.7, 0.8]]) * size
    updates, state = steps_of(optclip.recipes.uclip(clip), rows.astype(dtype))
    norms = [np.linalg.norm(np.float64(u)) for u in updates]
    assert max(norms) <= c < np.linalg.norm(rows[0])
    total = np.sum(np.float64(updates), 0) + state.feedback_residual
    np.testing.assert_allclose(total, np.sum(np.float64(rows.astype(dtype)), 0), 1e-6)


def test_error_feedback_of_float64_beside_float32_params_keeps_state():
    tx, narrow = (
        optclip.recipes.uclip(optclip.clip_by_value(1.0)),
        np.ones(2, np.float32),
    )
    with jax.enable_x64(True):
        state = jax.eval_shape(tx.init, narrow)
        out, new = jax.eval_shape(tx.update, np.float64(narrow), state)
    assert (out.dtype, new) == (np.float64, state)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        # The residual waits until a step is finite.
        (optclip.clip_by_global_norm(2.0), [2, np.nan, 1, 0]),
        # What the other leaf paid out is not carried, nor does it come twice.
        (optclip.clip_by_norm(1.0, nonfinite="zero"), [1, 1, 1, 0]),
        # Updates that the policy withholds come later.
        (optclip.clip_by_global_norm(2.0, nonfinite="zero"), [2, 0, 1, 0]),
    ],
)
def test_error_feedback_next_to_nonfinite_leaf_adds_residual_once(clip, expected, bad):
    steps = [(3.0, 0.0), (0.0, bad), (0.0, 0.0), (0.0, 0.0)]
    trees = [{"a": np.float32(a), "b": np.float32(b)} for a, b in steps]
    updates, _ = steps_of(optclip.recipes.uclip(clip), trees)
    np.testing.assert_allclose([x["a"] for x in updates], expected)
    assert updates[1]["b"] == 0 or np.isnan(expected[1])


def test_periodic_reset_restarts_moments_and_counts():
    grads = vectors(*range(1, 8))
    tx = optclip.with_periodic_reset(
        optax.scale_by_adam(), 4, warmup=0, keep_counts=False
    )
    updates, state = steps_of(tx, grads)
    first, _ = steps_of(optax.scale_by_adam(), grads[:3])
    second, _ = steps_of(optax.scale_by_adam(), grads[3:])
    np.testing.assert_allclose(updates, first + second, rtol=1e-6)
    assert optax.tree.get(state, "count") == 4


def test_periodic_reset_keeps_counts_and_records():
    clip = optclip.clip_by_global_norm(optclip.thresholds.quantile(0.5, 8))
    chain = optax.chain(clip, optax.scale_by_adam())
    tx = optclip.with_periodic_reset(chain, 3, warmup=0)
    _, state = steps_of(tx, vectors(9.0, 1.0, 2.0))
    assert optax.tree.get(state, "count") == 3
    clip_state = state.reset_inner[0]
    assert helpers.memories(clip_state)[0][0].num_known == 1
    assert clip_state.clip_step == 3
    # Only the third update, of norm 2, and b1 = 0.9.
    np.testing.assert_allclose(optax.tree.get(state, "mu"), [0.2], rtol=1e-6)


def test_periodic_reset_resets_parameter_called_count():
    tree = {"count": np.float32(1), "clip_step": np.float32(1)}
    tx = optclip.with_periodic_reset(optax.trace(1.0), 2, warmup=0)
    updates, _ = steps_of(tx, [tree] * 3)
    for name in tree:
        assert [x[name] for x in updates] == [1.0, 1.0, 2.0]


def test_periodic_reset_before_warm_up_is_bit_identical():
    """A product with 1 would flush subnormal numbers to zero."""
    tx = optclip.with_periodic_reset(optax.identity(), 2, warmup=2)
    half = np.asarray(jnp.ones((), jnp.bfloat16))
    tree = {"tiny": np.float32([1e-40, 1.0]), "half": half, "n": np.int32(3)}
    updates, _ = steps_of(tx, [tree] * 3)
    helpers.assert_identical(updates[0], tree)
    # After the reset the first factor is 0.01.
    np.testing.assert_allclose(updates[1]["tiny"][1], 0.01, rtol=1e-6)
    helpers.assert_identical(updates[1]["half"], np.asarray(0.01, half.dtype))
    assert updates[1]["n"] == 3


def test_periodic_reset_reads_parameters_at_the_reset():
    inner = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params: (updates + state, state)
    )
    tx = optclip.with_periodic_reset(inner, 2, warmup=0)
    params = np.float32([[5.0], [10.0]])
    updates, _ = over_steps(tx, 0 * params, params)
    np.testing.assert_array_equal(updates[1], [10.0])


def test_clip_after_passes_gradients_to_rule():
    given = {}

    def norm_of_gradients(seen, memory):
        given.update(seen.extra, updates=seen.updates)
        return seen.measure(seen.extra["gradients"]), memory

    clip = optclip.clip_by_global_norm(UserRule((), norm_of_gradients))
    tx = optclip.clip_after(optax.scale(3.0), clip)
    grads = np.float32([0.0, 2.0])
    updates, state = tx.update(grads, tx.init(grads), None, value=1.0)
    np.testing.assert_allclose(updates, [0.0, 2.0])
    assert set(given) == {"gradients", "inner_state", "updates", "value"}
    np.testing.assert_array_equal(given["updates"], [0.0, 6.0])
    metrics = optclip.metrics(state)
    assert (metrics["clip/norm"], metrics["clip/threshold"]) == (6, 2)


OF_GRADIENTS = optclip.thresholds.of_gradients(optclip.thresholds.moment())


def test_rule_of_gradients_ignores_nonfinite_gradient():
    tx = optclip.clip_by_value(OF_GRADIENTS)
    (one, bad), update = vectors(1.0, np.nan), helpers.quick_jit(tx.update)
    _, state = update(one, tx.init(one), gradients=one)
    updates, after = update(one, state, gradients=bad)
    np.testing.assert_allclose(updates, [0.0099], rtol=1e-5)
    chex.assert_trees_all_equal(after.clip_memory, state.clip_memory)


INNER = {
    "adamw": optax.adamw(0.1),
    "chain of one": optax.chain(optax.scale_by_adam()),
    "one named tuple": optax.scale_by_adam(),
    "no state": optax.scale(-1.0),
    "empty tuple": optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (updates, state)
    ),
    "array": optax.GradientTransformation(
        lambda params: jnp.zeros(3),
        lambda updates, state, params=None: (updates, state),
    ),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_clip_before_equals_chain_and_stores_inner_state_first(inner):
    clip, params = optclip.clip_by_global_norm(1.0), helpers.gradients()
    rows = jax.tree.map(lambda *x: np.stack(x), *map(helpers.gradients, (1, 2)))
    given = rows, jax.tree.map(lambda x: np.stack([x, x]), params)
    updates, states = over_steps(optclip.clip_before(inner, clip), *given)
    expected, chained = over_steps(optax.chain(clip, inner), *given)
    helpers.assert_identical(updates, expected)
    *in_front, clip_state = states
    inner_state = inner.init(params)
    is_plain = type(inner_state) is tuple and len(inner_state) > 0
    in_front = tuple(in_front) if is_plain else in_front[0]
    helpers.assert_identical((in_front, clip_state), chained[::-1])
    assert optclip.metrics(unstacked(states)[-1])["clip/rate"] == 1


def test_clip_before_passes_state_of_optimizer_to_rule():
    """Three times the root of Adam's second moment, before the step."""

    def of_adam(seen, memory):
        (adam,) = seen.extra["inner_state"]
        return 3 * jnp.sqrt(adam.nu / (1 - 0.999**adam.count)), memory

    clip = optclip.clip_by_value(UserRule((), of_adam))
    tx = optclip.clip_before(optax.chain(optax.scale_by_adam()), clip)
    one, inner = np.float32([1, 2]), optax.scale_by_adam()
    _, adam = inner.update(one, inner.init(one))
    _, after = tx.update(np.float32([-50, 1]), (adam, tx.init(one)[1]))
    np.testing.assert_allclose(after[0].nu, [0.999e-3 + 9e-3, 4.996e-3], rtol=1e-4)


ADAM = optax.scale_by_adam()


@pytest.mark.parametrize(
    ("absent", "record"), [(None, True), (optax.EmptyState(), False)]
)
def test_clip_before_accepts_absent_state_of_fixed_clip(absent, record):
    tx = optclip.clip_before(ADAM, optclip.clip_by_global_norm(1.0, record=record))
    params = np.full(2, 3.0, np.float32)
    _, (after, same) = tx.update(params, (tx.init(params)[0], absent), params)
    assert same is absent
    np.testing.assert_allclose(np.linalg.norm(after.mu), 0.1, rtol=1e-6)
