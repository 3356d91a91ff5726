"""The main job runs, and clips do in it what its page says."""

import pathlib
import re
import subprocess
import sys

import numpy as np

from tests.contracts import typed_user

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


def run_quick(name, *arguments):
    """What an example prints, from the command line, with warnings as errors."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            ROOT / "examples" / name,
            "--quick",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    said = run_quick("train_sharded.py")
    assert "each device holds (16, 32)" in said
    assert "The norms of the first step differ by" in said


def test_the_typed_user():
    """What pyright reads does what it says."""
    said = typed_user.main().splitlines()
    assert [line.split(":")[0] for line in said if not line.startswith(" ")] == [
        "clip", "halved", "leaves", "skip"
    ]  # fmt: skip


def test_qk_clip_keeps_logits_of_the_same_run_down(monkeypatch):
    """Up to where the first head is clipped both runs are one, to the bit."""
    import train_muon as job

    monkeypatch.setattr(job, "METHODS", {"without": np.inf, "with": 30.0})
    corpus = job.with_rare_as_one(job.read_corpus())
    runs = job.train(corpus, steps=2 * job.CHUNK, seeds=1)
    (free,), (kept,) = runs["without"], runs["with"]
    first = int(np.argmax(kept.clipped)) + 1
    assert kept.clipped.any()
    assert (free.peaks[:first] == kept.peaks[:first]).all()
    assert kept.peaks[first:].max() < free.peaks[first:].max()
    assert not free.clipped.any()


def test_quick_run_of_muon_from_the_command_line(tmp_path):
    out = tmp_path / "picture.png"
    said = run_quick("train_muon.py", "--out", str(out))
    assert out.stat().st_size > 10_000
    for column in ("largest logit", "steps above 105", "clipped", "held out"):
        assert column in said


def test_quick_run_of_what_qk_clip_costs():
    said = run_quick("muon_cost.py")
    assert [line[:22].strip() for line in said.splitlines()[1:]] == [
        "Muon", "and largest logits", "and QK-Clip",
        "max_attention_logit", "clip_attention_logits", "an empty program",
    ]  # fmt: skip


def test_quick_run_of_what_a_clip_of_cotangents_costs():
    said = run_quick("backward_cost.py")
    assert [line[:17].strip() for line in said.splitlines()[1:]] == [
        "no clip", "each example", "the whole state", "each element", "twice the median"
    ]  # fmt: skip


def test_quick_run_of_clips_of_cotangents(tmp_path):
    out = tmp_path / "picture.png"
    said = run_quick("train_backward.py", "--out", str(out))
    assert out.stat().st_size > 10_000
    for arm in ("no clip", "global norm", "cotangent", "both"):
        lines = [x for x in said.splitlines() if re.match(rf"{arm} +\d.* \d of 1 ", x)]
        assert len(lines) == 2
    for column in ("learns at", "ratio: median", "above 1.01", "cosine: median"):
        assert said.count(column) == 2


def test_arms_differ_in_their_thresholds_alone():
    import train_backward as job
    from backward_tasks import adding_task

    task = adding_task()
    grids = job.grids(task)
    norms, cotangents = (
        {name: {setting[i] for setting in grid} for name, grid in grids.items()}
        for i in (1, 2)
    )
    assert norms["no clip"] == norms["cotangent"] == {np.inf}
    assert norms["global norm"] == set(task.max_norms)
    assert cotangents["no clip"] == cotangents["global norm"] == {np.inf}
    assert cotangents["cotangent"] == set(task.max_cotangents)
    for grid in grids.values():
        assert {setting.rate for setting in grid} == set(task.rates)


def test_quick_run_of_what_clipped_examples_cost():
    lines = run_quick("private_cost.py").splitlines()
    wanted = [
        "plain gradient", "vmap", "microbatches of 1", "microbatches of 4",
        "ghost, norms alone", "ghost",
    ]  # fmt: skip
    ours = [line for line in lines if "jax_privacy" not in line]
    assert [line[:30].strip() for line in ours[3:]] == wanted
