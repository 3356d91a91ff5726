"""Measure, print a table for each question, and save it: `python -m benchmarks`.

Each question replaces its own table in `benchmarks/results/<kind of machine>.json` and
writes it to `<question>.md` in the same folder, after each row: a run that is stopped
has saved the rows so far. `tpu` needs the compiler of TPUs (`nox -s tpu` installs it),
`spikes` trains for ten minutes, and `gpu` measures one GPU within a time limit: these
three run by name only.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

# Before JAX is imported: the libraries share the memory of a GPU, and are quiet.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from benchmarks import machine, results

QUESTIONS = {
    "weight": "equations, lines and imports of the package",
    "clip": "a clip by global norm alone",
    "step": "an optimizer step behind a clip",
    "train": "a real training step",
    "compile": "seconds to compile",
    "scopes": "clips over other scopes, and thresholds that learn",
    "tpu": "programs for TPUs, compiled ahead of time",
    "spikes": "which clip helps when training spikes",
    "gpu": "equality with the CPU, times, launches and transfers on one GPU",
}
BY_NAME_ONLY = ("tpu", "spikes", "gpu")


def main(given: Sequence[str] | None = None) -> None:
    lines = "; ".join(f"{name}: {what}" for name, what in QUESTIONS.items())
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="QUESTION",
        # argparse of Python 3.11 checks the empty list too.
        choices=[*QUESTIONS, []],
        help=f"{lines}; all but {', '.join(BY_NAME_ONLY)} if none",
    )
    parser.add_argument(
        "--tiny",
        "--small",
        action="store_true",
        help="tiny sizes, saved only with --out",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="where to save the results"
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="of gpu: 480 if not given"
    )
    parser.add_argument(
        "--part", action="append", dest="parts", help="of gpu: measure this part alone"
    )
    arguments = parser.parse_args(given)
    # Those of `gpu` that were given; the other questions have no options.
    options = {"limit": arguments.limit, "parts": arguments.parts}
    options = {name: value for name, value in options.items() if value is not None}
    folder = arguments.out or (None if arguments.tiny else results.FOLDER)
    default = [name for name in QUESTIONS if name not in BY_NAME_ONLY]
    for question in arguments.questions or default:
        answer(question, arguments.tiny, folder, options if question == "gpu" else {})


def answer(
    question: str, tiny: bool, folder: pathlib.Path | None, options: dict[str, Any]
) -> None:
    """Print one question's table and save it in the folder, if there is one."""
    module = importlib.import_module(f"benchmarks.{question}")
    # Before the rows: of the code that is imported by now.
    head = machine.moment() | {"machine": machine.describe()}
    kind = getattr(module, "KIND", jax.default_backend())
    table = getattr(module, "table", results.table)
    print(f"\n{question}: {QUESTIONS[question]}\n", flush=True)
    rows: list[Any] = []
    for row in module.rows(tiny, **options):
        rows.append(row)
        print(results.rounded(row), file=sys.stderr, flush=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            results.save(folder / f"{kind}.json", question, head, rows)
            text = f"{json.dumps(head)}\n\n{table(rows)}\n"
            (folder / f"{question}.md").write_text(text)
    print(table(rows), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main()
    # The part of `gpu` that the limit cut off may still be compiling, and must not
    # delay the end.
    os._exit(0)
