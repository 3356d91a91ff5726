"""Training over several processes equals training in one, and continues after a crash."""

import json
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.integration.processes.training_process import SAVE_AT, STEPS

ROOT = pathlib.Path(__file__).parents[3]
# Seconds, for a process that hangs; four on two cores took 20, and 130 beside other work.
LIMIT = 1200


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(count, folder, **more):
    """Start all processes; return their exit codes and logs."""
    port, started = free_port(), time.monotonic()
    folder.mkdir(exist_ok=True)
    processes, logs = [], []
    for process in range(count):
        config = {
            "process": process,
            "count": count,
            "port": port,
            "folder": str(folder),
        }
        logs.append(folder / f"{process}.log")
        with logs[-1].open("w") as log:
            command = [
                sys.executable,
                "-m",
                "tests.integration.processes.training_process",
            ]
            processes.append(
                subprocess.Popen(
                    [*command, json.dumps(config | more)],
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [p.wait(LIMIT - (time.monotonic() - started)) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return codes, [log.read_text() for log in logs]


def result(folder):
    return dict(np.load(folder / "result.npz"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function from a number of processes to their result, each run once."""
    found = {}

    def of(count):
        if count not in found:
            folder = tmp_path_factory.mktemp(f"whole{count}")
            codes, logs = run(count, folder)
            assert codes == [0] * count, logs
            found[count] = result(folder)
        return found[count]

    return of


@pytest.mark.parametrize("count", [2, 4])
def test_training_in_several_processes_equals_one(count, whole):
    alone, found = whole(1), whole(count)
    assert found["split"] > 4  # Parameters and momentum are in parts.
    assert found.keys() == alone.keys()
    # Clipped, or all runs would agree whatever norm they had.
    assert np.all(found["seen"][:, 1] > 0.25)
    np.testing.assert_allclose(found["seen"], alone["seen"], rtol=1e-4)
    for key in found:
        np.testing.assert_allclose(found[key], alone[key], rtol=1e-3, atol=1e-4)


def test_training_dead_process_ends_others_and_restart_continues(tmp_path, whole):
    broken = tmp_path / "broken"
    codes, logs = run(2, broken, die_at=SAVE_AT + 1)
    assert codes[1] == 17
    assert codes[0] not in (0, None)
    # By the network, if it is heard first, or by what JAX itself watches.
    said = "Task 1 heartbeat timeout|closed by peer|Connection reset"
    assert re.search(said, logs[0]), logs[0]
    assert not (broken / "result.npz").exists()
    codes, logs = run(2, broken)
    assert codes == [0, 0], logs
    expected, found = whole(2), result(broken)
    assert len(found["seen"]) == STEPS - SAVE_AT
    np.testing.assert_array_equal(found["seen"], expected["seen"][SAVE_AT:])
    for key in expected.keys() - {"seen"}:
        np.testing.assert_array_equal(found[key], expected[key])
