"""Compare training in several processes with one, and restart after a crash.

All runs have 8 devices. Each compares the norms of its first step with the gradients.
"""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.integration.processes.training_process import SAVE_AT, STEPS

ROOT = pathlib.Path(__file__).parents[3]
# Seconds. Four processes on two cores took 20, and 130 on a busy machine.
LIMIT = 1200
# Of numbers that were computed on the same devices by other processes.
NEAR = {"rtol": 1e-5, "atol": 1e-6}


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
    """Return a cached function from a number of processes to their result."""
    results = {}

    def of(count):
        if count not in results:
            folder = tmp_path_factory.mktemp(f"whole{count}")
            codes, logs = run(count, folder)
            assert codes == [0] * count, logs
            results[count] = result(folder)
        return results[count]

    return of


@pytest.mark.parametrize("count", [2, 4])
def test_training_in_several_processes_equals_one(count, whole):
    one, several = whole(1), whole(count)
    assert several["split"] > 4  # Parameters and momentum are sharded.
    assert several.keys() == one.keys()
    np.testing.assert_allclose(several["ratios"], 1, rtol=1e-6)
    # Clipped, so that the runs agree only if their norms do.
    assert np.all(several["log"][:, 1] > 0.25)
    np.testing.assert_allclose(several["log"][0], one["log"][0], rtol=2.8e-7)
    np.testing.assert_allclose(several["log"], one["log"], rtol=1e-4)
    for key in several:
        np.testing.assert_allclose(several[key], one[key], rtol=1e-3, atol=1e-4)


def test_training_dead_process_ends_others_and_restart_continues(tmp_path, whole):
    broken = tmp_path / "broken"
    codes, logs = run(2, broken, die_at=SAVE_AT + 1)
    assert codes[1] == 17
    assert codes[0] not in (0, None)
    # Either the network or JAX's heartbeat detects the dead process first.
    errors = "Task 1 heartbeat timeout|closed by peer|Connection reset"
    assert re.search(errors, logs[0]), logs[0]
    assert not (broken / "result.npz").exists()
    moved = tmp_path / "moved"
    shutil.copytree(broken, moved)
    expected = whole(2)
    for count, folder in {2: broken, 1: moved}.items():
        codes, logs = run(count, folder)
        assert codes == [0] * count, logs
        restarted = result(folder)
        np.testing.assert_allclose(restarted["ratios"], 1, rtol=1e-6)
        assert len(restarted["log"]) == STEPS - SAVE_AT
        later, first = expected["log"][SAVE_AT:], restarted["log"]
        np.testing.assert_allclose(first, later, rtol=0 if count == 2 else 2.8e-7)
        for key in expected.keys() - {"log", "ratios", "split"}:
            # Thresholds and the history were restored, in one process also.
            exact = count == 2 or key.startswith("saved")
            np.testing.assert_allclose(
                restarted[key], expected[key], **({"rtol": 0} if exact else NEAR)
            )
