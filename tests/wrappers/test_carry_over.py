"""Test states moved to other leaves and other optimizers, against unbroken runs."""

import functools

import jax
import numpy as np
import optax
import pytest

import optclip
from optclip import _thresholds
from optclip import thresholds as T
from tests.support import covering, helpers

SHAPES = {"a": (2, 3), "b": (3,), "c": (2, 2)}


def grads_at(step, names):
    rng = np.random.default_rng(step)
    tree = {k: rng.normal(size=s) * (1 + step % 3) for k, s in SHAPES.items()}
    return {k: np.float32(tree[k]) for k in names}


@functools.cache
def compiled(tx):
    return helpers.quick_jit(tx.update)


def run(tx, state, names, steps):
    update = compiled(tx)
    for step in steps:
        tree = grads_at(step, names)
        updates, state = update(tree, state, tree, value=np.float32(step))
    return updates, state


def params(names):
    return grads_at(0, names)


LEAF = {
    "quantile": optclip.clip_by_norm(T.quantile(0.5, 4), record="leaves"),
    "ema": optclip.clip_by_norm(T.ema(1.0, 0.5, 2), record="leaves"),
    "zscore": optclip.clip_by_norm(T.zscore(1.0, 0.5, 2), record="leaves"),
    "slices": optclip.clip_by(T.quantile(0.5, 4), over=optclip.axes(0)),
    "elements": optclip.clip_by_value(_thresholds.second_moment(1.0, warmup=2)),
    "statistic": optclip.clip_by_value(T.of("max", T.quantile(0.5, 4))),
    "spectral": optclip.clip_by_spectral_norm(1.0, method="power_iteration"),
    "groups": optclip.clip_by_group_norm(
        T.quantile(0.5, 4), optclip.by_path(lambda path: path)
    ),
}


@pytest.mark.parametrize("name", LEAF)
def test_kept_leaves_continue_and_new_ones_start_anew(name):
    """The leaf "b" is dropped and "c" is added, which changes positions and digests.

    In `ema` the warm-up couples leaves, and is over when leaves change.
    """
    tx = optax.chain(LEAF[name], optax.scale_by_adam())
    old, new = ("a", "b"), ("a", "c")
    _, state = run(tx, tx.init(params(old)), old, range(4))
    moved = optclip.carry_over(tx, params(old), state, tx, params(new))
    assert jax.tree.structure(moved) == jax.tree.structure(tx.init(params(new)))
    updates, _ = run(tx, moved, new, range(4, 7))
    unbroken, _ = run(tx, state, old, range(4, 7))
    np.testing.assert_array_equal(updates["a"], unbroken["a"])
    assert np.any(updates["c"] != 0)
    restarted, _ = run(tx, tx.init(params(new)), new, range(4, 7))
    assert np.any(updates["a"] != restarted["a"])
    # The count of Adam goes on, so only the clipping of the new leaf starts anew.
    clip = LEAF[name]
    alone, _ = run(clip, moved[0], new, range(4, 6))
    first, _ = run(clip, clip.init(params(new)), new, range(4, 6))
    if name != "ema":
        np.testing.assert_array_equal(alone["c"], first["c"])


@pytest.mark.parametrize(
    "tx",
    [
        optclip.with_history(optclip.skip(optax.adam(0.1), max_loss=T.ema()), 3),
        optax.named_chain(("b", optclip.clip_by_norm(T.ema())), ("a", optax.sgd(0.1))),
    ],
)
def test_state_of_same_optimizer_is_unchanged(tx):
    tree = params("ab")
    _, state = run(tx, tx.init(tree), "ab", range(5))
    moved = optclip.carry_over(tx, tree, state, tx, tree)
    helpers.assert_identical(moved, state)


