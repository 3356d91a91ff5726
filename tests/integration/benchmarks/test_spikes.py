"""Check the plan, the training and the saved table of the spike benchmark."""

import pathlib
import re

import chex
import numpy as np

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


def test_methods_contain_every_recipe():
    assert set(recipes.__all__) <= spikes.methods().keys()


def test_tables_equal_saved_results():
    saved = results.read(results.FOLDER / "spikes.json")["spikes"]
    table = spikes.table(saved["rows"])
    assert table in (results.FOLDER / "spikes.md").read_text()
    shown = re.findall(r"^\| .*", PAGE.read_text(), re.MULTILINE)
    assert len(shown) >= 10
    rest = iter(table.splitlines())
    assert not [line for line in shown if line not in rest]
    assert {row["method"] for row in saved["rows"]} == spikes.methods().keys()
