"""The last lines of `summary` say what the numbers mean, if they stand out."""

import re

import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support.situations import at, noise, run
from tests.support.steps import over_steps, unstacked

STEADY = np.linspace(1.0, 1.2, 130, dtype=np.float32)
SPIKE = np.where(np.arange(130) == 60, 900, STEADY).astype(np.float32)
NEARLY = np.where(np.arange(130) == 60, 9, STEADY).astype(np.float32)
DEAD = np.where(np.arange(130) < 20, STEADY, 0).astype(np.float32)
SKIP = optclip.skip(optax.sgd(1.0), max_norm=30.0)
SHIFT = np.where(np.arange(130) < 80, STEADY, 12 * STEADY).astype(np.float32)
LAST = np.where(np.arange(130) < 129, STEADY, 1e8).astype(np.float32)
GLOBAL = optclip.clip_by_global_norm
AVERAGED_RULE = thresholds.mean_plus_std(3.0, window=20)
AVERAGED = optclip.clip_by_global_norm(AVERAGED_RULE)
PART = optclip.clip_by_norm(0.1)
ENDED = optax.linear_schedule(0.4, 1.3, 25)
RISING = optax.linear_schedule(0.3, 3.0, 129)


def lines_of(tx, sizes):
    """Return the verdicts on the last state and on the history of a run."""
    kept = optclip.with_history(tx, steps=len(sizes))
    rows = {"a": sizes[:, None], "b": np.float32(0.5) * sizes[:, None]}
    state = unstacked(over_steps(kept, rows)[1])[-1]
    texts = optclip.summary(state), optclip.summary(optclip.history(state))
    return ["\n".join(x for x in t.splitlines() if x[:2] == "->") for t in texts]


@pytest.mark.parametrize(
    ("tx", "sizes", "words"),
    [
        (GLOBAL(0.05), STEADY, "clipped in 100% of 130 steps, usually to 0.0"),
        (GLOBAL(1.3), STEADY, ""),
        (GLOBAL(1e-2), STEADY[:9], ""),
        (GLOBAL(99.0), STEADY, ""),
        (GLOBAL(np.inf), STEADY, ""),
        (optclip.skip(optax.sgd(1.0), max_norm=0.1), STEADY, "last 130 steps were skipped"),
        (optclip.skip(optax.sgd(1.0), max_norm=30.0), SPIKE[50:70], ""),
        (optclip.skip(GLOBAL(0.05), max_norm=30.0), LAST, "usually to 0.0"),
        (optclip.skip(PART, max_norm=30.0), LAST, ""),
        (GLOBAL(1.3), LAST, ""),
        (GLOBAL(np.inf), NEARLY, ""),
    ],
)  # fmt: skip
def test_summary_ends_with_verdict_on_rate_coefficient_and_skips(tx, sizes, words):
    for lines in lines_of(tx, sizes):
        line = "".join(x for x in lines.splitlines() if "times its neighbors" not in x)
        assert words in line if words else not line


@pytest.mark.parametrize(
    ("tx", "sizes", "words"),
    [
        (AVERAGED, SPIKE, "the threshold rose from"),
        (GLOBAL(thresholds.zscore(skip_spikes=True)), SPIKE, ""),
        (SKIP, SPIKE[50:70], "norm 1006 in step 10, 818 times its neighbors, skipped"),
        (
            optclip.skip(optax.sgd(1.0), max_norm=1.3),
            NEARLY,
            "skipped 1 of 130 recorded steps: 60.",
        ),
        (
            SKIP,
            np.where(np.arange(60) % 4, 1, 99),
            "skipped 25% of 60 steps. Spikes are rarer",
        ),
        (SKIP, SPIKE.repeat(2)[100:140], "(steps 20 to 21)"),
        (
            SKIP,
            np.where(np.arange(60) % 3, 99, 1).astype(np.float32),
            "40 of the last 59 steps were skipped",
        ),
        (SKIP, STEADY, ""),
        (AVERAGED, DEAD, "norms have been 0 since step 20"),
        (GLOBAL(optax.constant_schedule(1.15)), STEADY, ""),
        (GLOBAL(ENDED), STEADY, ""),
        (GLOBAL(RISING), SPIKE, ""),
        (AVERAGED, SHIFT, ""),
        (optclip.skip(optax.sgd(1.0), max_norm=AVERAGED_RULE), SPIKE, "Use max_norm="),
    ],
)
def test_summary_of_history_ends_with_verdict_on_the_steps(tx, sizes, words):
    line = lines_of(tx, sizes)[1]
    assert words in line if words else not {"threshold", "skip"} & set(line.split())


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ((9.0, 1.0), ""),
        ((9.0, 8.0), ""),
        ((np.nan, 1.0), "not finite in 1 of 1 steps, since step 0, first in a;"),
        ((np.nan, np.nan), "; the step was applied: the parameters are probably NaN"),
    ],
)
def test_summary_names_leaf_that_dominates_or_is_not_finite(norms, words):
    tx = GLOBAL(100.0, record="leaves")
    grads = {key: np.float32([x]) for key, x in zip("ab", norms, strict=True)}
    line = optclip.summary(tx.update(grads, tx.init(grads))[1]).partition("->")[2]
    assert words in line if words else not line


