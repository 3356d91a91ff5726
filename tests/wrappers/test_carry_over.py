"""Test the numbers that continue or restart in other optimizers, and the warnings.

`carry` compares a warning with words. The laws of all moves are in test_carry_over_laws.
"""

import collections
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import _thresholds, clip_by_norm
from optclip import thresholds as T
from tests.support import carried, helpers
from tests.support.carried import labeled

SHAPES = {"a": (2, 3), "b": (3,), "c": (3, 2), "d": (3,), "e": ()}
ADAM, FROZEN = optax.adam(0.1), optax.set_to_zero()
LARGEST = T.quantile(1.0, 4)
CLIP = clip_by_norm(LARGEST, record="leaves")
CHAIN = optax.chain(CLIP, ADAM)
skip = functools.partial(optclip.skip, max_norm=LARGEST)


@functools.cache
def clip(rule=LARGEST, **options):
    return optclip.clip_by(rule, **options)


def ones(names, **others):
    """Return leaves of ones; "a" and "b" together have the norm 3."""
    return {k: np.ones(SHAPES[k], np.float32) for k in names} | others


AB, ABC = ones("ab"), ones("abc")


def scaled(tree, size):
    return jax.tree.map(lambda x: np.float32(size) * x, tree)


@functools.cache
def compiled(tx):
    return helpers.quick_jit(optax.with_extra_args_support(tx).update)


def after(tx, tree, steps=5, *, state=None, size=1.0):
    """Return the state after steps whose gradients are 1 to 1.2 times the parameters."""
    state = tx.init(tree) if state is None else state
    for step in range(steps):
        grads = scaled(tree, size + 0.1 * size * (step % 3))
        _, state = compiled(tx)(grads, state, tree, value=np.float32(1))
    return state


def carry(tx, tree, state, new_tx, new_tree, *words):
    """Move a state with one warning that has all words; without words, with none."""
    moved, text = carried.called(tx, tree, state, new_tx, new_tree)
    assert bool(text) == bool(words), text
    assert not [word for word in words if not re.search(word, text)], text
    return moved


def counts(state):
    return [int(x) for _, x in optax.tree.get_all_with_path(state, "count")]


LABELS = {"a": "x", "b": "y"}
XX, XY = labeled(ADAM, {"a": "x", "b": "x"}), labeled(ADAM, LABELS)
FLAT = optax.flatten(ADAM)
LORA = optax.partition({"on": ADAM, "off": FROZEN}, {"a": "off", "b": "off", "c": "on"})
HEAD = optax.partition({"on": CHAIN, "off": FROZEN}, {"a": "off", "b": "on"})
LARGER = ones("b", a=np.ones((4, 3), np.float32))
MOMENTS = r"\bmu\b.*\ba\b", r"\bnu\b.*\ba\b"
# Old and new optimizer and leaves, the new count, and words of the warning.
Reversed = collections.namedtuple("Reversed", "b a")
# A number and a vector with the names of fields of Adam.
NAMED = collections.namedtuple("Named", "count mu")(np.float32(1), AB["b"])
ANEW = {
    "frozen base": (ADAM, AB, LORA, ABC, 0, MOMENTS),
    "flatten, leaves of equal size": (FLAT, AB, FLAT, ones("bc"), 0, ["mu"]),
    "flatten, more leaves": (FLAT, AB, FLAT, ABC, 0, ["mu"]),
    "flatten, other order": (FLAT, AB, FLAT, Reversed(AB["b"], AB["a"]), 0, ["mu"]),
    "flatten, numbers": (
        FLAT,
        dict.fromkeys("ab", AB["a"][0, 0]),
        FLAT,
        dict.fromkeys("bc", AB["a"][0, 0]),
        0,
        ["mu"],
    ),
    "flatten on": (ADAM, AB, FLAT, AB, 0, MOMENTS),
    "flatten off": (FLAT, AB, ADAM, AB, 0, ["mu"]),
    "unfrozen into running label": (HEAD, AB, CHAIN, AB, 5, [r"\ba\b", "6.6"]),
    "larger embedding": (CHAIN, AB, CHAIN, LARGER, 5, [*MOMENTS, "clip", "6.6"]),
}


