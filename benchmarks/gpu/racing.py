"""Race optimizer steps without checking their results, on inputs shared by the parts.

Checking a whole step in NumPy would take most of the run. The parts `equality with the
CPU` and `clipping alone` check results.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import other_frameworks, step, trees
from benchmarks.donated_buffers import compiled_together
from benchmarks.stepping import Stepping
from benchmarks.timing import Contender, Row, race

ADAMW = step.OPTIMIZERS["adamw"]


def rounds(tiny: bool) -> int:
    return 2 if tiny else 31


def dtypes(tiny: bool) -> tuple[str, ...]:
    return ("bfloat16",) if tiny else ("bfloat16", "float32")


@functools.cache
def numbers(tiny: bool, dtype: str) -> Any:
    """Return the tree of GPT-2 filled with random numbers."""
    return trees.numbers(trees.workloads(tiny)["gpt2"], dtype)


def steps(
    stepping: Stepping,
    clips: Mapping[str, Any],
    tiny: bool,
    more: Mapping[str, Contender] | None = None,
) -> list[Row]:
    """Race the step after each clipping transformation against the unclipped step."""
    clips = {"unclipped": optax.identity(), **clips}
    contenders = compiled_together(stepping.contender, clips) | dict(more or {})
    rows = race(contenders, rounds(tiny), against="unclipped", alone=True)
    return unchecked(rows)


def unchecked(rows: list[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "error"} for row in rows]


def adamw(source: Any, gradients: str = "made", optimizer: Any = None) -> Stepping:
    """Build an AdamW step whose gradients are "made" in it or "arguments"."""
    tree = jax.device_put(source)
    return Stepping(
        tree, optimizer or ADAMW(), step.SOURCES[gradients], tree, jnp.ones(())
    )


def without_torch() -> list[Row]:
    """Return a row with the reason if PyTorch is not measured."""
    reason = other_frameworks.absent("torch")
    return [{"contender": "PyTorch", "note": reason}] if reason else []
