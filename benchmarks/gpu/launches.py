"""Part `launches`: count the kernels and branches of a compiled clipping program.

They are counted in the optimized program text: each operation that XLA runs as a kernel
or a library call, in the entry computation and the computations that it calls. The body
of a loop and each side of a branch count once.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import optax

import optclip
from benchmarks import step, trees
from benchmarks.donated_buffers import compiled_together
from benchmarks.gpu import racing
from benchmarks.timing import Row
from optclip import recipes

# Operations that only rename, group or await arrays.
NOT_LAUNCHED = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
# Operations that run other computations. A fusion is one kernel, so it is not listed.
CALLING = {"call", "while", "conditional"}


def rows(tiny: bool) -> Iterator[Row]:
    for dtype in racing.dtypes(tiny):
        tree = trees.typed(trees.workloads(tiny)["gpt2"], dtype)
        texts = compiled_together(lambda tx, tree=tree: program(tx, tree), clips())
        for name, text in texts.items():
            kinds = launched(text)
            leaves = len(jax.tree.leaves(tree))
            yield {
                "contender": name, "dtype": dtype, "leaves": leaves,
                "launches": kinds.total(),
                "branches and loops": len(re.findall(r" (?:conditional|while)\(", text)),
                "kinds": ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()),
            }  # fmt: skip


def clips() -> dict[str, Any]:
    return {
        "optclip, global norm": optclip.clip_by_global_norm(1.0),
        "optclip, global norm, no record": optclip.clip_by_global_norm(
            1.0, record=False
        ),
        "optax, global norm": optax.clip_by_global_norm(1.0),
        "optclip, per leaf": optclip.clip_by_norm(1.0),
        "optclip, AGC": recipes.agc(step.CLIPPING),
        "optax, AGC": optax.adaptive_grad_clip(step.CLIPPING),
    }


def program(tx: Any, tree: Any) -> str:
    state = jax.eval_shape(tx.init, tree)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    return update.lower(tree, state, tree).compile().as_text()


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
