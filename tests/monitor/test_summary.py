"""Summarize each clipping transformation in a few lines, with a verdict."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers, situations
from tests.support.situations import at, noise


def metrics_of(**parts):
    """Return metrics of a clip by part: the norm, the rate and the nonfinite steps."""
    fields = ("norm", "rate", "nonfinite")
    return {
        f"clip/{field}/{part}": value
        for part, values in parts.items()
        for field, value in zip(fields, values, strict=True)
    }


def lines_of(step, **options):
    return helpers.unwrapped(optclip.summary(step, **options))


def test_summary_of_one_norm_takes_a_state_or_its_metrics():
    tx = optclip.clip_by_global_norm(2.5)
    grads = {"a": np.float32([3.0]), "b": np.float32([4.0])}
    update, state = helpers.quick_jit(tx.update), tx.init(grads)
    assert optclip.summary(state) == "clip: no step yet"
    for scale in (0, 0, 0, 1):
        _, state = update(jax.tree.map(lambda x, s=scale: s * x, grads), state)
    expected = "clip: norm 5, threshold 2.5, coefficient 0.5, clipped in 25% of 4 steps"
    found = optclip.metrics(state)
    for step in (state, found, jax.device_get(found), {**found, "train/loss": "?"}):
        assert optclip.summary(step) == expected


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (
            {
                "clip/norm": 4.0,
                "clip/threshold": 3.5,
                "clip/coefficient": 0.875,
                "clip/fraction": 0.5,
                "clip/rate": 1.0,
                "clip/steps": 1,
            },
            "clip: most clipped norm 4, threshold 3.5, coefficient 0.875,"
            " 50% of the norms clipped in the last step, at least one in 100% of 1 step",
        ),
        (
            {"clip/norm": 4.0, "clip/fraction": 0.0, "clip/rate": 0.0, "clip/steps": 100},
            "clip: most clipped norm 4, 0% of the norms clipped in the last step, none in 100 steps",
        ),
        (
            {"skip/norm": 5.0, "skip/threshold": 4.0, "skip/rate": 0.0, "skip/steps": 4, "skip/skipped": 2},
            "skip: norm 5, threshold 4, skipped 2 of 4 steps",
        ),
        (
            {"skip/norm": 5.0, "skip/skipped": 1, "skip/loss": 9.0, "skip/loss_threshold": 3.0},
            "skip: norm 5, loss 9, its threshold 3, skipped 1 of the steps",
        ),
        # 0% means none, and 100% means all.
        *(
            ({"clip/norm": 1.0, "clip/rate": rate}, f"clip: norm 1, clipped in {percent} of the steps")
            for rate, percent in (
                (0.0, "0%"), (0.005, "<1%"), (0.5, "50%"), (0.999, ">99%"), (0.99999994, "100%"),
            )
        ),
    ],
)  # fmt: skip
def test_summary_of_step_names_extremes_and_rates(step, line):
    assert lines_of(step) == [line]


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        (
            {"first": (math.nan, 0.5, 1), "second": (4.0, 1.0, 0)},
            [
                "clip: 2 norms, clipped in up to 100% of the steps, not finite in up to 1",
                "     0%  nan       first (clipped in 50%, not finite in 1)",
                "   100%  4         second (clipped in 100%)",
                "-> clip: not finite, first in"
                " first. Call optclip.explain with the batch of that step.",
            ],
        ),
        (
            {"b": (0.0, 0.5, 0)},
            [
                "clip: 1 norm, clipped in 50% of the steps",
                "     0%  0         b (clipped in 50%)",
            ],
        ),
        (
            {f"{i:02}": (1.0 + (i == 7), 0.0, 0) for i in range(20)},
            [
                "clip: 20 norms, clipped in 0% of the steps",
                "    17%  2         07",
                "     4%  1         00",
                "         and 18 more",
            ],
        ),
        # Percentages are finite for huge and zero norms.
        *(
            (
                {"a": (a, 0.0, 0), "b": (b, 0.0, 0)},
                ["clip: 2 norms, clipped in 0% of the steps", *rows],
            )
            for a, b, *rows in (
                (1.5e38, 2e38, "    64%  2e+38     b", "    36%  1.5e+38   a"),
                (1e308, 1e308, "    50%  1e+308    a", "    50%  1e+308    b"),
                (0, 0, "     0%  0         a", "     0%  0         b"),
            )
        ),
    ],
)
def test_summary_of_groups_has_a_line_each_up_to_most(parts, lines):
    assert lines_of(metrics_of(**parts), most=2) == lines


def test_summary_order_is_by_nonfinite_steps_or_norm():
    """Once parameters are NaN all leaves are; the first was so in most steps."""
    nan = metrics_of(a=(math.nan, 0.0, 1), b=(math.nan, 0.0, 2))
    assert [line.split()[2] for line in lines_of(nan)[1:3]] == ["b", "a"]
    step = metrics_of(a=(1.0, 2 / 3, 0), b=(6.0, 1 / 3, 0))
    a, b = (
        "     3%  1         a (clipped in 67%)",
        "    97%  6         b (clipped in 33%)",
    )
    assert lines_of(step)[1:] == [b, a]


def test_summary_inside_jit_raises():
    words = "`opt_state` must be .* outside jax.jit.*Return"
    with pytest.raises(TypeError, match=words):
        jax.eval_shape(lambda norm: optclip.summary({"clip/norm": norm}), 1.0)


def test_summary_of_list_of_metrics_names_history():
    with pytest.raises(TypeError, match=r"history\[-1\].*optclip\.history"):
        optclip.summary([{"clip/norm": 1.0}, {"clip/norm": 2.0}])


def test_summary_assigns_leaf_named_norm_to_its_clip():
    tree = {"norm": {"scale": jnp.ones(2)}, "rate": jnp.ones(1)}
    watch = optclip.clip_by_norm(math.inf, record="leaves", name="watch")
    tx = optax.chain(watch, optclip.clip_by_global_norm(1.0, record="leaves"))
    names = [line.split(":")[0] for line in lines_of(tx.init(tree)) if ":" in line]
    assert names == ["watch", "clip"]


def test_summary_of_global_norm_lists_recorded_leaves():
    """The NaN leaf is first, and other leaves keep their fractions."""
    tx = optclip.clip_by_global_norm(1.0, record="leaves")
    tree = {"b": np.float32([3.0]), "norm": {"rate": np.float32([4.0])}}
    update = helpers.quick_jit(tx.update)
    _, state = update(tree, tx.init(tree))
    head = "clip: norm 5, threshold 1, coefficient 0.2, clipped in 100% of 1 step"
    leaves = ["    64%  4         norm/rate", "    36%  3         b"]
    assert lines_of(state) == lines_of(optclip.metrics(state)) == [head, *leaves]
    assert lines_of(state, most=1) == [head, leaves[0], "         and 1 more"]
    _, state = update({**tree, "b": np.float32([np.nan])}, state)
    first, *rest = lines_of(state)
    assert first.startswith("clip: norm nan")
    assert first.endswith("clipped in 50% of 2 steps, not finite in 1")
    assert rest[:2] == ["     0%  nan       b", "   100%  4         norm/rate"]
    assert "1 of 2 steps, also in the last one, first in b; the step was app" in rest[2]


def test_summary_of_ensemble_asks_for_one_member():
    tx = optclip.clip_by_global_norm(1.0)
    grads = np.float32([[5.0], [0.5], [4.0]])
    _, ensemble = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(grads))
    assert lines_of(jax.tree.map(lambda x: x[0], ensemble))[0].startswith(
        "clip: norm 5"
    )
    # The metrics of many steps have the same form.
    for opt_state in (ensemble, optclip.metrics(ensemble)):
        with pytest.raises(TypeError, match="one step.*one member of an ensemble"):
            optclip.summary(opt_state)


@pytest.mark.parametrize("key", ["loss", "train/loss", "train_loss"])
def test_save_writes_loss_only_in_steps_that_have_one(tmp_path, key):
    rows = [{"clip/norm": 1.0, key: 2.0, "eval/loss": 3.0}, {"clip/norm": 1.0}]
    optclip.plot.save(rows, tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


# The last lines say what the numbers mean; `test_situations.py` has each finding.

GLOBAL = optclip.clip_by_global_norm


def run(*args, of=lambda state: state, **options):
    """Return a function, so that no worker compiles the runs of other workers."""
    return lambda: of(situations.run(*args, **options))


def logged(norms, loss=None, steps=None):
    """Return the metrics of a log of norms, and its losses."""
    steps = np.arange(len(norms)) if steps is None else steps
    losses = {} if loss is None else {"loss": loss}
    return {"step": steps, "clip/norm": norms, **losses}


INDEX, ROWS, LOSS = np.arange(300), 0.5 * noise(300), 2.8 * noise(300, 0.03, 1)
NAN = at(ROWS, {(200, 300): np.nan})
FIXED = optclip.skip(GLOBAL(1.0), max_norm=5.0)
MEDIAN = thresholds.scaled(thresholds.quantile(0.5), 10.0)
MEDIAN = optclip.skip(GLOBAL(1.0), max_norm=MEDIAN)
REJECTED = optax.apply_if_finite(GLOBAL(1.0), 200)
PARTLY = optax.apply_if_finite(GLOBAL(1.0), 2)
ZERO = optclip.clip_by_global_norm(1.0, nonfinite="zero")
BY_LOSS = optclip.skip(GLOBAL(1.0), max_loss=thresholds.mean_plus_std(6.0))
ONE = {"norm": 9.0, "coefficient": 0.05, "rate": 1.0, "steps": 20}
ONE = {f"clip/{field}": x for field, x in ONE.items()}
STUCK = {"norm": 9.0, "threshold": 5.0, "skipped": 12, "consecutive": 12, "steps": 100}
STUCK = {f"skip/{field}": x for field, x in STUCK.items()}
FEW = {"clip/norm": 1.0, "clip/nonfinite": 6, "clip/steps": 100}
SPIKE = logged(at(ROWS, {150: 60}))
TWO = logged(at(ROWS, {150: 60, 250: 60}), at(LOSS, {151: 6.6}))
REPEATED = optax.MultiSteps(optclip.skip(GLOBAL(1.0), max_norm=5.0), 4)
REPEATED = optax.GradientTransformationExtraArgs(REPEATED.init, REPEATED.update)
PARTS = {
    "leaf_norm/x": at(ROWS, {150: 60, 250: 60}),
    "leaf_norm/y": at(ROWS, {150: 50}),
}


@pytest.mark.parametrize(
    ("numbers", "patterns"),
    [
        # The cause of a high loss, of a rise and of NaN is the norm before it.
        (TWO, ["loss 6.6 in step 151.* step 150.$", "60 in step 250.*150, 250"]),
        (logged(at(ROWS, {150: 60}), at(LOSS, {(151, 300): 9})), ["before step 150.$", "in step 150"]),
        (logged(at(NAN, {199: 60})), ["since step 200.*before step 199.$", "60 in step 199"]),
        # A loss in the same step or the next one explains a norm.
        (logged(at(ROWS, {151: 60}), at(LOSS, {150: 9})), ["loss 9 in step 150.*that step.$"]),
        # Of the steps skipped last, only one is large.
        (run(MEDIAN, [*NAN, 30]), ["not finite.*200 to 299.* step 200.$", "30 in step 300.*skipped"]),
        (run(MEDIAN, at(ROWS, {(288, 300): 50})), ["50 above 4.*wait: the threshold has risen from 4"]),
        (logged(at(ROWS, {(100, 149): np.nan, (250, 300): np.nan})), ["not finite in 99 of 300 steps, the last 50 since step 250"]),
        (run(MEDIAN, at(ROWS, {(100, 250): np.nan}), of=optclip.metrics), ["not finite in 150 of 300 steps. None .*with_history"]),
        (ONE | {"clip/leaf_norm/a": 9.0, "clip/leaf_norm/b": 0.1}, ["in the last one to 0.05 of the norm.*raise the threshold"]),
        # Each limit, from both sides.
        (ONE | {"clip/rate": 0.85}, []),
        (ONE | {"clip/rate": 0.92}, ["clipped in 92% of 20 steps"]),
        (ONE | {"clip/coefficient": 0.12}, []),
        (ONE | {"clip/steps": 15}, []),
        (STUCK, ["the last 12 steps"]),
        (STUCK | {"skip/consecutive": 8}, []),
        (STUCK | {"skip/consecutive": 1, "skip/skipped": 18}, []),
        (STUCK | {"skip/consecutive": 1, "skip/skipped": 22}, ["skipped 22% of 100"]),
        (FEW, ["not finite in 6 of 100"]),
        (FEW | {"clip/nonfinite": 4}, []),
        (FEW | {"clip/nonfinite": 3, "clip/steps": 15}, []),
        (FEW | {"clip/nonfinite": 3, "clip/steps": 30}, ["not finite in 3 of 30"]),
        (logged(at(ROWS, {(100, 250, 50): np.inf})), ["100, 150, 200"]),
        (logged(at(ROWS, {(50, 300, 50): np.inf})), []),  # Loss scaling.
        (logged(ROWS, [*LOSS[:298], None, None]), []),
        (logged(ROWS, [*LOSS[:297], None, None, None]), ["NaN or missing in 3 of 300"]),
        (logged(np.array([1, 1, 1, 1e6])), []),
        (logged(ROWS, np.where(INDEX < 200, 1, 1.5) * LOSS), ["loss rose from 2.* to 4.* step 200 .*before step 199.$"]),
        (logged(ROWS, np.where(INDEX < 200, 1, 1.2) * LOSS), []),
        (logged(ROWS, np.interp(INDEX, [0, 50, 150, 300], [1.6, 1, 1, 2.6]) * LOSS), ["loss rose from 2.* to 7.* step 15"]),
        (logged(ROWS, np.interp(INDEX, [0, 50, 150, 300], [1.6, 1, 1, 1.7]) * LOSS), []),
        (logged(np.where(INDEX < 200, 1, 20) * ROWS), ["norm rose from 0.4.* to 10.* step 200 "]),
        (logged(np.where(INDEX < 200, 1, 12) * ROWS), []),
        (logged(at(ROWS, {(100, 200): 15})), ["in step 100.*100 to 199"]),
        (logged(at(0.5 * noise(1000), {60: 30})), ["in step 60"]),
        (logged(at(0.5 * noise(1000), {40: 30})), []),  # Of the start.
        (logged(at(ROWS, {(100, 130, 10): 30})), ["100, 110, 120"]),
        (logged(at(ROWS, {(100, 150, 10): 30})), []),  # An alternation.
        (logged(at(ROWS, {(180, 300): 0})), ["0 since step 180"]),
        (logged(at(ROWS, {(210, 300): 0})), []),
        (logged(at(ROWS, {(50, 110, 10): np.nan})), ["in 6 of 300 steps: 50, 60, 70, 80, 90, .... Call"]),
        (logged(at(ROWS, {(0, 3): np.nan, (150, 152): np.nan})), []),
        (logged(at(ROWS, {(0, 3): np.nan, (150, 153): np.nan})), ["150 to 152"]),
        (SPIKE | {"clip/threshold": at(1 + 0 * ROWS, {(165, 300): 2.5})}, ["60 in step 150"]),
        (SPIKE | {"clip/threshold": at(1 + 0 * ROWS, {(165, 300): 5})}, ["60 in step 150", "rose from 1 to 5"]),
        (SPIKE | {"clip/threshold": at(1 + 0 * ROWS, {(175, 300): 5})}, ["60 in step 150"]),
        (run(MEDIAN, [*NAN, 30], of=optclip.metrics), ["not finite in 100 of 301 steps. None .*with_history"]),
        (run(BY_LOSS, ROWS, at(LOSS, {(200, 300): np.nan})), ["^-> loss: not finite in 100 of 300.*since step 200. None"]),
        (run(BY_LOSS, ROWS, at(LOSS, {299: np.nan}), of=optclip.metrics), ["^-> loss: not finite. None"]),
        (logged(at(ROWS, {0: np.nan, 100: np.nan, 299: np.nan})), ["not finite.*step 299"]),
        (run(GLOBAL(1.0), at(ROWS, {150: np.nan, (292, 300): np.nan})), ["the last 8 since step 292. If the"]),
        (run(GLOBAL(1.0), at(ROWS, {150: np.nan, (288, 300): np.nan})), ["the last 12 since step 288.*probably NaN"]),
        (run(GLOBAL(1.0), NAN, rows=40), ["or earlier.*before step 200, and wrap"]),
        (run(GLOBAL(1.0), NAN, of=optclip.metrics), ["100 of 300.*before the first of them"]),
        (run(GLOBAL(1.0), 0 * NAN[200:]), ["since step 0.*NaN. Check the initial parameters"]),
        (run(REPEATED, NAN), ["^-> skip: not finite.*since step 203. None"]),
        (run(REJECTED, NAN), ["not finite in 100 of 300.*since step 200. None was applied"]),
        (run(PARTLY, at(ROWS, {(200, 204): np.nan})), ["200 to 203; 2 of them applied, the first in step 202. Call"]),
        (run(PARTLY, NAN), ["since step 200; 98 of them applied, the first in step 202: the parameters are probably NaN. Restore"]),
        (run(ZERO, NAN), ["since step 200. They were zeroed. Call"]),
        (run(FIXED, at(ROWS, {(200, 220): 9, (221, 299): 9})), ["98 of the last 100 steps.*: 200 to 219, 221 to 298. .*step 200.$"]),
        (run(FIXED, at(ROWS, {(200, 300): 9})), ["9 above 5.*use max_norm=scaled"]),
        (run(FIXED, np.where(np.arange(60) % 3, 9, 0.5)), ["40 of the last 59 steps were skipped"]),
        (run(FIXED, at(3 * ROWS, {150: 9})), ["^-> skip: skipped 1 of 300 recorded steps: 150."]),
        # Nine steps are too few for a rate. A schedule rises without the spike.
        (run(GLOBAL(0.01), ROWS[:9]), []),
        (run(optclip.clip_by_norm(0.01), ROWS), []),  # The norm of one leaf is no length.
        (run(GLOBAL(optax.linear_schedule(0.3, 3.0, 300)), at(ROWS, {150: 400})), ["norm 400 in step 150"]),
        (logged(at(ROWS, {150: 1e37}), steps=1e299 * np.arange(300)), ["in step 1.5e.301, 1.*e.37 times"]),
        (logged(ROWS) | {f"clip/{k}": x for k, x in PARTS.items()}, [r"of x 60 in step 250, 120 times its neighbors \(steps 150, 250"]),
    ],
)  # fmt: skip
def test_each_finding_names_one_step_that_helps(numbers, patterns):
    numbers = numbers() if callable(numbers) else numbers
    lines = [x for x in lines_of(numbers) if x[:2] == "->"]
    assert len(lines) == len(patterns), lines
    assert all(map(re.search, patterns, lines)), lines


def test_summary_of_transformation_that_ran_in_no_recorded_step_says_so():
    line = optclip.summary(run(FIXED, NAN, rows=40, of=optclip.history)()).splitlines()[
        0
    ]
    assert line == "clip: skipped in all recorded steps"
