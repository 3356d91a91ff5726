"""Carries, resets, and clips behind an optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from tests.support import helpers


def steps_of(tx, updates, params=None):
    update = helpers.quick_jit(lambda u, s: tx.update(u, s, params))
    state = tx.init(updates[0] if params is None else params)
    found = []
    for u in updates:
        out, state = update(u, state)
        found.append(out)
    return found, state


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (optclip.with_error_feedback, "ErrorFeedbackState"),
        (optclip.with_periodic_reset, "PeriodicResetState"),
        (optclip.skip, "SkipState"),
        (lambda inner: optclip.clip_after(inner, inner), "ClipAfterState"),
    ],
)
def test_the_state_of_what_is_wrapped_is_refused(wrap, name):
    inner = optclip.clip_by_global_norm(1.0)
    with pytest.raises(
        TypeError, match=f"`state` must be the {name} of .*got Clip.*Give"
    ):
        wrap(inner).update(jnp.ones(2), inner.init(jnp.ones(2)))


def test_carry_keeps_its_dtypes_and_what_is_not_clipped():
    tree = {"h": jnp.array([3.0, 0.1], jnp.bfloat16), "n": jnp.arange(2), "none": None}
    tx = optclip.with_error_feedback(optclip.clip_by_value(1.0))
    found, state = steps_of(tx, [tree, tree])
    assert found[0]["h"].dtype == jnp.bfloat16
    assert state.feedback_residual["h"].dtype == jnp.float32
    assert state.feedback_residual["n"] is None
    chex.assert_trees_all_equal(found[0]["n"], tree["n"])
    # What bfloat16 could not hold is carried too.
    left = sum(x["h"].astype(jnp.float32) for x in found) + state.feedback_residual["h"]
    np.testing.assert_allclose(left, 2 * tree["h"].astype(jnp.float32), rtol=1e-6)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(tree))


def test_carry_around_what_remembers():
    """Its memory keeps the type it began with, so that loops take it."""
    tx = optclip.with_error_feedback(optax.trace(0.9))
    grads = {"h": jnp.ones(2, jnp.bfloat16)}
    state = jax.eval_shape(tx.init, grads)
    _, after = jax.eval_shape(tx.update, grads, state)
    assert after == state


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_carry_is_never_poisoned(bad):
    tx = optclip.with_error_feedback(optclip.clip_by_global_norm(1.0))
    found, state = steps_of(tx, [jnp.array([3.0]), jnp.array([bad]), jnp.array([0.0])])
    assert not np.isfinite(found[1][0])
    np.testing.assert_allclose(found[2], [1.0])
    np.testing.assert_allclose(state.feedback_residual, [1.0])


def test_what_was_paid_out_is_not_carried():
    """A bad leaf does not keep what the others carried, nor make it come twice."""
    tx = optclip.with_error_feedback(optclip.clip_by_norm(1.0, nonfinite="zero"))
    steps = [(3.0, 1.0), (0.0, jnp.nan), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    found, _ = steps_of(
        tx, [{"a": jnp.array([a]), "b": jnp.array([b])} for a, b in steps]
    )
    np.testing.assert_allclose([float(x["a"][0]) for x in found], [1, 1, 1, 0, 0])
    assert found[1]["b"][0] == 0
    # By the tree, what the policy held back comes later.
    tx = optclip.with_error_feedback(
        optclip.clip_by_global_norm(10.0, nonfinite="zero")
    )
    steps = [(3.0, jnp.nan), (0.0, 0.0)]
    found, _ = steps_of(
        tx, [{"a": jnp.array([a]), "b": jnp.array([b])} for a, b in steps]
    )
    assert [float(x["a"][0]) for x in found] == [0, 3]


def test_carry_refuses_what_is_sparse():
    mat = BCOO((jnp.ones(2), jnp.array([[0, 0], [1, 1]])), shape=(2, 2))
    tx = optclip.with_error_feedback(optclip.clip_by_value(1.0))
    with pytest.raises(
        TypeError, match="'m' must be dense, got a BCOO matrix.*todense"
    ):
        tx.init({"m": mat})


def test_a_carry_takes_a_tree_without_leaves():
    tx = optclip.with_error_feedback(optclip.clip_by_value(1.0))
    assert tx.update({"n": 3}, tx.init({"n": 3}))[0] == {"n": 3}


def test_reset_begins_the_moments_anew():
    grads = [jnp.array([float(i + 1)]) for i in range(7)]
    tx = optclip.with_periodic_reset(optax.scale_by_adam(), 4, warmup=0, keep=None)
    found, state = steps_of(tx, grads)
    first, _ = steps_of(optax.scale_by_adam(), grads[:3])
    anew, _ = steps_of(optax.scale_by_adam(), grads[3:])
    np.testing.assert_allclose(found, first + anew, rtol=1e-6)
    assert optax.tree.get(state, "count") == 4


def test_reset_keeps_counts_and_records():
    clip = optclip.clip_by_global_norm(optclip.thresholds.quantile(0.5, 8))
    tx = optclip.with_periodic_reset(
        optax.chain(clip, optax.scale_by_adam()), 3, warmup=0
    )
    _, state = steps_of(tx, [jnp.array([9.0]), jnp.array([1.0]), jnp.array([2.0])])
    assert optax.tree.get(state, "count") == 3
    memory = state.reset_inner[0].clip_memory[0][0]
    assert memory.num_known == 1
    assert state.reset_inner[0].clip_step == 3
    mu = optax.tree.get(state, "mu")
    # Only the third update, of norm 2, and b1 = 0.9.
    np.testing.assert_allclose(mu, [0.2], rtol=1e-6)


def test_a_parameter_called_count_is_no_count():
    tree = {"count": jnp.ones(1), "clip_step": jnp.ones(1)}
    tx = optclip.with_periodic_reset(optax.trace(1.0), 2, warmup=0)
    found, _ = steps_of(tx, [tree] * 3)
    for name in tree:
        np.testing.assert_array_equal([x[name][0] for x in found], [1.0, 1.0, 2.0])


@pytest.mark.parametrize(("keep", "count"), [("counts", 3), (None, 1)])
def test_counts_are_reset_unless_kept(keep, count):
    tx = optclip.with_periodic_reset(optax.scale_by_adam(), 3, warmup=0, keep=keep)
    _, state = steps_of(tx, [jnp.ones(1)] * 3)
    assert optax.tree.get(state, "count") == count
    tx = optclip.with_periodic_reset(
        optax.scale_by_adam(), 3, warmup=0, keep=lambda path: "mu" in path
    )
    _, state = steps_of(tx, [jnp.ones(1)] * 3)
    np.testing.assert_allclose(optax.tree.get(state, "mu"), [1 - 0.9**3], rtol=1e-6)


def test_reset_warms_up_again():
    tx = optclip.with_periodic_reset(optax.identity(), 10, warmup=4, floor=0.2)
    found, _ = steps_of(tx, [{"x": jnp.ones(1, jnp.bfloat16), "n": 3}] * 16)
    factors = [float(tree["x"][0]) for tree in found]
    k = np.arange(4)
    cosine = 1 - 0.8 * (1 + np.cos(np.pi * k / 5)) / 2
    np.testing.assert_allclose(factors[9:13], cosine, rtol=4e-3)
    assert factors[:9] == [1.0] * 9
    assert factors[13:] == [1.0] * 3
    assert found[0]["n"] == 3
    assert found[0]["x"].dtype == jnp.bfloat16


def test_reset_leaves_what_it_does_not_scale_to_the_bit():
    """A product with 1 would make zeros of subnormal numbers."""
    tx = optclip.with_periodic_reset(optax.identity(), 2, warmup=2, floor=0.5)
    tiny = jnp.array([1e-40, 1.0], jnp.float32)
    found, _ = steps_of(tx, [tiny] * 3)
    bits = [np.asarray(x).view(np.uint32) for x in (tiny, *found)]
    np.testing.assert_array_equal(bits[1], bits[0])
    assert found[1][1] == 0.5


def test_what_is_kept_of_parameters_is_of_those_at_the_reset():
    """What an optimizer keeps of the parameters is of those at the reset."""

    def init(params):
        return params

    def update(updates, state, params=None):
        del params
        return jax.tree.map(jnp.add, updates, state), state

    tx = optclip.with_periodic_reset(
        optax.GradientTransformation(init, update), 2, warmup=0
    )
    params = jnp.array([5.0])
    step = helpers.quick_jit(tx.update)
    out, state = step(jnp.zeros(1), tx.init(params), params)
    out, state = step(jnp.zeros(1), state, 2 * params)
    np.testing.assert_array_equal(out, [10.0])


class OfWhatItWasGiven:
    """The norm of the gradients; it keeps what else it was shown."""

    def __init__(self):
        self.shown = {}

    def init(self, norm):
        return ()

    def update(self, seen, memory):
        self.shown = {**seen.extra, "updates": seen.updates}
        return seen.measure(seen.extra["gradients"]), memory


def test_after_shows_the_gradients():
    rule = OfWhatItWasGiven()
    tx = optclip.clip_after(optax.scale(3.0), optclip.clip_by_global_norm(rule))
    grads = jnp.array([0.0, 2.0])
    found, state = tx.update(grads, tx.init(grads), None, value=1.0)
    np.testing.assert_allclose(found, [0.0, 2.0])
    assert set(rule.shown) == {"gradients", "inner_state", "updates", "value"}
    np.testing.assert_array_equal(rule.shown["updates"], [0.0, 6.0])
    assert optclip.metrics(state)["clip/norm"] == 6
    assert optclip.metrics(state)["clip/threshold"] == 2


def test_a_rule_of_gradients_needs_them():
    rule = optclip.thresholds.of_gradients(optclip.thresholds.moment())
    tx = optclip.clip_by_value(rule)
    with pytest.raises(
        ValueError, match=r"`gradients` must be .*Wrap.*optclip.clip_after"
    ):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
    # What is not finite in them counts as 0, and is not learned from.
    update = helpers.quick_jit(tx.update)
    _, state = update(jnp.ones(1), tx.init(jnp.ones(1)), gradients=jnp.ones(1))
    found, after = update(jnp.ones(1), state, gradients=jnp.array([jnp.nan]))
    np.testing.assert_allclose(found, [0.0099], rtol=1e-5)
    chex.assert_trees_all_equal(after.clip_memory, state.clip_memory)
