"""Measure, print a table for each question, and save it: `python -m benchmarks`.

Each question replaces its own table in `benchmarks/results/<kind of machine>.json`.
`tpu` wants the compiler of TPUs (`nox -s tpu` installs it) and `spikes` trains for ten
minutes: these two are asked by name.
"""

import argparse
import importlib
import os
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
MODULES = {"compile": "compiling"}


def main(given: Sequence[str] | None = None) -> None:
    lines = "\n".join(f"  {name:8} {what}" for name, what in QUESTIONS.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=f"{__doc__}\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, nothing saved")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.questions) - QUESTIONS.keys():
        parser.error(f"There is no question {', '.join(sorted(unknown))}: see --help.")
    jax.config.update("jax_enable_compilation_cache", False)
    default = [name for name in QUESTIONS if name not in BY_NAME_ONLY]
    for question in arguments.questions or default:
        answer(question, arguments.tiny)


def answer(question: str, tiny: bool) -> None:
    """One question, its table and its file."""
    name = MODULES.get(question, question)
    module = importlib.import_module(f"benchmarks.{name}")
    # Before the rows: the commit is that of the code which is imported by now.
    head = {**machine.moment(), "commit": machine.commit()}
    print(f"\n{question}: {QUESTIONS[question]}\n", flush=True)
    rows = list(module.rows(tiny))
    print(getattr(module, "table", results.table)(rows), flush=True)
    if not tiny:
        kind = getattr(module, "KIND", None) or jax.default_backend()
        head["machine"] = machine.describe()
        results.save(results.FOLDER / f"{kind}.json", question, head, rows)


if __name__ == "__main__":
    main()
