"""Insert small faults into optclip, one at a time, and report the detected ones.

    python -m tools.mutation                           # 60 faults from the whole package
    python -m tools.mutation --sample 40 --seed 1 norms scopes    # 40 from two folders

Faults are drawn evenly; they depend only on the seed and the code. Each is inserted into
a copy of the checkout. The tests of the same folder run first, then the contracts, then
all others, until one fails.
"""

import argparse
import concurrent.futures
import difflib
import os
import pathlib
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOAL = 0.95
# Seconds after which tests count as failed; the slowest folder takes a fifth of this.
TIMEOUT = 900

# One or two replacements per operator, which detect as much as all eleven.
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
    # These require the name of a variable.
    "core/Variable",
]

# A pattern of the changed lines, and why the mutant is equivalent to the original.
EQUIVALENT = {
    r"\+_LEAST = 2\.0\*\*- ": "any small number suffices",
    r"\+.*(query|key)\[ -1\]\.number": "all leaves of a layer are sharded over the same axes",
    r"\+.*strict=False\)": "zip's strict only guards against internal errors",
    r"\+_CONCATENATED = 3|\+_MERGED, _CONCATENATED = 33": "affects only speed",
    r"\+ +if len\(batch\) >= 1": "a single array is not merged",
    r"\+SMALL = \d\*\*\d\d|\+PLAIN = \d": "affects speed, memory and the last bits",
    r"\+.*jax\.tree\.leaves\(examples\)\[ ?-1\]": "all have the same batch axis",
    r"\+ +early = .* if self\.warmup (>= 0|> ?-1) else": "all steps are past a warm-up of none",
    r"\+.*jnp\.minimum\(new_weight, 2\)": "no rounding on a CPU takes it above 1",
    r"\+.*arange\(-1, self\.window\)\.clip\( 1\)": "for a single norm it is that norm",
    r"\+ +last = jnp\.maximum\(count - 1, 1\)": "for a single norm it is that norm",
    r"\+.*low \+ 1, jnp\.maximum\(count - 1, -1\)": "without norms it is inf",
    r"\+.*placed_as\(x, ring\[\.\.\., 1\]\)": "all places lie on the same devices",
    r"\+ +positive = select\(score >= z": "at z both branches agree",
    r"\+ +largest = .*max / [13]": "any very large number works",
    r"\+ +if x\.dtype != like\.dtype and not": "the other order says the same, later",
    r"\+.*select\(added <= 0": "0 is 0 either way",
    r"\+.*\(bits - 0\) - 1, whole": "zero has two signs",
    r"-@functools\.partial\(jax\.jit": "the result is the same without compilation",
    r"\+.*(unit|size|split\)|row|found|\bu)\[\.\.\., -?1\]": "the axis has one entry",
    r"\+.*(tangents|block\.leaves)\[ -1\]": "there is only one",
    r"\+_WINDOW = \d\.0|\+_ROOT = .*(\* 3 \+|- 1|\+ [02]|1\.5)": "the documented errors leave room",
    r"\+.*\| \(left\.stage < _MOST\)": "further rounds remove nothing",
    r"\+ +positive = .*\blimit > -1": "for a threshold of 0 it affects only speed",
    r"\+ +noise = ([35] |.*(/ squares|\* 0\.5))": "rounding has no sharp edge",
    r"\+ +for _ in range\( ?3\)": "a further iteration only improves on the documented error",
    r"\+.*2 \* values, 1\), -?1\)": "for a zero it is multiplied by a row of zeros",
    r"\+ +while least <= 1 - 1e-7": "the bound is never hit exactly",
    r"\+ +if shape\[axis\[0\]\] >= shape": "a square has equal sides",
    r"\+.*initial= ?-1\)": "moduli are not negative, and empty arrays are not measured",
    r"\+.*other\.split\(\"/\"\), strict=True": "no leaf lies below another",
    r"\+.*span\.max\(initial=(1| ?-1)\)": "a further key is masked, and without queries nothing is attended",
    r"\+.*max\(len\(starts\), 2\)": "a span without queries has no logits",
    r"\+.*left\.values, 2\)\[": "the other rows are zero",
    r"\+ +values = jnp\.where\(live, slope.* 1\), -?1\)": "at zero each response is flat",
    r"\+ +mean = .*\*\* 3, \(-2": "any size above rounding works",
    r"\+ +if len\(matrix\.shape\) < 1": "a vector is as wide as it is long",
    r"\+ +inside = norm < threshold": "at the threshold both branches agree",
    r"\+ +num_(consts|carry): int = -1": "a step that is not a loop has none",
    r"\+ +clip_cotangent\(\(\), [02]\.0 if": "without arrays nothing is clipped",
    r"\+.*largest / \(is_known / is_known": "the divisor is 1 or NaN",
    r"\+.*least \+ least\*\* 1\)": "the same number of steps reaches 1",
    r"\+ +return +(not )?any\(\"jaxpr\" in key": "affects only memory and speed",
    r"\+ +return reduce\(.*jnp\.stack\(row\).*\)\[ ?-?1\]": "the sum has one entry",
    r"\+.*site\.avals\[ -1\]\.size": "a site with a rule has one output",
    r"\+.*one = .*asarray\(x\)\[ -1\], examples": "only the type of an example is read",
    r"\+ +if padding\.shape\[0\] != -1": "sums over no examples are zero too",
    r"\+.*size_of\(norm\) >= _CONC": "affects only speed",
    r"\+ +and -1 < _leaves\.size_of\(norm\)": "an empty array adds nothing to another",
}