def logged(norms, loss=None, steps=None):
    """Return the metrics of a log of norms, and its losses."""
    steps = np.arange(len(norms)) if steps is None else steps
    losses = {} if loss is None else {"loss": loss}
    return {"step": steps, "clip/norm": norms, **losses}


ROWS, LOSS = 0.5 * noise(300), 2.8 * noise(300, 0.03, 1)
NAN = at(ROWS, {(200, 300): np.nan})
FIXED = optclip.skip(GLOBAL(1.0), max_norm=5.0)
MEDIAN = thresholds.scaled(thresholds.quantile(0.5), 10.0)
MEDIAN = optclip.skip(GLOBAL(1.0), max_norm=MEDIAN)
REJECTED = optax.apply_if_finite(GLOBAL(1.0), 200)
ZERO = optclip.clip_by_global_norm(1.0, nonfinite="zero")
BY_LOSS = optclip.skip(GLOBAL(1.0), max_loss=thresholds.mean_plus_std(6.0))
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
        (optclip.metrics(run(MEDIAN, [*NAN, 30])), ["not finite in 100 of 301 steps. None .*with_history"]),
        (run(BY_LOSS, ROWS, at(LOSS, {(200, 300): np.nan})), ["^-> loss: not finite in 100 of 300.*since step 200. None"]),
        (optclip.metrics(run(BY_LOSS, ROWS, at(LOSS, {299: np.nan}))), ["^-> loss: not finite. None"]),
        (logged(at(ROWS, {0: np.nan, 100: np.nan, 299: np.nan})), ["not finite.*step 299"]),
        (run(GLOBAL(1.0), NAN, rows=40), ["or earlier.*before step 200, and wrap"]),
        (optclip.metrics(run(GLOBAL(1.0), NAN)), ["100 of 300.*before the first of them"]),
        (run(GLOBAL(1.0), 0 * NAN[200:]), ["since step 0.*NaN. Check the initial parameters"]),
        (run(REPEATED, NAN), ["^-> skip: not finite.*since step 203. None"]),
        (run(REJECTED, NAN), ["not finite in 100 of 300.*since step 200. None was applied"]),
        (run(ZERO, NAN), ["since step 200. They were zeroed. Call"]),
        (run(FIXED, at(ROWS, {(200, 220): 9, (221, 299): 9})), ["98 of the last 100 steps.*: 200 to 219, 221 to 298. .*step 200.$"]),
        (run(FIXED, at(ROWS, {(200, 300): 9})), ["9 above 5.*use max_norm=scaled"]),
        (logged(at(ROWS, {150: 1e37}), steps=1e299 * np.arange(300)), ["in step 1.5e.301, 1.*e.37 times"]),
        (logged(ROWS) | {f"clip/{k}": x for k, x in PARTS.items()}, [r"of x 60 in step 250, 120 times its neighbors \(steps 150, 250"]),
    ],
)  # fmt: skip
def test_each_finding_names_one_step_that_helps(numbers, patterns):
    lines = [x for x in optclip.summary(numbers).splitlines() if x[:2] == "->"]
    assert len(lines) == len(patterns), lines
    assert all(map(re.search, patterns, lines)), lines


def test_summary_of_transformation_that_ran_in_no_recorded_step_says_so():
    line = optclip.summary(optclip.history(run(FIXED, NAN, rows=40))).splitlines()[0]
    assert line == "clip: skipped in all recorded steps"