CHAIN = optax.chain(
    optclip.clip_by_norm(T.quantile(0.5, 4), name="leaf"),
    optclip.clip_by_global_norm(T.quantile(0.5, 4), name="tree"),
    optax.adam(0.1),
)
SWITCHED = {
    "skip": optclip.skip(CHAIN, max_norm=100.0),
    "history": optclip.with_history(CHAIN, 4),
    "both": optclip.with_history(optclip.skip(CHAIN), 4),
    "MultiSteps": optax.MultiSteps(CHAIN, 1).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(CHAIN, 3),
    "masked": optax.masked(CHAIN, {"a": True, "b": True}),
    "inject": optax.inject_hyperparams(lambda lr: optax.chain(CHAIN, optax.scale(lr)))(
        lr=1.0
    ),
    "longer chain": optax.chain(optclip.clip_by_value(9.0, name="new"), *[CHAIN]),
}


@pytest.mark.parametrize(
    "name",
    SWITCHED if covering.full else ["skip", "history", "MultiSteps", "inject"],
)
def test_wrapper_is_switched_on_and_off(name):
    wrapped, tree = SWITCHED[name], params("ab")
    _, state = run(CHAIN, CHAIN.init(tree), "ab", range(4))
    expected, end = run(CHAIN, state, "ab", range(4, 8))
    on = optclip.carry_over(CHAIN, tree, state, wrapped, tree)
    assert jax.tree.structure(on) == jax.tree.structure(wrapped.init(tree))
    updates, on = run(wrapped, on, "ab", range(4, 8))
    helpers.assert_identical(updates, expected)
    off = optclip.carry_over(wrapped, tree, on, CHAIN, tree)
    helpers.assert_identical(off, end)


def test_transformations_of_chain_are_matched_by_name():
    leaf, whole = optclip.clip_by_norm, optclip.clip_by_global_norm
    tx = optax.chain(leaf(1.0, name="leaf"), whole(1.0, name="tree"))
    swapped = optax.chain(whole(1.0, name="tree"), leaf(1.0, name="leaf"))
    tree = params("ab")
    _, state = run(tx, tx.init(tree), "ab", range(2))
    moved = optclip.carry_over(tx, tree, state, swapped, tree)
    helpers.assert_identical(moved, (state[1], state[0]))


def test_learned_threshold_is_switched_on_and_keeps_counts():
    fixed, learned = (optclip.clip_by_norm(x) for x in (1.0, T.quantile(0.5, 4)))
    other = optclip.clip_by_norm(T.quantile(0.5, 8))
    tree = params("ab")
    _, state = run(fixed, fixed.init(tree), "ab", range(3))
    on = optclip.carry_over(fixed, tree, state, learned, tree)
    assert optclip.metrics(on)["clip/clipped"] == 3
    helpers.assert_identical(on.clip_memory, learned.init(tree).clip_memory)
    _, on = run(learned, on, "ab", range(3, 5))
    longer = optclip.carry_over(learned, tree, on, other, tree)
    helpers.assert_identical(longer.clip_memory, other.init(tree).clip_memory)
    assert longer.clip_step == 5


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_history_keeps_newest_rows_by_name_of_column(steps):
    clip = optclip.clip_by_norm(1.0, record="leaves")
    tx, other = optclip.with_history(clip, 5), optclip.with_history(clip, steps)
    old, new = ("a", "b"), ("a", "c")
    _, state = run(tx, tx.init(params(old)), old, range(7))
    moved = optclip.carry_over(tx, params(old), state, other, params(new))
    before, after = optclip.history(state), optclip.history(moved)
    kept = min(steps, 5)
    for key in ("step", "loss", "clip/norm/a"):
        np.testing.assert_array_equal(after[key][-kept:], before[key][-kept:])
    assert after["step"][-1] == 6
    assert not np.any(after["clip/norm/c"])
    _, moved = run(other, moved, new, range(7, 9))
    assert optclip.history(moved)["step"].tolist()[-2:] == [7, 8]
    assert np.all(optclip.history(moved)["clip/norm/c"][-2:] > 0)


def test_partition_moves_states_of_its_labels():
    def make(labels):
        transforms = {"on": optax.chain(CHAIN), "off": optax.set_to_zero()}
        return optax.partition(transforms, labels)

    names = ("a", "b", "c")
    frozen = make({"a": "on", "b": "on", "c": "off"})
    unfrozen = make(dict.fromkeys(names, "on"))
    tree = params(names)
    _, state = run(frozen, frozen.init(tree), names, range(4))
    moved = optclip.carry_over(frozen, tree, state, unfrozen, tree)
    old, new = (optax.tree.get(x, "mu") for x in (state, moved))
    np.testing.assert_array_equal(new["a"], old["a"])
    assert np.any(new["a"] != 0)
    assert not np.any(new["c"])
    run(unfrozen, moved, names, range(4, 6))


