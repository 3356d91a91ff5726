"""Suggest a fixed threshold from the norms of a run."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import optclip

NORMS = np.random.default_rng(0).gamma(4.0, size=1000)


# What trainers log: norms that fall, that keep their scale to within 5%, with rare
# spikes, and as read from bfloat16, where many are equal.
STEPS, NOISE = np.arange(1000), np.random.default_rng(1).normal(size=(2, 1000))
RUNS = {
    "gamma": NORMS,
    "falling": 3 * np.exp(0.3 * NOISE[0] - STEPS / 400),
    "steady": 0.104 * (1 + 0.05 * NOISE[0]),
    "spikes": np.abs(NOISE[0] / NOISE[1]),
    "bfloat16": np.asarray(jnp.bfloat16(1 + 0.05 * NOISE[0]), np.float64),
}


@pytest.mark.parametrize("rate", [0.005, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("kind", RUNS)
def test_suggest_clips_within_a_fifth_of_the_requested_rate(kind, rate):
    suggestion = optclip.suggest(RUNS[kind], rate)
    printed = float(re.search("max_norm=(.*?) ", str(suggestion))[1])
    clipped = np.mean(RUNS[kind][100:] > printed)
    assert 0.8 * rate <= clipped <= 1.2 * rate
    assert suggestion.max_norm == printed
    assert suggestion.rate == clipped
    assert suggestion.steps == 900
    assert isinstance(suggestion, optclip.typing.Suggestion)
    assert "of 900 steps (first 100 skipped)" in str(suggestion)


def test_suggest_skips_and_counts_nonfinite_norms():
    """A run that may have diverged warns, even of a norm among the first, skipped."""
    spoiled = np.concatenate([NORMS, [np.nan, np.inf, np.nan]])
    suggestion, plain = (optclip.suggest(x, skip_first=0.0) for x in (spoiled, NORMS))
    assert plain.quantiles == {q: np.quantile(NORMS, q) for q in plain.quantiles}
    assert str(plain).endswith("of 1000 steps")
    assert suggestion == plain._replace(nonfinite=3)
    assert "3 more not finite" in str(suggestion)
    # Equal rewards have no gradient.
    without = optclip.suggest(np.append(NORMS, np.zeros(5000)), skip_first=0.0)
    assert without == plain._replace(zeros=5000)
    assert str(without).endswith("of 1000 steps, 5000 more zero")
    diverged = optclip.suggest(np.concatenate([NORMS[:8], [1e5], NORMS[9:]]))
    assert diverged.largest == 1e5
    words = "the largest norm of all is 1e+05, over 100 times the median"
    assert words in str(diverged)


def test_suggest_takes_metrics_per_step_or_stacked_or_a_file(tmp_path):
    history = [{"clip/norm": np.float32(n), "clip/rate": 0.0} for n in NORMS]
    stacked = {"clip/norm": NORMS, "clip/rate": 0 * NORMS}
    expected = optclip.suggest(NORMS)
    # Two digits are enough here.
    assert optclip.suggest(history).max_norm == expected.max_norm == 6.7
    assert optclip.suggest(stacked) == expected
    optclip.plot.save(stacked, tmp_path / "run.jsonl")
    assert optclip.suggest(tmp_path / "run.jsonl") == expected
    several = {"clip/norm": 2 * NORMS, "skip/norm/a": 3 * NORMS, "skip/norm/b": NORMS}
    assert optclip.suggest(several, clip="skip", part="b") == expected
    with pytest.raises(ValueError, match="clip='skip' and part=None choose a norm"):
        optclip.suggest(NORMS, clip="skip")


@pytest.mark.parametrize("norm", [1e-30, 3e38])
def test_suggest_of_equal_norms_clips_none(norm):
    suggestion = optclip.suggest(np.full(20, norm))
    assert suggestion.rate == 0
    np.testing.assert_allclose(suggestion.max_norm, norm, rtol=0.06)


@pytest.mark.parametrize(
    ("norms", "error", "words"),
    [
        (
            NORMS[:10],
            ValueError,
            "10 finite numbers above 0 after the first 10%, got 9",
        ),
        (np.zeros(20), ValueError, "got 0"),
        (["x"], TypeError, "`norms` must be an array of numbers"),
        (["x" * 1000], TypeError, r"`norms` must .*got \['x{98}\.\.\. \(list\)"),
        (-NORMS, ValueError, "`norms` must be at least 0"),
        ([{"clip/norm": None}], ValueError, "got 0"),
        ([{"loss": 1.0}], ValueError, "`norms` has no clipping norms"),
        (
            [{"a/norm": 1.0, "b/norm": 2.0}],
            ValueError,
            r"`clip` must be one of \['a', 'b'\], got None .* such as clip='a'",
        ),
        (
            {"clip/norm/head": NORMS, "clip/norm/body": NORMS},
            ValueError,
            r"`part` must be one of \['head', 'body'\], got None",
        ),
    ],
)
def test_suggest_of_unusable_norms_raises(norms, error, words):
    with pytest.raises(error, match=words):
        optclip.suggest(norms)
