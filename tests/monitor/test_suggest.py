"""A fixed threshold from the norms of a run."""

import numpy as np
import pytest

import optclip

NORMS = np.random.default_rng(0).gamma(4.0, size=1000)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_suggest_clips_at_most_the_requested_rate(rate):
    suggestion = optclip.suggest(NORMS, rate)
    norms = NORMS[100:]
    assert np.mean(norms > suggestion.max_norm) == suggestion.rate
    assert 0.5 * rate <= suggestion.rate <= rate
    assert suggestion.max_norm >= np.quantile(norms, 1 - rate)
    assert suggestion.max_norm == float(f"{suggestion.max_norm:.2g}")
    assert suggestion.steps == 900


def test_suggest_skips_and_counts_nonfinite_norms():
    spoiled = np.concatenate([NORMS, [np.nan, np.inf, np.nan]])
    suggestion, plain = (optclip.suggest(x, skip_first=0.0) for x in (spoiled, NORMS))
    assert plain.quantiles == {q: np.quantile(NORMS, q) for q in plain.quantiles}
    assert "of 1000 steps" in str(plain)
    assert suggestion == plain._replace(nonfinite=3)
    assert "3 more not finite" in str(suggestion)


def test_suggest_of_run_that_may_have_diverged_warns():
    """Also where the largest norm is among the first, which are skipped."""
    assert "times the median" not in str(optclip.suggest(NORMS))
    suggestion = optclip.suggest(np.concatenate([NORMS[:8], [1e5], NORMS[9:]]))
    assert suggestion.largest == 1e5
    words = "the largest norm of all is 1e+05, over 100 times the median"
    assert words in str(suggestion)


def test_suggest_takes_metrics_per_step_or_stacked():
    history = [{"clip/norm": np.float32(n), "clip/rate": 0.0} for n in NORMS]
    stacked = {"clip/norm": NORMS, "clip/rate": 0 * NORMS}
    expected = optclip.suggest(NORMS)
    assert optclip.suggest(history).max_norm == expected.max_norm
    assert optclip.suggest(stacked) == expected


@pytest.mark.parametrize("norm", [0.0, 1e-30, 3e38])
def test_suggest_of_equal_norms_clips_none(norm):
    suggestion = optclip.suggest(np.full(20, norm))
    assert suggestion.rate == 0
    np.testing.assert_allclose(suggestion.max_norm, norm, rtol=0.06)


@pytest.mark.parametrize(
    ("norms", "error", "words"),
    [
        (NORMS[:10], ValueError, "10 finite numbers after the first 10%, got 9"),
        (["x"], TypeError, "`norms` must be an array of numbers"),
        (["x" * 1000], TypeError, r"`norms` must .*got \['x{98}\.\.\. \(list\)"),
        (-NORMS, ValueError, "`norms` must be 0 or more"),
        ([{"clip/norm": None}], ValueError, "got 0"),
        ([{"loss": 1.0}], ValueError, r"the one norm of a tree, got .*\['loss'\]"),
        (
            [{"a/norm": 1.0, "b/norm": 2.0}],
            ValueError,
            r"'a/norm', 'b/norm'.*\[m\['a/norm'\] for m in history\]",
        ),
        (
            {"clip/norm/head": NORMS, "clip/rate/head": NORMS},
            ValueError,
            r"\['clip/norm/head'\].*of a group its own",
        ),
    ],
)
def test_suggest_of_unusable_norms_raises(norms, error, words):
    with pytest.raises(error, match=words):
        optclip.suggest(norms)
