"""The last lines of `summary` say what the numbers mean, if they stand out."""

import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
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
        (optclip.skip(optax.sgd(1.0), max_norm=AVERAGED_RULE), SPIKE, "learn_skipped"),
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
