"""The main job runs, and clips do in it what its page says."""

import pathlib
import subprocess
import sys

import numpy as np

from tests.contracts import typed_user

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


def test_quick_run_from_the_command_line(tmp_path):
    out = tmp_path / "picture.png"
    script = ROOT / "examples" / "train_char_rnn.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "--quick", "--out", out],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 10_000
    for column in ("lowest loss", "at rate", "clipped", "close at", "learns at"):
        assert column in done.stdout
    assert "networks learn" in done.stderr  # The progress bar.


def learns(method, rates, bad_batches):
    """At which of the rates the networks of both seeds learn, in a fifth of the steps."""
    import train_char_rnn as job

    corpus = job.read_corpus()
    experiment = job.Experiment("", [method], np.array(rates), bad_batches)
    losses = job.train(method, experiment, corpus, steps=60, seeds=2).losses
    learned = losses < corpus.unigram_loss
    assert (learned.all(axis=1) == learned.any(axis=1)).all()
    return learned.all(axis=1).tolist()


def test_a_clip_moves_up_the_rate_at_which_training_is_lost():
    assert learns("no clip", [0.25, 2.0], bad_batches=0) == [True, False]
    assert learns("leaf 0.1", [0.25, 2.0], bad_batches=0) == [True, True]


def test_no_learning_rate_helps_against_bad_batches():
    assert learns("no clip", [1 / 512, 1 / 4], bad_batches=3) == [False, False]
    assert learns("leaf 0.1", [1 / 4], bad_batches=3) == [True]
    assert learns("skip above 10", [1 / 4], bad_batches=3) == [True]


def test_sharded_training_is_training_on_one_device():
    script = ROOT / "examples" / "train_sharded.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "--quick"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "each device holds (16, 32)" in done.stdout
    assert "The norms of the first step differ by" in done.stdout


def test_the_typed_user():
    """What pyright reads does what it says."""
    said = typed_user.main().splitlines()
    assert [line.split(":")[0] for line in said if not line.startswith(" ")] == [
        "clip", "halved", "leaves", "skip"
    ]  # fmt: skip
