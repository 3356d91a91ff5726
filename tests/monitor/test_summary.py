"""A few lines on each clip: what it did, and whose norm it was."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optclip
from tests.support import helpers

GRADS = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}


def state_after(tx, *grads):
    update, state = helpers.quick_jit(tx.update), tx.init(grads[0])
    for each in grads:
        _, state = update(each, state, each)
    return state


def test_a_tree_has_one_line():
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    state = state_after(optclip.clip_by_global_norm(2.5), zeros, zeros, zeros, GRADS)
    expected = (
        "clip: norm 5, threshold 2.5, coefficient 0.5, clipped in 25% of the steps"
    )
    assert optclip.summary(state) == expected
    assert optclip.summary(optclip.metrics(state)) == expected
    assert optclip.summary(jax.device_get(optclip.metrics(state))) == expected
    assert optclip.summary({**optclip.metrics(state), "time": "now"}) == expected


def test_leaves_are_told_by_the_largest_and_the_smallest():
    """Of many the largest, the smallest, and how many were clipped."""
    state = state_after(optclip.clip_by_norm(3.5), GRADS)
    assert optclip.summary(state) == (
        "clip: largest norm 4, smallest threshold 3.5, smallest coefficient 0.875,"
        " 50% of the norms clipped in the last step, some in 100% of the steps"
    )


def test_of_groups_and_what_is_not_finite():
    tx = optclip.clip_by_group_norm(1.0, {"a": "first", "b": "second"})
    state = state_after(tx, GRADS, GRADS | {"a": jnp.array([jnp.nan])})
    assert optclip.summary(state).splitlines() == [
        "clip: 2 norms, clipped in up to 100% of the steps, not finite in up to 1",
        "     0%  nan       first (clipped in 50%, not finite in 1)",
        "   100%  4         second (clipped in 100%)",
    ]


def test_of_one_leaf():
    tx = optclip.clip_by_norm(2.0, record="leaves")
    zero = {"b": jnp.zeros(1)}
    assert optclip.summary(state_after(tx, {"b": GRADS["b"]}, zero)).splitlines() == [
        "clip: 1 norm, clipped in 50% of the steps",
        "     0%  0         b (clipped in 50%)",
    ]


def test_the_largest_of_many():
    grads = {f"{i:02}": jnp.array([1.0 + (i == 7)]) for i in range(20)}
    tx = optclip.clip_by_norm(jnp.inf, record="leaves", name="watch")
    found = optclip.summary(state_after(tx, grads), most=2).splitlines()
    assert found[1:] == [
        "    17%  2         07",
        "     4%  1         00",
        "         and 18 more",
    ]


def test_the_source_of_what_is_not_finite_is_first():
    tx = optclip.clip_by_norm(jnp.inf, record="leaves", nonfinite="propagate")
    nan = {key: x * jnp.nan for key, x in GRADS.items()}
    state = state_after(tx, GRADS | {"b": nan["b"]}, nan)
    assert optclip.summary(state).splitlines()[1:] == [
        "     0%  nan       b (not finite in 2)",
        "     0%  nan       a (not finite in 1)",
    ]


def test_the_most_clipped_first():
    tx = optclip.clip_by_norm(3.5, record="leaves")
    past_a, past_b = (
        {"a": jnp.array([a]), "b": jnp.array([b])} for a, b in ((9.0, 1.0), (1.0, 6.0))
    )
    state = state_after(tx, past_a, past_a, past_b)
    a, b = (
        "     3%  1         a (clipped in 67%)",
        "    97%  6         b (clipped in 33%)",
    )
    assert optclip.summary(state).splitlines()[1:] == [b, a]
    assert optclip.summary(state, sort_by="rate").splitlines()[1:] == [a, b]


def test_norms_whose_squares_overflow_and_zeros():
    tx = optclip.clip_by_norm(jnp.inf, record="leaves")
    huge = jax.tree.map(lambda x: x * 0.5e38, GRADS)
    assert "64%" in optclip.summary(state_after(tx, huge)).splitlines()[1]
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    assert "0%  0 " in optclip.summary(state_after(tx, zeros)).splitlines()[1]


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.0, "0%"), (0.005, "<1%"), (0.5, "50%"), (0.999, ">99%"), (0.99999994, "100%")],
)
def test_none_is_none_and_all_is_all(rate, said):
    found = {"clip/norm": 1.0, "clip/rate": rate}
    assert optclip.summary(found).endswith(f"clipped in {said} of the steps")


def test_skips_have_a_line():
    tx = optclip.skip(optax.sgd(1.0), max_norm=4.0)
    found = optclip.summary(state_after(tx, GRADS, GRADS))
    assert found.startswith("skip: norm 5, threshold 4, coefficient 0, ")
    assert found.endswith(", 2 left out")


def test_inside_jit_it_is_refused():
    tx = optclip.clip_by_global_norm(1.0)

    @jax.jit
    def step(grads):
        return optclip.summary(tx.update(grads, tx.init(grads))[1])

    with pytest.raises(
        TypeError, match="`opt_state` must be .* outside jax.jit.*Return"
    ):
        step(GRADS)


def test_a_norm_alone_is_enough():
    assert optclip.summary({"clip/norm": 2.0}) == "clip: norm 2"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([{"clip/norm": 1.0}], r"a history. Give one step of it, .*history\[-1\]"),
        ({"clip/norm": jnp.ones(3)}, "at 'clip/norm' must be a number"),
        ({"clip/norm": None}, "at 'clip/norm' must be a number, got None"),
    ],
)
def test_what_is_no_step(given, match):
    with pytest.raises(TypeError, match=match):
        optclip.summary(given)


def test_a_state_without_a_clip_is_refused():
    with pytest.raises(
        ValueError, match="an optimizer state with an optclip clip in it"
    ):
        optclip.summary(optax.sgd(1.0).init(GRADS))


def test_a_leaf_called_norm_is_no_other_clip():
    """The words of a key that come first are the clip's, whatever the path has."""
    tree = {"norm": {"scale": jnp.ones(2)}, "rate": jnp.ones(1)}
    watch = optclip.clip_by_norm(math.inf, record="leaves", name="watch")
    tx = optax.chain(watch, optclip.clip_by_global_norm(1.0, record="leaves"))
    _, state = tx.update(tree, tx.init(tree))
    text = optclip.summary(state)
    assert re.findall(r"^(\S+):", text, re.MULTILINE) == ["watch", "clip"]
