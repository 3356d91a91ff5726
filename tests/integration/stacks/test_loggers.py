"""Read back the records of each logger on the page."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import optclip
from tests.integration.stacks import page, wandb_file

KEYS = {
    f"clip/{key}"
    for key in (
        "clipped", "coefficient", "nonfinite", "norm", "rate", "steps", "threshold",
    )
}  # fmt: skip
# By default the reader samples ten steps.
ALL = {"scalars": 0, "tensors": 0}


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Return the names of the run that the page logs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = page.run("A run to log")
    history = names["history"]
    assert len(history) == 20
    assert all(set(logged) == KEYS for logged in history)
    # All steps differ, so that swapped steps are detected.
    assert len({logged["clip/norm"] for logged in history}) == 20
    assert 0 < history[-1]["clip/rate"] < 1
    return names


def check(columns, history):
    """Compare each key at all steps in float32."""
    assert set(columns) == KEYS
    for key, values in columns.items():
        expected = np.float32([logged[key] for logged in history])
        np.testing.assert_array_equal(np.float32(values), expected, err_msg=key)


@pytest.mark.parametrize("title", ["TensorBoard", "clu"])
def test_tensorboard_reads_back_all_steps(names, title):
    page.run(title, names)
    events = EventAccumulator(f"logs/{title.lower()}", ALL)
    events.Reload()
    # clu writes tensors, TensorBoard's own writer scalars.
    tags = events.Tags()
    columns = {key: events.Scalars(key) for key in tags["scalars"]}
    columns |= {key: events.Tensors(key) for key in tags["tensors"]}
    assert all([e.step for e in each] == list(range(20)) for each in columns.values())

    def value(event):
        has_tensor = hasattr(event, "tensor_proto")
        return (
            tensor_util.make_ndarray(event.tensor_proto) if has_tensor else event.value
        )

    check(
        {k: [value(e) for e in each] for k, each in columns.items()}, names["history"]
    )


def test_weights_and_biases_reads_back_all_steps(names):
    page.run("Weights & Biases", names)
    steps = wandb_file.history(names["run"].settings.sync_file)
    assert [step["_step"] for step in steps] == list(range(20))
    check({key: [step[key] for step in steps] for key in KEYS}, names["history"])


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="Aim's storage has no wheel for Python 3.13"
)
# Aim 3.29 uses a deprecated name of SQLAlchemy.
@pytest.mark.filterwarnings("ignore:The ``declarative_base:DeprecationWarning")
def test_aim_reads_back_all_steps(names):
    page.run("Aim", names)
    aim = names["aim"]
    quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
    again = aim.Run(names["run"].hash, repo="logs", **quiet)
    columns = {each.name: each.values.sparse_numpy()[1] for each in again.metrics()}
    again.close()
    assert set(columns) == KEYS
    for key, values in columns.items():
        # Aim does not preserve the order of steps.
        expected = [logged[key] for logged in names["history"]]
        np.testing.assert_allclose(np.sort(values), np.sort(expected), rtol=1e-6)


def test_json_lines_are_read_back_and_plotted(names):
    page.run("JSON lines", names)
    lines = Path("logs/clip.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == names["history"]
    optclip.plot.save(names["history"], "logs/saved.jsonl")
    saved = Path("logs/saved.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in saved] == names["history"]
    line = optclip.plot.norms("logs/clip.jsonl").get_lines()[0]
    norms = [logged["clip/norm"] for logged in names["history"]]
    np.testing.assert_allclose(line.get_ydata(), norms)
