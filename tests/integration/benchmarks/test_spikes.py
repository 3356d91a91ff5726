"""Check the plan, the training and the saved table of the spike benchmark."""

import pathlib

import chex
import numpy as np
import pytest

from benchmarks import results, spikes
from benchmarks.spikes import Plan
from examples.train_char_rnn import read_corpus
from optclip import recipes

PLAN = Plan(12, corrupted=(4,), bursts=(6,), mislabeled=(10,))
TINY = spikes.RNN._replace(window=8, batch=2)
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "spike_benchmark.md"


def test_train_seeds_differ_and_mislabeled_batch_raises_loss():
    method = spikes.methods()["global norm 0.3"]
    losses, final = spikes.train(TINY, method, PLAN, read_corpus(), range(2))
    assert (losses[:, 10] > 10 * losses[:, 9]).all()
    chex.assert_shape(losses, (2, 12))
    assert final[0] != final[1]
    assert np.isfinite(final).all()
    assert losses.dtype == np.float32


def test_plan_burst_raises_learning_rate_for_three_steps():
    rates = Plan(40).rates(1e-3)
    burst = Plan(40, bursts=(20,)).rates(1e-3)
    np.testing.assert_allclose(np.nonzero(burst != rates)[0], [20, 21, 22])
    np.testing.assert_allclose(burst[20:23], spikes.BURST_FACTOR * rates[20:23])
    assert rates.max() == pytest.approx(1e-3)


def test_spiked_plan_contains_every_kind():
    events = spikes.spiked(400).events()
    assert {kind for _, kind in events} == set(spikes.KINDS)
    assert [kind for _, kind in events].count("corrupted") == 4
    assert len({step for step, _ in events}) == len(events)


def test_methods_contain_every_recipe():
    assert set(recipes.__all__) <= spikes.methods().keys()


def test_lost_to_counts_steps_above_level_before_spike():
    plan = Plan(8, corrupted=(2,), bursts=(5,))
    smooth = np.array([[3, 2, 4, 1, 1, 9, 1, np.nan], [3, 2, 1, 1, 1, 1, 1, 1]])
    assert spikes.lost_to(smooth, plan) == {"corrupted": [1, 0], "burst": [2, 0]}
    assert spikes.lost_to(smooth, Plan(8)) == {}


def test_smoothed_loss_skips_spikes():
    means = spikes.smoothed(np.array([[2.0, 100.0, 1.0]]), np.array([1, 0, 1]))
    np.testing.assert_allclose(means, [[2.0, 2.0, 1.9]])


def test_table_nan_loss_ranks_last():
    rows = [
        {
            "model": "rnn", "method": method, "spikes": True, "held_out": losses,
            "lost_to": {"burst": [3, 5]},
        }
        for method, losses in (("bad", ["nan", "nan"]), ("good", [2.0, 3.0]))
    ]  # fmt: skip
    assert spikes.table(rows).splitlines()[2:] == [
        "| good | 2.500 (2.000–3.000) | 4 |",
        "| bad | inf (nan–nan) | 4 |",
    ]


def test_page_table_equals_saved_results():
    saved = results.read(results.FOLDER / "spikes.json")["spikes"]
    assert spikes.table(saved["rows"]) in PAGE.read_text()
    assert {row["method"] for row in saved["rows"]} == spikes.methods().keys()
