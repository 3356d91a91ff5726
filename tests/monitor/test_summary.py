"""A few lines per clip: its last step, its rate, and its groups or leaves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers


def metrics_of(**parts):
    """Return metrics of a clip by part: the norm, the rate and the nonfinite steps."""
    fields = ("norm", "rate", "nonfinite")
    return {
        f"clip/{field}/{part}": value
        for part, values in parts.items()
        for field, value in zip(fields, values, strict=True)
    }


def lines_of(step, **options):
    return optclip.summary(step, **options).splitlines()


def test_summary_of_one_norm_takes_a_state_or_its_metrics():
    tx = optclip.clip_by_global_norm(2.5)
    grads = {"a": np.float32([3.0]), "b": np.float32([4.0])}
    update, state = helpers.quick_jit(tx.update), tx.init(grads)
    for scale in (0, 0, 0, 1):
        _, state = update(jax.tree.map(lambda x, s=scale: s * x, grads), state)
    expected = (
        "clip: norm 5, threshold 2.5, coefficient 0.5, clipped in 25% of the steps"
    )
    found = optclip.metrics(state)
    for step in (state, found, jax.device_get(found), {**found, "time": "now"}):
        assert optclip.summary(step) == expected


def test_summary_of_leaf_scope_names_the_extremes():
    step = {"norm": 4.0, "threshold": 3.5, "coefficient": 0.875, "fraction": 0.5}
    step = {f"clip/{key}": value for key, value in (step | {"rate": 1.0}).items()}
    assert optclip.summary(step) == (
        "clip: largest norm 4, smallest threshold 3.5, smallest coefficient 0.875,"
        " 50% of the norms clipped in the last step, some in 100% of the steps"
    )


def test_summary_of_groups_has_a_line_each():
    step = metrics_of(first=(math.nan, 0.5, 1), second=(4.0, 1.0, 0))
    assert lines_of(step) == [
        "clip: 2 norms, clipped in up to 100% of the steps, not finite in up to 1",
        "     0%  nan       first (clipped in 50%, not finite in 1)",
        "   100%  4         second (clipped in 100%)",
    ]
    assert lines_of(metrics_of(b=(0.0, 0.5, 0))) == [
        "clip: 1 norm, clipped in 50% of the steps",
        "     0%  0         b (clipped in 50%)",
    ]


def test_summary_most_keeps_the_largest():
    step = metrics_of(**{f"{i:02}": (1.0 + (i == 7), 0.0, 0) for i in range(20)})
    assert lines_of(step, most=2)[1:] == [
        "    17%  2         07",
        "     4%  1         00",
        "         and 18 more",
    ]


def test_summary_order_is_by_nonfinite_steps_norm_or_rate():
    """Once parameters are NaN all leaves are; the first was so in most steps."""
    nan = metrics_of(a=(math.nan, 0.0, 1), b=(math.nan, 0.0, 2))
    assert [line.split()[2] for line in lines_of(nan)[1:]] == ["b", "a"]
    step = metrics_of(a=(1.0, 2 / 3, 0), b=(6.0, 1 / 3, 0))
    a, b = (
        "     3%  1         a (clipped in 67%)",
        "    97%  6         b (clipped in 33%)",
    )
    assert lines_of(step)[1:] == [b, a]
    assert lines_of(step, sort_by="rate")[1:] == [a, b]


@pytest.mark.parametrize(
    ("norms", "percent"),
    [((1.5e38, 2e38), "64%"), ((1e308, 1e308), "50%"), ((0, 0), "0%")],
)
def test_summary_percent_is_finite_for_huge_and_zero_norms(norms, percent):
    step = metrics_of(a=(norms[0], 0.0, 0), b=(norms[1], 0.0, 0))
    assert lines_of(step)[1].split()[0] == percent


@pytest.mark.parametrize(
    ("rate", "percent"),
    [(0.0, "0%"), (0.005, "<1%"), (0.5, "50%"), (0.999, ">99%"), (0.99999994, "100%")],
)
def test_summary_rate_is_0_only_for_none_and_100_only_for_all(rate, percent):
    summary = optclip.summary({"clip/norm": 1.0, "clip/rate": rate})
    assert summary == f"clip: norm 1, clipped in {percent} of the steps"


def test_summary_of_skip_counts_the_steps_left_out():
    step = {"skip/norm": 5.0, "skip/threshold": 4.0, "skip/skipped": 2}
    assert optclip.summary(step) == "skip: norm 5, threshold 4, 2 left out"


def test_summary_inside_jit_raises():
    @jax.jit
    def step(norm):
        return optclip.summary({"clip/norm": norm})

    with pytest.raises(
        TypeError, match="`opt_state` must be .* outside jax.jit.*Return"
    ):
        step(1.0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([{"clip/norm": 1.0}], r"a history. Give one step of it, .*history\[-1\]"),
        ({"clip/norm": np.ones(3)}, "at 'clip/norm' must be a number"),
        ({"clip/norm": None}, "at 'clip/norm' must be a number, got None"),
    ],
)
def test_summary_of_many_steps_raises(given, match):
    with pytest.raises(TypeError, match=match):
        optclip.summary(given)


def test_summary_of_leaf_named_norm_is_of_no_other_clip():
    tree = {"norm": {"scale": jnp.ones(2)}, "rate": jnp.ones(1)}
    watch = optclip.clip_by_norm(math.inf, record="leaves", name="watch")
    tx = optax.chain(watch, optclip.clip_by_global_norm(1.0, record="leaves"))
    names = [line.split(":")[0] for line in lines_of(tx.init(tree)) if ":" in line]
    assert names == ["watch", "clip"]
