"""The main job runs, and clipping does in it what it is for."""

import pathlib
import subprocess
import sys

import pytest

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
    for column in ("clip", "loss, nats", "bits/char", "diverged", "clip rate"):
        assert column in done.stdout
    assert "clipped" in done.stderr  # The progress bar.


@pytest.mark.parametrize("clip", ["no clip", "by global norm, 0.25"])
def test_only_the_clipped_run_learns(clip, monkeypatch):
    """At twice the job's rate, where rounding does not decide when a run diverges."""
    import train_char_rnn

    monkeypatch.setattr(train_char_rnn, "LEARNING_RATE", 2.0)
    corpus = train_char_rnn.read_corpus()
    run = train_char_rnn.train(clip, corpus, steps=60, seed=0)
    learned = run.held_out_loss < corpus.unigram_loss
    assert learned == (clip != "no clip")
    after = max(run.trace.norm_after)
    assert after <= 0.2501 if learned else after > 100


def test_sharded_training_is_training_on_one_device():
    script = ROOT / "examples" / "train_sharded.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "--quick"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "each device holds (64, 128)" in done.stdout
    assert "The norms of the first step differ by" in done.stdout


def test_the_typed_user():
    """What pyright reads does what it says."""
    said = typed_user.main().splitlines()
    assert [line.split(":")[0] for line in said if not line.startswith(" ")] == [
        "clip", "halved", "leaves", "skip"
    ]  # fmt: skip