@pytest.mark.parametrize("name", ANEW)
def test_carry_over_moments_without_counterpart_start_at_zero(name):
    tx, tree, *new, count, words = ANEW[name]
    state = after(tx, tree)
    moved = carry(tx, tree, state, *new, *words)
    assert counts(moved) == [count]
    for field in ("mu", "nu"):
        old, new = (optax.tree.get(x, field) for x in (state, moved))
        for path, x in jax.tree.leaves_with_path(new):
            is_kept = count and path[-1].key == "b"
            np.testing.assert_array_equal(x, old["b"] if is_kept else 0 * x)


def test_carry_over_joined_labels_take_count_of_most_elements():
    one, tree = labeled(ADAM, {"a": "x"}), ones("a")
    state = after(XY, AB, 3, state=carry(one, tree, after(one, tree), XY, AB))
    assert counts(state) == [8, 3]
    # The leaf "a" has six elements, "b" three.
    assert counts(carry(XY, AB, state, XX, AB, "count")) == [8]


def test_carry_over_new_leaf_beside_adam_is_named_with_remedy():
    state = optax.tree.set(after(ADAM, AB), count=np.int32(5000))
    remedy = labeled(ADAM, {"a": "old", "b": "old", "c": "new"})
    words = (r"\bc\b", "6.6", "partition")
    for tx, said, size in ((ADAM, words, 0.315), (remedy, (), 0.1)):
        updates, _ = compiled(tx)(ABC, carry(ADAM, AB, state, tx, ABC, *said), ABC)
        np.testing.assert_allclose(updates["c"], -size, rtol=0.01)


@pytest.mark.parametrize("inject", [False, True])
def test_carry_over_new_schedule_is_named_with_steps_before_it(inject):
    schedule = optax.linear_schedule(0.1, 0.0, 9)
    make = optax.inject_hyperparams(optax.adam) if inject else optax.adam
    scheduled, state = optclip.skip(make(schedule)), after(ADAM, AB, 8)
    carry(ADAM, AB, state, scheduled, AB, "at 0 after 8 steps, and its schedule with")
    labels = {"a": "", "b": "", "c": "c"}  # The schedule is for new leaves alone.
    carry(ADAM, AB, state, optax.partition({"": ADAM, "c": scheduled}, labels), ABC)
    carry(ADAM, AB, ADAM.init(AB), scheduled, AB)
    carry(scheduled, AB, after(scheduled, AB, 8), optax.adam(schedule), AB)


def test_carry_over_count_of_adam_is_no_parameter_named_count():
    carry(ADAM, NAMED, after(ADAM, NAMED), skip(ADAM), NAMED)


def test_carry_over_memory_of_each_leaf_follows_its_path():
    tree = {k: np.full(2, i + 1, np.float32) for i, k in enumerate("bdfhjl")}
    grown = {"a": tree["b"], "g": tree["b"]} | tree
    state = after(CLIP, tree)
    moved = carry(CLIP, tree, state, CLIP, grown)
    thresholds = (
        optclip.metrics(after(CLIP, t, 1, state=s, size=0.1))
        for t, s in ((tree, state), (grown, moved))
    )
    before, now = thresholds
    keys = [f"clip/threshold/{name}" for name in tree]
    assert [now[key] for key in keys] == [before[key] for key in keys]


def test_carry_over_casts_state_of_floats():
    """An average of states, or a cast, makes floats of their counts."""
    half, skipping = optax.adam(0.1, mu_dtype=jnp.bfloat16), optclip.skip(ADAM)
    state = jax.tree.map(np.float32, after(half, AB))
    moved = carry(half, AB, state, skipping, AB)
    helpers.assert_same_types(moved, skipping.init(AB))
    assert counts(moved) == [5]
    chex.assert_trees_all_equal(*(optax.tree.get(x, "mu") for x in (moved, state)))