class Fault(NamedTuple):
    """Hold the n-th place at which an operator of cosmic-ray changes a file."""

    path: str
    line: int
    operator: str
    occurrence: int

    def source(self) -> str:
        """Return the changed source."""
        from cosmic_ray.mutating import mutate_code

        original = (ROOT / self.path).read_text()
        return mutate_code(original, _operators()[self.operator], self.occurrence)

    def changes(self) -> list[str]:
        """Return the changed lines, with a minus before and a plus after."""
        original = (ROOT / self.path).read_text().splitlines()
        lines = difflib.unified_diff(original, self.source().splitlines(), n=0)
        return [line for line in lines if re.match(r"[-+](?![-+])", line)]

    def reason(self) -> str | None:
        """Return why no test can detect it, if `EQUIVALENT` has a reason."""
        changes = "\n".join(self.changes())
        reasons = EQUIVALENT.items()
        return next((why for part, why in reasons if re.search(part, changes)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="folders of optclip; default: all")
    parser.add_argument("--sample", type=int, default=60, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="selects the faults")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="parallel test runs"
    )
    options = parser.parse_args()
    faults = drawn(options.folders, options.sample, options.seed)
    copies: queue.Queue[pathlib.Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.workers):
            copies.put(_copy(pathlib.Path(folder) / str(i)))

        def run(fault: Fault) -> str | None:
            copy = copies.get()
            try:
                test = detected_by(fault, copy)
            finally:
                copies.put(copy)
            print(_row(fault, test), flush=True)
            return test

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            tests = list(pool.map(run, faults))
    return _report(faults, tests)


def drawn(folders: list[str], sample: int, seed: int) -> list[Fault]:
    """Draw faults at even distances over the sorted files."""
    paths = sorted((ROOT / "optclip").rglob("*.py"))
    wanted = [
        p for p in paths if not folders or p.parts[len(ROOT.parts) + 1] in folders
    ]
    faults = [fault for path in wanted for fault in _faults_of(path)]
    step = max(len(faults) / sample, 1.0)
    start = random.Random(seed).uniform(0, step)
    places = (int(start + i * step) for i in range(sample))
    return [faults[place] for place in places if place < len(faults)]


def detected_by(fault: Fault, copy: pathlib.Path) -> str | None:
    """Return the first test that fails with the fault in the copy."""
    place = copy / fault.path
    original = place.read_text()
    place.write_text(fault.source())
    try:
        for tests in _stages(fault, copy):
            test = _first_failure(tests, copy)
            if test:
                return test
    finally:
        place.write_text(original)
    return None


def _faults_of(path: pathlib.Path) -> Iterator[Fault]:
    from cosmic_ray.ast import ast_nodes, get_ast

    source = path.read_text()
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    faults = []
    for name, operator in _operators().items():
        positions = [
            place for node in nodes for place in operator.mutation_positions(node)
        ]
        for i, ((line, column), _) in enumerate(positions):
            if not _is_annotation(lines[line - 1]):
                where = str(path.relative_to(ROOT))
                faults.append((line, column, Fault(where, line, name, i)))
    return (fault for *_, fault in sorted(faults))


def _operators() -> dict[str, Any]:
    """Return the operators of cosmic-ray by name, without those in `SKIPPED`."""
    from cosmic_ray.plugins import get_operator, operator_names

    names = (n for n in operator_names() if not any(re.match(s, n) for s in SKIPPED))
    return {name: get_operator(name)() for name in names}


def _is_annotation(line: str) -> bool:
    """Return whether operators in a line are part of a type or a signature."""
    return bool(
        re.search(r"\|\s*(None|Callable)|(^|[(,])\s*\*,|: [\w\[\], ]+ \| \w+", line)
    )


def _copy(target: pathlib.Path) -> pathlib.Path:
    names = (".git", ".venv*", ".nox", ".hypothesis", ".coverage", "__pycache__")
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*names))
    return target


def _stages(fault: Fault, copy: pathlib.Path) -> Iterator[list[str]]:
    """Yield the tests to run, those most likely to detect the fault first."""
    folder = pathlib.Path(fault.path).parts[1].strip("_")
    folders = sorted(path.name for path in (copy / "tests").iterdir() if path.is_dir())
    first = [name for name in (folder, "contracts") if name in folders]
    aside = {*first, "integration", "support", "__pycache__"}
    yield from ([f"tests/{name}"] for name in first)
    yield [f"tests/{name}" for name in folders if name not in aside]


def _first_failure(tests: list[str], copy: pathlib.Path) -> str | None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
    ]
    try:
        result = subprocess.run(
            [*command, *tests], cwd=copy, capture_output=True, text=True,
            timeout=TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{tests[0]} exceeded {TIMEOUT} s"
    if result.returncode in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return failed[1] if failed else f"{tests[0]} does not start"


def _row(fault: Fault, test: str | None) -> str:
    changes = "\n    ".join(line.strip() for line in fault.changes())
    outcome = test or f"not detected; equivalent because: {fault.reason()}"
    return f"{fault.path}:{fault.line}\n    {changes}\n    {outcome}"


def _report(faults: list[Fault], tests: list[str | None]) -> int:
    pairs = list(zip(faults, tests, strict=True))
    equivalent = sum(
        test is None and fault.reason() is not None for fault, test in pairs
    )
    detected = sum(test is not None for test in tests)
    score = detected / max(len(faults) - equivalent, 1)
    print(
        f"\n{len(faults)} faults, {equivalent} of them equivalent; {score:.1%} of the"
        f" others detected (goal {GOAL:.0%})"
    )
    return int(score < GOAL)


if __name__ == "__main__":
    sys.exit(main())
