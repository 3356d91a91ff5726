"""Faults put into optclip one by one: does a test notice each?

    python -m tests.mutation                    # all modules, an hour or two on 2 cores
    python -m tests.mutation _arithmetic norms  # some

Cosmic-ray makes the mutants, each in a copy of the checkout. A mutant that no test
notices is printed with its line, or counted with the reason in `EQUIVALENT`.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOAL = 0.95

# Which tests are to notice a fault in which module, the quickest first.
TESTS = {
    "norms": "norms bad_input accuracy",
    "_roots": "norms accuracy derivatives_edges derivatives",
    "_arithmetic": "norms accuracy derivatives_edges",
    "responses": "responses bad_answers derivatives_edges stop_gradient derivatives",
    "_scale": "functional nonfinite accuracy derivatives_edges corpus",
    "functional/_lift": "functional bad_input",
    "functional/_leaf_norms": "functional bad_input nonfinite_cells",
    "functional/_tree_norms": "functional bad_input nonfinite_cells",
    "functional/_values": "functional bad_input nonfinite_cells",
    "_clip": "functional nonfinite bad_input nonfinite_cells accuracy leaf_kinds",
    "_elements": "functional nonfinite leaf_kinds derivatives_edges",
    "transforms": "registry contracts_values bad_input",
    "_engine": "metrics thresholds bad_answers contracts_values masks",
}

# One or two changes of each kind: eleven for every plus sign tell no more.
BINARY = "Add_Sub|Sub_Add|Mul_Div|Div_Mul|Pow_Mul|BitAnd_BitOr|BitOr_BitAnd"
COMPARISON = (
    "Lt_LtE|Lt_Gt|LtE_Lt|LtE_Gt|Gt_GtE|Gt_Lt|GtE_Gt|GtE_Lt"
    "|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is"
)
UNARY = "Delete_|USub_UAdd"
SKIPPED = [
    f"core/ReplaceBinaryOperator_(?!({BINARY})$)",
    f"core/ReplaceComparisonOperator_(?!({COMPARISON})$)",
    f"core/ReplaceUnaryOperator_(?!({UNARY}))",
    "core/ExceptionReplacer",
]

# A part of the mutated line, and why the mutant does the same as the original.
EQUIVALENT: dict[str, str] = {}


class Mutant(NamedTuple):
    module: str
    line: int
    operator: str
    outcome: str
    diff: str

    @property
    def reason(self) -> str | None:
        found = (why for part, why in EQUIVALENT.items() if part in self.diff)
        return next(found, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="as in TESTS; all if none")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    modules = options.modules or list(TESTS)
    copies: queue.Queue[pathlib.Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.workers):
            copies.put(_copy(pathlib.Path(folder) / str(i)))
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            mutants = [
                m
                for found in pool.map(lambda n: _run(n, copies), modules)
                for m in found
            ]
    return _report(mutants)


def _copy(target: pathlib.Path) -> pathlib.Path:
    ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".pytest_cache")
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


def _run(module: str, copies: "queue.Queue[pathlib.Path]") -> list[Mutant]:
    copy = copies.get()
    try:
        return _mutate(module, copy)
    finally:
        copies.put(copy)


def _mutate(module: str, copy: pathlib.Path) -> list[Mutant]:
    files = " ".join(f"tests/test_{name}.py" for name in TESTS[module].split())
    # -I and the like would find the installed package: here the copy must be first.
    test = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {files}"
    name = module.replace("/", "-")
    config = copy / f"{name}.toml"
    config.write_text(
        "[cosmic-ray]\n"
        f'module-path = "optclip/{module}.py"\n'
        "timeout = 240.0\n"
        "excluded-modules = []\n"
        f'test-command = "{test}"\n'
        "[cosmic-ray.distributor]\n"
        'name = "local"\n'
        "[cosmic-ray.filters.operators-filter]\n"
        f"exclude-operators = {json.dumps(SKIPPED)}\n"
    )
    session = f"{name}.sqlite"
    tool = [sys.executable, "-m", "cosmic_ray.cli"]
    skip = [sys.executable, "-m", "cosmic_ray.tools.filters.operators_filter"]
    subprocess.run([*tool, "init", config.name, session], cwd=copy, check=True)
    subprocess.run([*skip, session, config.name], cwd=copy, check=True)
    subprocess.run([*tool, "exec", config.name, session], cwd=copy, check=True)
    dump = subprocess.check_output([*tool, "dump", session], cwd=copy, text=True)
    found = [_parsed(module, line) for line in dump.splitlines()]
    mutants = [mutant for mutant in found if mutant]
    killed = sum(mutant.outcome != "survived" for mutant in mutants)
    print(f"{module}: {killed} of {len(mutants)} noticed", flush=True)
    return mutants


def _parsed(module: str, line: str) -> Mutant | None:
    item, result = json.loads(line)
    if result is None or result["worker_outcome"] == "skipped":
        return None
    (mutation,) = item["mutations"]
    outcome = str(result["test_outcome"]).lower()
    diff = result["diff"] or ""
    if _is_annotation(diff):
        return None
    start = mutation["start_pos"][0]
    return Mutant(module, start, mutation["operator_name"], outcome, diff)


def _is_annotation(diff: str) -> bool:
    """`X | None` in a signature or `*,` there: no fault in what is computed."""
    gone = [line[1:] for line in diff.splitlines() if re.match(r"-(?!--)", line)]
    return any(re.search(r"\|\s*(None|Callable)|^\s*\*,|: \w+ \| \w+", x) for x in gone)


def _report(mutants: list[Mutant]) -> int:
    survived = [m for m in mutants if m.outcome == "survived"]
    same = [m for m in survived if m.reason]
    counted = len(mutants) - len(same)
    for mutant in survived:
        changed = [x for x in mutant.diff.splitlines() if re.match(r"[-+](?![-+])", x)]
        print(f"\n{mutant.module}:{mutant.line} {mutant.operator}")
        print("\n".join(changed), f"\n  = {mutant.reason}" if mutant.reason else "")
    score = 1 - (len(survived) - len(same)) / max(counted, 1)
    print(
        f"\n{len(mutants)} mutants, {len(same)} of them equivalent;"
        f" {score:.1%} of the others noticed (goal {GOAL:.0%})"
    )
    return int(score < GOAL)


if __name__ == "__main__":
    sys.exit(main())
