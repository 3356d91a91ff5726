"""A fixed threshold from the norms of a run."""

import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from tests.support import helpers

NORMS = np.random.default_rng(0).gamma(4.0, size=1000)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_it_clips_as_often_as_asked(rate):
    found = optclip.suggest(NORMS, rate)
    seen = NORMS[100:]
    assert np.mean(seen > found.max_norm) == found.rate
    assert 0.5 * rate <= found.rate <= rate
    assert found.max_norm >= np.quantile(seen, 1 - rate)
    assert found.max_norm == float(f"{found.max_norm:.2g}")
    assert found.steps == 900


def test_quantiles_are_numpy_s():
    found = optclip.suggest(NORMS, skip_first=0.0)
    assert found.quantiles == {q: np.quantile(NORMS, q) for q in found.quantiles}
    assert "of 1000 steps" in str(found)


def test_what_is_not_finite_is_counted_and_left_out():
    norms = np.concatenate([NORMS, [np.nan, np.inf, np.nan]])
    found = optclip.suggest(norms, skip_first=0.0)
    assert found.nonfinite == 3
    assert found.max_norm == optclip.suggest(NORMS, skip_first=0.0).max_norm
    assert "3 more not finite" in str(found)


def test_a_run_that_may_be_lost_says_so():
    """Also where the norm that lost it is among those left out."""
    assert "times the median" not in str(optclip.suggest(NORMS))
    spoiled = np.concatenate([NORMS[:8], [1e5], NORMS[9:]])
    found = optclip.suggest(spoiled)
    assert found.largest == 1e5
    assert "the largest norm of all is 1e+05, over 100 times the median" in str(found)


def test_it_takes_what_metrics_gives():
    tx = optclip.clip_by_global_norm(jnp.inf)
    update, state = helpers.quick_jit(tx.update), tx.init(jnp.zeros(1))
    history = []
    for norm in NORMS[:20]:
        _, state = update(jnp.array([norm]), state)
        history.append(optclip.metrics(state))
    found = optclip.suggest(history, skip_first=0.0)
    expected = optclip.suggest(NORMS[:20], skip_first=0.0)
    assert found.max_norm == expected.max_norm


@pytest.mark.parametrize("norms", [np.zeros(20), np.full(20, 1e-30), np.full(20, 3e38)])
def test_equal_norms_of_any_size_have_a_threshold(norms):
    found = optclip.suggest(norms)
    assert found.rate == 0
    np.testing.assert_allclose(found.max_norm, norms[0], rtol=0.06)


def test_too_few_norms_and_those_of_several_clips_are_refused():
    with pytest.raises(
        ValueError, match="at least 10 finite numbers after the first 10%, got 9"
    ):
        optclip.suggest(NORMS[:10])
    with pytest.raises(TypeError, match="`norms` must be an array of numbers"):
        optclip.suggest(["x"])
    with pytest.raises(ValueError, match="`norms` must be 0 or more"):
        optclip.suggest(-NORMS)
    with pytest.raises(
        ValueError, match=r"the one norm of a tree, got a dict with \['loss'\]"
    ):
        optclip.suggest([{"loss": 1.0}])
    two = {"a/norm": 1.0, "b/norm": 2.0}
    with pytest.raises(
        ValueError, match=r"'a/norm', 'b/norm'.*\[m\['a/norm'\] for m in history\]"
    ):
        optclip.suggest([two])
    with pytest.raises(ValueError, match=r"\['clip/norm/head'\].*of a group its own"):
        optclip.suggest({"clip/norm/head": NORMS, "clip/rate/head": NORMS})
    with pytest.raises(ValueError, match="got 0"):
        optclip.suggest([{"clip/norm": None}])
    with pytest.raises(TypeError, match=r"`norms` must .*got \['x{98}\.\.\. \(list\)"):
        optclip.suggest(["x" * 1000])
    assert optclip.suggest(NORMS[:10], skip_first=0.0).steps == 10


def test_metrics_stacked_by_scan():
    stacked = {"clip/norm": NORMS, "clip/rate": 0 * NORMS}
    assert optclip.suggest(stacked) == optclip.suggest(NORMS)
