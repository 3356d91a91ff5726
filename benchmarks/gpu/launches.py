"""Count the kernels and branches of a compiled clipping program.

They are counted in the optimized program text: each operation that XLA runs as a kernel
or a library call, in the entry computation and the computations that it calls. The body
of a loop and each side of a branch count once.
"""

import re
from collections import Counter

# Operations that only rename, group or await arrays.
NOT_LAUNCHED = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
# Operations that run other computations. A fusion is one kernel, so it is not listed.
CALLING = {"call", "while", "conditional"}


def launched(text: str) -> Counter[str]:
    """Count the launched operations of a program by kind."""
    computations = _computations(text)
    return _launched_in(computations["ENTRY"], computations)


def entry(text: str) -> list[str]:
    """Return the lines of the entry computation of a program."""
    return _computations(text)["ENTRY"]


def is_launched(kind: str) -> bool:
    """Return whether an operation is a kernel or a library call."""
    return kind not in NOT_LAUNCHED and not kind.endswith("-done")


def _launched_in(lines: list[str], computations: dict[str, list[str]]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for line in lines:
        # Tuple types and layouts before the kind contain parentheses too.
        operation = re.search(r"(?<=[\]})] )([a-z][a-z\-]*)\(", line)
        if operation is None:
            continue
        kind = operation[1]
        if kind in CALLING:
            for name in _called(line[operation.end() :]):
                kinds += _launched_in(computations.get(name, []), computations)
        elif is_launched(kind):
            kinds[kind] += 1
    return kinds


def _called(rest: str) -> list[str]:
    """Return the computations named in the attributes of an operation."""
    attributes = re.findall(
        r"(?:to_apply|calls|body|condition|\w+_computation)=%?([\w.\-]+)", rest
    )
    for group in re.findall(r"branch_computations=\{([^}]*)\}", rest):
        attributes += [name.strip().lstrip("%") for name in group.split(",")]
    return attributes


def _computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation by name, and of the first under "ENTRY"."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start and "=" not in line.partition("(")[0]:
            lines = computations.setdefault("ENTRY" if start[1] else start[2], [])
        elif line.startswith(" "):
            lines.append(line)
    return computations
