"""Count the nodes of a CUDA graph that XLA must update in each step.

XLA runs the kernels of a program as a CUDA graph. Before each run it updates the nodes
that use an allocation whose address has changed. A result that reuses no donated buffer
has a new address in each step, and XLA may keep other scalars in its buffer, which many
kernels read.
"""

import re
from typing import NamedTuple

from benchmarks.gpu import launches

# Operations whose result is their operand.
RENAMING = {"bitcast", "opt-barrier", "add-dependency"}

Index = tuple[int, ...]


class Operation(NamedTuple):
    kind: str
    operands: list[str]
    place: int | None  # of a get-tuple-element


def updated(text: str, buffers: str) -> int:
    """Count the kernels that read or write the buffer of a new result.

    Args:
      text: The optimized program.
      buffers: The assignment of its values to allocations.
    """
    operations = _operations(launches.entry(text))
    allocations = _new_results(buffers)

    def uses_new_result(name: str) -> bool:
        values = [(name, ()), *((each, ()) for each in operations[name].operands)]
        sources = (_source(value, index, operations) for value, index in values)
        return any(
            index[: len(within)] == within
            for source, within in sources
            for index in allocations.get(source, [])
        )

    return sum(
        uses_new_result(name)
        for name, operation in operations.items()
        if launches.is_launched(operation.kind)
    )


def _operations(lines: list[str]) -> dict[str, Operation]:
    operations = {}
    for line in lines:
        parts = re.match(
            r"\s+(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([a-z][a-z\-]*)\((.*)", line
        )
        if parts:
            name, kind, rest = parts.groups()
            operands, _, attributes = rest.partition(")")
            index = re.search(r"index=(\d+)", attributes)
            names = re.findall(r"%([\w.\-]+)", operands)
            operations[name] = Operation(kind, names, int(index[1]) if index else None)
    return operations


def _source(
    name: str, index: Index, operations: dict[str, Operation]
) -> tuple[str, Index]:
    """Return the operation that computes a value, and the place in its result."""
    kind, operands, place = operations[name]
    if kind == "get-tuple-element" and place is not None:
        return _source(operands[0], (place, *index), operations)
    if kind in RENAMING:
        return _source(operands[0], index, operations)
    if kind == "tuple" and index:
        return _source(operands[index[0]], index[1:], operations)
    return name, index


def _new_results(buffers: str) -> dict[str, list[Index]]:
    """Return the values in the buffers of new results: their place by operation."""
    values: dict[str, list[Index]] = {}
    is_new = False
    for line in buffers.splitlines():
        if line.startswith("allocation "):
            # The table of results of a program with several is not read by kernels.
            reused = ("parameter ", "output shape is |(")
            is_new = "maybe-live-out" in line and not any(x in line for x in reused)
        value = re.match(r" value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})? @", line)
        if is_new and value:
            index = tuple(map(int, filter(None, (value[2] or "").split(","))))
            values.setdefault(value[1], []).append(index)
    return values