@pytest.mark.parametrize("first", [(), (optax.clip(1.0),)])
def test_partition_is_switched_on_and_off(first):
    tx, tree, labels = optax.scale_by_adam(), params("ab"), {"a": "x", "b": "y"}
    whole = optax.chain(*first, tx)
    state = jax.tree.map(lambda x: x + 1, whole.init(tree))
    parts = {"x": optax.chain(LEAF["ema"], tx), "y": tx}
    split = optax.chain(*first, optax.partition(parts, labels))
    on = optclip.carry_over(whole, tree, state, split, tree)
    assert len(set(map(id, jax.tree.leaves(on)))) == len(jax.tree.leaves(on))
    off = optclip.carry_over(split, tree, on, whole, tree)
    helpers.assert_identical(off, state)


def test_memory_moves_to_rule_of_same_quantity_only():
    """The last norm of a gradient is not the first norm of the parameters."""
    previous, first = map(optclip.clip_by_norm, (T.previous_norm(), T.initial_norm()))
    tree = params("ab")
    state = previous.init(tree)
    moved = optclip.carry_over(previous, tree, state, first, tree)
    helpers.assert_identical(moved, first.init(tree))
    wrapper = optclip.recipes.uclip(previous)
    state = jax.tree.map(lambda x: x + 1, state)
    moved = optclip.carry_over(previous, tree, state, wrapper, tree)
    helpers.assert_identical(moved.feedback_clip, state)
    off = optclip.carry_over(wrapper, tree, moved, previous, tree)
    helpers.assert_identical(off, state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (optax.EmptyState(), "it lacks"),
        ((optclip.clip_by_norm(1.0).init(1.0), np.ones(1)), r"the unknown \[1\]"),
        ([optclip.clip_by_norm(1.0).init(1.0)], "a list instead of a tuple"),
    ],
)
def test_state_of_another_optimizer_is_rejected(state, words):
    tx, tree = optax.chain(optclip.clip_by_norm(1.0)), params("ab")
    words = rf"must have the structure of tx.init\(params\): .*{words}"
    with pytest.raises(ValueError, match=words):
        optclip.carry_over(tx, tree, state, tx, tree)


def test_memory_of_other_rules_names_and_dtypes_starts_anew():
    rule, ones = T.quantile(0.5, 4), np.ones(2, np.float32)
    tx = optclip.clip_by_norm(rule)
    _, state = run(tx, tx.init(params("ab")), ("a", "b"), range(2))
    by_leaf = optclip.clip_by_norm({"a": rule, "b": rule})
    for other, names in ((by_leaf, ("a", "b")), (tx, ("c", "d"))):
        new = dict.fromkeys(names, ones)
        moved = optclip.carry_over(tx, params("ab"), state, other, new)
        helpers.assert_identical(moved.clip_memory, other.init(new).clip_memory)
    tx = optax.trace(0.9)
    state = tx.init(np.ones(2, np.int32))
    moved = optclip.carry_over(tx, np.ones(2, np.int32), state, tx, ones)
    assert moved.trace.dtype == np.float32


def test_history_without_steps_stays_empty():
    clip = optclip.clip_by_norm(1.0)
    tx, longer = optclip.with_history(clip, 2), optclip.with_history(clip, 3)
    tree = params("ab")
    moved = optclip.carry_over(tx, tree, tx.init(tree), longer, tree)
    helpers.assert_identical(moved, longer.init(tree))


def test_state_of_an_ensemble_is_rejected():
    tx, tree = optax.chain(optclip.clip_by_norm(1.0)), params("ab")
    stacked = jax.vmap(lambda _: tx.init(tree))(np.ones(2, np.float32))
    words = r"clip_step must have the shape \(\), got \(2,"
    with pytest.raises(ValueError, match=words):
        optclip.carry_over(tx, tree, stacked, tx, tree)
