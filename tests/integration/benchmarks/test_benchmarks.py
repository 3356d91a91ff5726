"""Run each benchmark of `python -m benchmarks` at tiny sizes."""

import importlib
import math
import time

import numpy as np
import pytest

from benchmarks import __main__, clip, results, timing
from benchmarks.timing import Contender


@pytest.mark.parametrize(
    "benchmark",
    ["clip", "eager", "step", "skip", "train", "compile", "matrices", "spikes"],
)
def test_benchmark_tiny_prints_complete_table(benchmark):
    module = importlib.import_module(f"benchmarks.{benchmark}")
    rows = list(module.rows(tiny=True))
    table = getattr(module, "table", results.table)(rows).splitlines()
    assert len(table) > 3
    assert len({line.count("|") for line in table}) == 1
    # A contender with a wrong result has no time.
    ours = [row for row in rows if row.get("contender", "").startswith("optclip")]
    assert all("ms" in row or "seconds" in row for row in ours)


def test_command_tiny_prints_table_and_saves_nothing(capsys, monkeypatch):
    # A call of `save` raises instead of overwriting the committed results.
    monkeypatch.delattr(results, "save")
    monkeypatch.setattr(timing, "clock", timing.clock)
    __main__.main(["matrices", "--tiny", "--cpu-time"])
    assert timing.clock is time.process_time
    assert "| 16 x 24 | optax, muon | " in capsys.readouterr().out


def test_race_wrong_result_has_no_time():
    ones = np.ones(3, np.float32)
    _, error = clip.checked([ones])
    results = {
        "optclip": clip.FRACTION * ones,
        "a bit off": 1.02 * clip.FRACTION * ones,
        "wrong": ones,
        "nan": math.nan * ones,
    }
    contenders = {
        name: Contender(lambda each=each: [each], error=error)
        for name, each in results.items()
    }
    rows = {r["contender"]: r for r in timing.race(contenders, 3, against="optclip")}
    assert [name for name in rows if "ms" in rows[name]] == ["optclip", "a bit off"]
    assert rows["optclip"]["over optclip"] == 1
    assert rows["wrong"]["error"] == pytest.approx(1.5, abs=0.01)
