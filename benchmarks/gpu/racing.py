"""Races of steps whose result is not checked, on inputs that several parts share.

The results are compared by the parts `equality with the CPU` and `clipping alone`. The
check of a whole step in NumPy would take most of the time of the run.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import foreign, step, trees
from benchmarks.donated import compiled_together
from benchmarks.stepping import Stepping
from benchmarks.timing import Contender, Row, race

ADAMW = step.OPTIMIZERS["adamw"]


def rounds(tiny: bool) -> int:
    return 2 if tiny else 31


def dtypes(tiny: bool) -> tuple[str, ...]:
    return ("bfloat16",) if tiny else ("bfloat16", "float32")


@functools.cache
def numbers(tiny: bool, dtype: str) -> Any:
    """GPT-2 filled with random numbers, which several parts use."""
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
    return unchecked(race(contenders, rounds(tiny), against="unclipped"))


def unchecked(rows: list[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "error"} for row in rows]


def adamw(source: Any, gradients: str = "made", optimizer: Any = None) -> Stepping:
    """An AdamW step on these gradients, made in the step or passed as arguments."""
    found = jax.device_put(source)
    return Stepping(
        found, optimizer or ADAMW(), step.SOURCES[gradients], found, jnp.ones(())
    )


def without_torch() -> list[Row]:
    """Return a row with the reason where PyTorch does not take part."""
    reason = foreign.absent("torch")
    return [{"contender": "PyTorch", "note": reason}] if reason else []
