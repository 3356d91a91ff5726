"""Run the examples from the command line, and check their claims."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))


def run_quick(name, *arguments):
    """Run an example with warnings as errors; return its output."""
    command = [sys.executable, "-W", "error", EXAMPLES / name, "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


DRAWN = {
    "train_gpt.py": ["after bursts", "held-out text", "skipped"],
    "train_char_rnn.py": ["lowest loss", "at rate", "clipped", "close at", "learns at"],
    "train_muon.py": ["largest logit", "steps above 105", "clipped", "held out"],
    "train_backward.py": ["learns at", "ratio: median", "above 1.01", "cosine: median"],
}


@pytest.mark.parametrize("name", DRAWN)
def test_example_quick_run_prints_table_and_saves_plot(name, tmp_path):
    plot = tmp_path / "plot.png"
    table = run_quick(name, "--out", str(plot))
    assert plot.stat().st_size > 10_000
    for column in DRAWN[name]:
        assert column in table


# The number of heading lines, and the first words of each row.
COSTS = {
    "muon_cost.py": (1, [
        "Muon", "+ largest logits", "+ QK-Clip", "max_attention_logit",
        "clip_attention_logits", "empty program",
    ]),
    "backward_cost.py": (2, [
        "unclipped", "per example", "whole state", "per element", "twice the median",
    ]),
    "private_cost.py": (3, [
        "plain gradient", "vmap", "microbatches of 1", "microbatches of 4",
        "ghost, only norms", "ghost",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_cost_quick_run_prints_each_row(name):
    start, expected = COSTS[name]
    lines = [x for x in run_quick(name).splitlines() if "jax_privacy" not in x]
    assert len(lines) == start + len(expected)
    for line, row in zip(lines[start:], expected, strict=True):
        assert re.match(rf"{re.escape(row)}\s", line)


def test_train_sharded_quick_run_shards_parameters():
    table = run_quick("train_sharded.py")
    assert "each device holds (16, 32)" in table
    assert "The norms of the first step differ by" in table


def learns(method, rates, bad_batches):
    """Return for each rate whether both networks learn within 60 steps."""
    import train_char_rnn as job

    corpus = job.read_corpus()
    experiment = job.Experiment("", [method], np.array(rates), bad_batches)
    losses = job.train(method, experiment, corpus, steps=60, seeds=2).losses
    learned = losses < corpus.unigram_loss
    assert (learned.all(axis=1) == learned.any(axis=1)).all()
    return learned.all(axis=1).tolist()


@pytest.mark.parametrize(
    ("method", "rates", "bad_batches", "expected"),
    [
        ("unclipped", [0.25, 2.0], 0, [True, False]),
        ("leaf 0.1", [0.25, 2.0], 0, [True, True]),
        ("unclipped", [1 / 512, 1 / 4], 3, [False, False]),
        ("leaf 0.1", [1 / 4], 3, [True]),
        ("skip above 10", [1 / 4], 3, [True]),
    ],
)
def test_char_rnn_large_rate_or_bad_batch_learns_only_if_clipped(
    method, rates, bad_batches, expected
):
    assert learns(method, rates, bad_batches) == expected


def test_train_muon_qk_clip_lowers_logits_of_same_run(monkeypatch):
    """Both runs are bit-identical up to the first clipped head."""
    import train_muon as job

    # A low threshold clips within a few steps.
    monkeypatch.setattr(job, "METHODS", {"without": np.inf, "with": 30.0})
    corpus = job.with_rare_as_one(job.read_corpus())
    runs = job.train(corpus, steps=2 * job.CHUNK, seeds=1)
    (unclipped,), (clipped,) = runs["without"], runs["with"]
    first = int(np.argmax(clipped.clipped)) + 1
    assert clipped.clipped.any()
    assert (unclipped.peaks[:first] == clipped.peaks[:first]).all()
    assert clipped.peaks[first:].max() < unclipped.peaks[first:].max()
    assert not unclipped.clipped.any()
