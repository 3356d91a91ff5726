"""The spike bench: its spikes are spikes, its numbers are right, its page is written."""

import chex
import numpy as np
import pytest

from benchmarks.spikes import measures, methods, models, page, plan, record, training
from benchmarks.spikes.__main__ import Job, head, jobs, main, rows
from benchmarks.spikes.plan import Plan
from examples.train_char_rnn import read_corpus
from optclip import recipes

PLAN = Plan(12, corrupted=(4,), bursts=(6,), mislabelled=(10,))
TINY = models.RNN._replace(window=8, batch=2)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


@pytest.fixture(scope="module")
def trained(corpus):
    return training.train(TINY, method("global norm 0.3"), PLAN, corpus, range(2))


def method(name):
    return next(each for each in methods.all_methods() if each.name == name)


def test_spikes_raise_the_norm(trained):
    ordinary = trained.norm[:, plan_is_clean()].max(axis=1)
    assert (trained.norm[:, 10] > 10 * ordinary).all()
    assert (trained.loss[:, 10] > 10 * trained.loss[:, 9]).all()


def test_seeds_differ_and_learning_goes_on_in_float32(trained):
    chex.assert_shape([trained.loss, trained.norm], (2, 12))
    assert trained.held_out[0] != trained.held_out[1]
    assert np.isfinite(trained.held_out).all()
    assert trained.loss.dtype == np.float32


def test_a_burst_is_a_large_learning_rate_for_three_steps():
    calm = Plan(40).rates(1e-3)
    hit = Plan(40, bursts=(20,)).rates(1e-3)
    np.testing.assert_allclose(np.nonzero(hit != calm)[0], [20, 21, 22])
    np.testing.assert_allclose(hit[20:23], plan.BURST_FACTOR * calm[20:23])
    assert calm.max() == pytest.approx(1e-3)


def test_every_kind_of_spike_is_in_the_plan():
    events = plan.spiked(400).events()
    assert {kind for _, kind in events} == set(plan.KINDS)
    assert [kind for _, kind in events].count("corrupted") == 4
    assert len({step for step, _ in events}) == len(events)


def test_every_recipe_is_a_method():
    names = {each.name for each in methods.all_methods()}
    assert set(recipes.__all__) <= names
    assert len([each for each in methods.all_methods() if each.family]) == 5


def test_steps_lost_are_those_above_the_level_before_a_spike():
    hit = Plan(8, corrupted=(2,), bursts=(5,))
    smooth = np.array([[3, 2, 4, 1, 1, 9, 1, np.nan], [3, 2, 1, 1, 1, 1, 1, 1]])
    assert measures.lost(smooth, hit) == [3, 0]
    assert measures.lost_to(smooth, hit) == {"corrupted": [1, 0], "burst": [2, 0]}
    assert measures.lost(smooth, Plan(8)) == [0, 0]
    assert measures.lost_to(smooth, Plan(8)) == {}


def test_the_smoothed_loss_leaves_spikes_out():
    found = measures.smoothed(np.array([[2.0, 100.0, 1.0]]), np.array([1, 0, 1]))
    np.testing.assert_allclose(found, [[2.0, 2.0, 1.9]])


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, None),
        ({"clip/norm": [9.0], "clip/rate": [0.5]}, [0.5]),
        ({"clip/rate/a": [0.1], "clip/rate/b": [0.3]}, [0.3]),
        ({"max/rate": [0.2], "norm/rate": [1.0]}, [0.2]),
        ({"skip/rate": [0.9], "skip/skipped": [6]}, [0.5]),
    ],
)
def test_rate_is_of_skips_or_of_the_first_clip(metrics, expected):
    arrays = {key: np.array(value) for key, value in metrics.items()}
    assert measures.rate(arrays, 12) == expected


def test_page_of_a_tiny_bench(corpus, tmp_path):
    """One model is trained; the other has the same numbers, one seed diverged."""
    found = list(rows([Job(TINY, method("no clip"), PLAN)], corpus, range(2)))
    sound = {**found[0], "diverged": [False, False]}
    losses = [*sound["held_out"][:1], float("nan")]
    spoilt = {**sound, "diverged": [False, True], "held_out": losses}
    data = head(PLAN, 2, corpus, small=True)
    for model in data["models"]:
        best = {"method": "global norm 1", "family": "tuned"}
        data["rows"] += [{**sound, "model": model, **best}, {**spoilt, "model": model}]
    record.save(tmp_path / "spikes.json", data)
    main(["--saved", "--out", f"{tmp_path}/spikes.json", "--page", f"{tmp_path}/a.md"])
    text = (tmp_path / "a.md").read_text()
    assert "| global norm 1, best |" in text
    assert "NaN" in text
    assert "With a seed that diverged: no clip" in text
    assert (tmp_path / page.WHERE).stat().st_size > 10_000


def test_all_jobs_share_the_spikes():
    todo = jobs(methods.all_methods(), PLAN)
    assert len(todo) == 2 * (1 + len(methods.all_methods()))
    assert sum(not each.plan.events() for each in todo) == 2


def plan_is_clean():
    return PLAN.kinds() == plan.CLEAN
