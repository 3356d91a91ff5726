"""`with_history` keeps the last steps in the state, and `history` reads them."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import optclip
from optclip import plot, thresholds
from tests.support import covering, helpers
from tests.support.steps import metrics_of, over_steps, scanned, unstacked

PARAMS = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
CLIP = optclip.clip_by_global_norm(2.0, record="leaves")
RULE = optclip.clip_by_norm(thresholds.quantile(0.5, window=4), name="rule/s")
CHAIN = optax.chain(CLIP, RULE, optax.adam(1e-2))
SKIP = optclip.skip(CHAIN, max_norm=50.0, record="leaves")
KEPT = optclip.with_history(SKIP, steps=4)
NAN = np.nan


def rows_of(sizes):
    """Return a row of gradients per step; `w` has the norm `2 * size`."""
    sizes = np.float32(sizes)
    return {
        "w": sizes[:, None, None] * np.ones((2, 2), np.float32),
        "b": sizes[:, None] * np.float32([0.0, 0.0, 1.0]),
    }


def last_state(tx, sizes, **extra):
    _, states = over_steps(tx, rows_of(sizes), rows_of(sizes), **extra)
    return unstacked(states)[-1]


def test_history_has_metrics_and_loss_of_last_steps():
    sizes = [1.0, 2.0, 100.0, 3.0, NAN, 0.5]
    loss = np.float32([6, 5, 4, 3, 2, 1])
    _, states = over_steps(KEPT, rows_of(sizes), rows_of(sizes), value=loss)
    expected = jax.device_get(metrics_of(states.history_inner))
    found = optclip.history(unstacked(states)[-1])
    assert list(found) == [
        "step",
        *sorted(found.keys() - {"step", "loss"}, key=list(found).index),
        "loss",
    ]
    assert found.keys() == expected.keys() | {"step", "loss"}
    np.testing.assert_array_equal(found["step"], [2, 3, 4, 5])
    np.testing.assert_array_equal(found["loss"], loss[2:])
    is_skipped = np.array([True, False, True, False])
    for key, numbers in expected.items():
        is_stale = key.startswith(("clip/", "rule/s/")) & (
            not key.endswith(("clipped", "rate", "nonfinite", "steps"))
        )
        wanted = np.where(is_skipped & is_stale, NAN, numbers[2:])
        np.testing.assert_array_equal(found[key], wanted, err_msg=key)
    assert found["skip/skipped"][-1] == 2


# Wrappers of optax that do not call their optimizer in each step, and those calls.
SIZES = [1.0, 2.0, NAN, 3.0, NAN, NAN, NAN, 4.0]
EVERY_OTHER = {"should_transform_fn": lambda step: step % 2 == 0}
WRAPPERS = {
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 2), [0, 1, 3, 6, 7]),
    "skip_not_finite": (
        lambda tx: optax.MultiSteps(
            tx, 1, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        [0, 1, 3, 7],
    ),
    "mask": (lambda tx: optax.conditionally_mask(tx, **EVERY_OTHER), [0, 2, 4, 6]),
    "transform": (
        lambda tx: optax.conditionally_transform(tx, **EVERY_OTHER),
        [0, 2, 4, 6],
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_history_of_step_that_optax_does_not_pass_on(name):
    """Around `apply_if_finite` it is NaN, around others repeated; inside it is none."""
    wrap, called = WRAPPERS[name]
    alone = optclip.history(
        last_state(optclip.with_history(CHAIN), np.array(SIZES)[called])
    )
    inside = optclip.history(last_state(wrap(optclip.with_history(CHAIN)), SIZES))
    chex.assert_trees_all_equal(inside, alone)
    state = last_state(optclip.with_history(wrap(CHAIN)), SIZES)
    around = optclip.history(state)
    last = np.searchsorted(called, np.arange(8), side="right") - 1
    rejected = name == "apply_if_finite" and np.isin(np.arange(8), called, invert=True)
    for key in alone.keys() - {"step"}:
        is_count = {*key.split("/")} & {"clipped", "rate", "nonfinite", "steps"}
        wanted = np.where(rejected & (not is_count), NAN, alone[key][last])
        np.testing.assert_array_equal(around[key], wanted, err_msg=key)
    for summary in map(optclip.summary, (state, around)):
        is_named = "not finite in 4 of 8 steps: 2, 4 to 6" in summary
        assert is_named == (name == "apply_if_finite"), summary


def test_history_of_missing_losses_is_nan():
    update, state = helpers.quick_jit(KEPT.update), KEPT.init(PARAMS)
    found = optclip.history(state)
    assert "loss" not in found
    assert {len(x) for x in found.values()} == {0}
    for extra in ({}, {"loss": 3.0}):
        _, state = update(PARAMS, state, PARAMS, **extra)
    np.testing.assert_array_equal(optclip.history(state)["loss"], [NAN, 3])


def test_plots_and_summary_leave_out_what_did_not_run_in_skipped_steps():
    """A step may be skipped because of its loss, and no norm is then not finite."""
    tx = optclip.skip(CHAIN, max_loss=2.0)
    losses = np.float32([1.0, 9.0] * 10)
    state = last_state(optclip.with_history(tx), np.arange(1, 21), value=losses)
    found = optclip.history(state)
    assert "clip: norm 42.49, threshold 2" in optclip.summary(found)
    assert "skip: norm 44.72" in optclip.summary(found)
    after = plot.norms(found).get_lines()[1]
    assert after.get_label() == "after"
    assert np.count_nonzero(np.nan_to_num(after.get_ydata())) == 10
    np.testing.assert_allclose(plot.rate(found).get_lines()[0].get_ydata()[-1], 0.5)
    labels = [line.get_label() for line in plot.norms(found, clip="clip").get_lines()]
    assert "not finite" not in labels
    stalled = {key: x[1::2] for key, x in found.items()}
    assert len(plot.rate(stalled, clip="clip").get_lines()[0].get_ydata()) == 10
    assert optclip.suggest(found, clip="clip", skip_first=0).steps == 10
    assert optclip.suggest(found, skip_first=0).steps == 20


ROUND_TRIPS = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "dict": serialization.to_state_dict,
    "bytes": lambda state: serialization.msgpack_restore(serialization.to_bytes(state)),
    "floats": lambda state: jax.tree.map(np.float32, state),
    "outer": lambda state: {"step": 3, "opt": (state, optax.EmptyState())},
}


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_history_of_restored_state_needs_no_optimizer(trip):
    state = last_state(KEPT, [1.0, 2.0, 100.0])
    chex.assert_trees_all_equal(
        optclip.history(ROUND_TRIPS[trip](state)), optclip.history(state)
    )


def test_restart_with_other_length_continues_rows_of_state():
    state = last_state(KEPT, [1.0, 2.0])
    longer = optclip.with_history(SKIP, steps=9)
    for size in (3.0, 4.0, 5.0):
        grads = jax.tree.map(lambda x: x[0], rows_of([size]))
        _, state = helpers.quick_jit(longer.update)(grads, state, PARAMS)
    found = optclip.history(state)
    np.testing.assert_array_equal(found["step"], [1, 2, 3, 4])
    np.testing.assert_allclose(found["skip/leaf_norm/b"], [2, 3, 4, 5])


@pytest.mark.parametrize("mode", ["vmap", "masked", "partition", "multi", "reset"])
def test_history_works_under_other_transformations(mode):
    kept, labels = optclip.with_history(CLIP, steps=2), {"w": "kept", "b": "other"}
    tx = {
        "vmap": kept,
        "masked": optax.masked(kept, {"w": True, "b": False}),
        "partition": optax.partition({"kept": kept, "other": optax.sgd(1.0)}, labels),
        "multi": optax.MultiSteps(kept, 2),
        "reset": optclip.with_periodic_reset(kept, 2, warmup=0),
    }[mode]
    sizes = [1.0, 3.0, 5.0, 7.0]
    if mode == "vmap":
        rows = jax.tree.map(lambda x: np.stack([x, 2 * x]), rows_of(sizes))
        states = jax.vmap(scanned(tx))((rows, rows, {}))[1]
        with pytest.raises(ValueError, match=r"ensemble.*Index it first"):
            optclip.history(states)
        state = jax.tree.map(lambda x: x[1, -1], states)
    else:
        state = last_state(tx, sizes)
    found = optclip.history(state)
    expected = {"vmap": [20, 28], "multi": [4, 12]}.get(mode, [10, 14])
    np.testing.assert_allclose(found["clip/leaf_norm/w"], expected, rtol=1e-6)
    np.testing.assert_array_equal(found["step"], [0, 1] if mode == "multi" else [2, 3])


KEPT_CLIP = optclip.with_history(CLIP)
KEPT_STATE = KEPT_CLIP.init(PARAMS)
OTHER = optclip.with_history(optclip.clip_by_norm(1.0))
OTHER_STATE = KEPT_STATE._replace(history_inner=OTHER.init(PARAMS).history_inner)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: optclip.with_history(optax.adam(1e-3)).init(PARAMS),
            *(ValueError, "`inner` must be an optimizer with a"),
        ),
        (
            lambda: optclip.history(CLIP.init(PARAMS)),
            *(ValueError, "Wrap the optimizer"),
        ),
        (
            lambda: optclip.history((KEPT_STATE, KEPT_STATE)),
            *(ValueError, r"got 2, at \['0', '1'\]"),
        ),
        (
            lambda: jax.eval_shape(lambda: optclip.history(KEPT_CLIP.init(PARAMS))),
            *(TypeError, "outside jax.jit"),
        ),
        (
            lambda: KEPT_CLIP.update(PARAMS, KEPT_STATE, value=jnp.ones(2)),
            *(ValueError, "`value` must be the loss"),
        ),
        # The state of other metrics.
        (
            lambda: OTHER.update(PARAMS, OTHER_STATE),
            *(ValueError, r"unknown \['clip/leaf_norm/b'"),
        ),
        (
            lambda: jax.eval_shape(OTHER.update, PARAMS, OTHER_STATE),
            *(ValueError, "of the metrics that `inner` records now"),
        ),
    ],
)
def test_wrong_use_raises(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_donated_rows_are_not_copied():
    """Neither around `skip` nor inside of it, nor in a loop."""
    inside = optclip.skip(optclip.with_history(CLIP, steps=4), max_norm=9.0)
    for i, tx in enumerate((KEPT, inside)):
        state = jax.eval_shape(tx.init, PARAMS)
        (rows,) = (x for x in jax.tree.leaves(state) if x.ndim == 2 and len(x) == 4)
        shape = f"f32[{rows.shape[0]},{rows.shape[1]}]"

        def loop(grads, state, tx=tx):
            def body(state, _):
                return tx.update(grads, state, grads)[1], None

            return jax.lax.scan(body, state, length=3)[0]

        for function in covering.rotated((tx.update, loop), i):
            step = helpers.optimized_jit(function, donate_argnums=1)
            text = step.lower(PARAMS, state).compile().as_text()
            assert shape in text
            copies = [
                x for x in text.splitlines() if f"= {shape}" in x and " copy(" in x
            ]
            assert not copies