def test_carry_over_wrapper_keeps_key_of_noise():
    tx = optax.chain(optax.add_noise(0.1, 0.5, 0), ADAM)
    state = after(tx, AB)
    moved = carry(tx, AB, state, optclip.skip(tx), AB)
    assert optax.tree.get(moved, "rng_key") == optax.tree.get(state, "rng_key")


def thresholds_after(tx, state, tree):
    """Return the thresholds of a step with gradients of 0.1."""
    metrics = optclip.metrics(after(tx, tree, 1, state=state, size=0.1))
    return {k.split("/")[-1]: float(metrics[k]) for k in metrics if "/threshold" in k}


A, B = (1.2 * n**0.5 for n in (6, 3))
LEAVES, WHOLE, SPLIT_CLIP = {"a": A, "b": B}, {"threshold": 3.6}, labeled(CLIP, LABELS)
SKIP = skip(optax.identity())
XY_GROUPS, YX_GROUPS, YZ_GROUPS = (
    optclip.clip_by_group_norm(LARGEST, {"a": x, "b": y}, record="leaves")
    for x, y in ("xy", "yx", "yz")
)
# Old and new clipping, the thresholds of a small step (None: those of a state that starts
# again), whether the memory is named, and old and new leaves, if not "a" and "b".
THRESHOLDS = {
    "number of rule": (clip(), clip(T.quantile(0.99, 4)), WHOLE, False),
    "record": (clip(record=False), clip(), WHOLE, False),
    "record of leaves": (clip(), clip(record="leaves"), WHOLE, False),
    "response": (clip(), clip(response="smooth", eps=1e-6), WHOLE, False),
    "groups renamed": (XY_GROUPS, YZ_GROUPS, {"y": A, "z": B}, False),
    "groups exchanged": (XY_GROUPS, YX_GROUPS, {"y": A, "x": B}, False),
    "labels joined": (SPLIT_CLIP, CLIP, LEAVES, False),
    "labels split": (CLIP, SPLIT_CLIP, LEAVES, False),
    "l2 to rms": (clip(), clip(norm="rms"), None, True),
    "l2 to average": (clip(), clip(norm="average"), None, True),
    "l2 to l1": (clip(), clip(norm="l1"), None, True),
    "l2 to inf": (clip(), clip(norm="inf"), None, True),
    "rms to l2": (clip(norm="rms"), clip(), None, True),
    "leaf to rms": (CLIP, optclip.clip_by_rms(LARGEST), None, True),
    "leaf to tree": (CLIP, clip(), None, True),
    "window": (clip(), clip(T.quantile(1.0, 8)), None, True),
    "rule": (clip(), clip(T.previous_norm()), None, True),
    "into skip": (clip(), SKIP, None, True),
    "norm of skip": (SKIP, skip(optax.identity(), norm="rms"), None, True),
    "fixed": (clip(), clip(9.0), None, True),
    "adapter added": (clip(), clip(), WHOLE, True, "ab", "abe"),
    "leaf removed": (clip(), clip(), WHOLE, True, "ab", "a"),
    "half of elements": (clip(), clip(), {"threshold": B}, True, "b", "bd"),
    "less than half": (clip(), clip(), None, True, "b", "bde"),
    "body unfrozen": (clip(), clip(), None, True, "b", "ab"),
    "body replaced": (clip(), clip(), None, True, "ab", "bc"),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_carry_over_threshold_moves_with_its_norm_only(name):
    tx, new_tx, expected, is_named, *leaves = THRESHOLDS[name]
    tree, new = map(ones, leaves or ("ab", "ab"))
    moved = carry(tx, tree, after(tx, tree), new_tx, new, *["memory of"] * is_named)
    expected = expected or thresholds_after(new_tx, new_tx.init(new), new)
    assert thresholds_after(new_tx, moved, new) == pytest.approx(expected, rel=0.02)


def test_carry_over_unfrozen_body_is_skipped_in_few_steps():
    tx = skip(ADAM, max_norm=T.scaled(T.quantile(0.5, 200), 10.0))
    head = {"head": np.ones((50, 2), np.float32)}
    model = head | {"body": np.ones((400, 50), np.float32)}
    moved = carry(tx, head, after(tx, head, 60), tx, model, "skip")
    # With the memory of the head, 23 steps are skipped.
    assert optclip.metrics(after(tx, model, 40, state=moved))["skip/skipped"] <= 3


def test_carry_over_second_moment_warms_up_for_new_leaf():
    tx = optclip.clip_by_value(_thresholds.second_moment(1.0))
    state = carry(tx, AB, after(tx, AB, 25), tx, ABC)
    for size in (0.01, 1.0, 1.0):
        updates, state = compiled(tx)(grads := scaled(ABC, size), state, ABC)
        np.testing.assert_array_equal(updates["c"], grads["c"])
    assert np.all(updates["a"] < 0.5)  # Past its own warm-up.


def test_carry_over_two_clips_of_one_name_ask_for_names():
    one = optax.chain(optax.scale(1e-3), clip())
    two = optax.chain(clip(), one)
    three = optax.chain(clip(), two)
    for tx, new_tx in (
        (two, one),
        (one, two),
        (two, three),
        (skip(optax.chain(optax.scale(0.01), skip(ADAM))), skip(ADAM)),
        (optax.chain(ADAM, ADAM), ADAM),
    ):
        with pytest.raises(ValueError, match="name="):
            optclip.carry_over(tx, AB, after(tx, AB), new_tx, AB)
    named = optax.named_chain(("gradients", clip()), ("updates", one))
    rest = optax.named_chain(("updates", one))
    moved = carry(named, AB, after(named, AB), rest, AB, "clip")
    assert thresholds_after(rest, moved, AB)["threshold"] == pytest.approx(3.6e-3)


def test_carry_over_rejects_two_leaves_of_one_path():
    """JAX sorts the keys of a dict, so that only an ordered one mixes their types."""
    same = collections.OrderedDict([(0, AB["a"]), ("0", AB["a"])])
    with pytest.raises(ValueError, match="0"):
        optclip.carry_over(ADAM, same, ADAM.init(same), ADAM, same)


@pytest.mark.parametrize("steps", [2, 9])
def test_carry_over_history_keeps_newest_rows_by_column(steps):
    tx, other = (optclip.with_history(CLIP, n) for n in (5, steps))
    ac, state = ones("ac"), after(tx, AB, 7)
    moved = carry(tx, AB, state, other, ac)
    before, rows = optclip.history(state), optclip.history(moved)
    for key in ("step", "loss", "clip/norm/a"):
        np.testing.assert_array_equal(rows[key][-5:], before[key][-len(rows[key]) :])
    assert not np.any(rows["clip/norm/c"])
    rows = optclip.history(after(other, ac, 2, state=moved))
    assert rows["step"].tolist()[-2:] == [7, 8]
    assert np.all(rows["clip/norm/c"][-2:] > 0)
    helpers.assert_identical(carry(tx, AB, tx.init(AB), other, AB), other.init(AB))


STATE = clip().init(AB)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (optax.EmptyState(), "structure .*: it lacks"),
        ((STATE, np.ones(1)), r"structure .*: it has the unknown \[1\]"),
        ([STATE], "structure .*: a list instead of a tuple"),
        (jax.tree.map(lambda x: np.stack([x, x]), (STATE,)), r"clip_step .*, got \(2,"),
    ],
)
def test_carry_over_rejects_state_of_another_optimizer(state, words):
    tx = optax.chain(clip())
    with pytest.raises(ValueError, match=words):
        optclip.carry_over(tx, AB, state, tx, AB)


def test_carry_over_rejects_another_shape_of_any_array():
    tx = optclip.with_history(optax.chain(clip(), optax.adam(0.1)), 3)
    leaves, treedef = jax.tree.flatten(tx.init(AB))
    for i, x in enumerate(leaves):
        state = treedef.unflatten([*leaves[:i], np.stack([x, x]), *leaves[i + 1 :]])
        with pytest.raises(ValueError, match="must have the shape"):
            optclip.carry_over(tx, AB, state, tx, AB)
