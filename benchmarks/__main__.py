"""Run benchmarks, print a table for each and save it: `python -m benchmarks`.

Each benchmark replaces its table in `benchmarks/results/<backend>.json` and writes it
to `<benchmark>.md` in the same folder. Both are saved after every row, so an
interrupted run keeps its rows. Two benchmarks run only by name: `spikes` trains for ten
minutes; `gpu` runs within a time limit.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import machine, results, timing

BENCHMARKS = {
    "clip": "clipping alone",
    "eager": "clipping a few small leaves outside jax.jit",
    "step": "clipping and an optimizer step",
    "skip": "skipping around clipping and an optimizer step",
    "train": "a training step of a GPT-2",
    "compile": "CPU time to compile",
    "matrices": "clipping the singular values of a matrix",
    "spikes": "clipping methods on training runs with spikes",
    "gpu": "equality with the CPU, times and kernels on one GPU",
}
BY_NAME_ONLY = ("spikes", "gpu")


def main(argv: Sequence[str] | None = None) -> None:
    lines = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="BENCHMARK",
        # Python 3.11 compares the empty list with the choices too.
        choices=[*BENCHMARKS, []],
        help=f"{lines}; default: all except {', '.join(BY_NAME_ONLY)}",
    )
    parser.add_argument(
        "--tiny",
        "--small",
        action="store_true",
        help="use tiny sizes; results are saved only with --out",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="folder to save the results in"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure CPU time, for a busy machine; start it on one core (taskset)",
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="gpu only: time limit (570)"
    )
    parser.add_argument(
        "--part", action="append", dest="parts", help="gpu only: run only this part"
    )
    arguments = parser.parse_args(argv)
    if arguments.cpu_time:
        timing.clock = time.process_time
    options = {"limit": arguments.limit, "parts": arguments.parts}
    options = {name: value for name, value in options.items() if value is not None}
    folder = arguments.out or (None if arguments.tiny else results.FOLDER)
    default = [name for name in BENCHMARKS if name not in BY_NAME_ONLY]
    for benchmark in arguments.benchmarks or default:
        measure(
            benchmark, arguments.tiny, folder, options if benchmark == "gpu" else {}
        )


def measure(
    benchmark: str, tiny: bool, folder: pathlib.Path | None, options: dict[str, Any]
) -> None:
    """Print a benchmark's table and, unless `folder` is None, save it there."""
    module = importlib.import_module(f"benchmarks.{benchmark}")
    # Recorded before the rows, so that load and commit are those at the start.
    head = machine.moment() | {"machine": machine.describe()}
    if timing.clock is time.process_time:
        head["clock"] = "CPU time of the process"
    kind = getattr(module, "KIND", jax.default_backend())
    table = getattr(module, "table", results.table)
    print(f"\n{benchmark}: {BENCHMARKS[benchmark]}\n", flush=True)
    rows: list[Any] = []
    for row in module.rows(tiny, **options):
        rows.append(row)
        print(results.rounded(row), file=sys.stderr, flush=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            results.save(folder / f"{kind}.json", benchmark, head, rows)
            text = f"{json.dumps(head)}\n\n{table(rows)}\n"
            (folder / f"{benchmark}.md").write_text(text)
    print(table(rows), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main()
    # Do not wait for the thread of a `gpu` part that the limit cut off: it may still be
    # compiling.
    os._exit(0)
