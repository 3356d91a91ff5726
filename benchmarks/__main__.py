"""Measure, print a table for each question, and save it: `python -m benchmarks`.

Each question replaces its own table in `benchmarks/results/<kind of machine>.json`.
`tpu` wants the compiler of TPUs (`nox -s tpu` installs it) and `spikes` trains for ten
minutes: these two are asked by name.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

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
}
BY_NAME_ONLY = ("tpu", "spikes")


def main(given: Sequence[str] | None = None) -> None:
    lines = "; ".join(f"{name}: {what}" for name, what in QUESTIONS.items())
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="QUESTION",
        # argparse of Python 3.11 checks the empty list too.
        choices=[*QUESTIONS, []],
        help=f"{lines}; all but tpu and spikes if none",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, nothing saved")
    arguments = parser.parse_args(given)
    default = [name for name in QUESTIONS if name not in BY_NAME_ONLY]
    for question in arguments.questions or default:
        answer(question, arguments.tiny)


def answer(question: str, tiny: bool) -> None:
    """One question, its table and its file."""
    module = importlib.import_module(f"benchmarks.{question}")
    # Before the rows: of the code that is imported by now.
    head = machine.moment()
    print(f"\n{question}: {QUESTIONS[question]}\n", flush=True)
    rows = []
    for row in module.rows(tiny):
        rows.append(row)
        print(results.rounded(row), file=sys.stderr, flush=True)
    print(getattr(module, "table", results.table)(rows), flush=True)
    if not tiny:
        kind = getattr(module, "KIND", jax.default_backend())
        head["machine"] = machine.describe()
        results.save(results.FOLDER / f"{kind}.json", question, head, rows)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main()
