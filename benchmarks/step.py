"""Benchmark `step`: a clipped optimizer step compared with the unclipped step.

The gradients are either computed in the step ("made"), into buffers that clipping may
overwrite, as after a backward pass; or they are arguments, computed by another `jit`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks import exact, other_frameworks, trees
from benchmarks.exact import Factors
from benchmarks.stepping import Gradients, Stepping, with_loss
from benchmarks.timing import Row, race
from optclip import recipes

Clips = dict[str, tuple[Any, Factors]]


class Case(NamedTuple):
    tree: str
    dtype: str
    clip: str
    optimizer: str
    gradients: str


CASES = [
    *(
        Case("gpt2", dtype, "global norm", "adamw", gradients)
        for gradients in ("made", "arguments")
        for dtype in ("float32", "bfloat16")
    ),
    Case("small", "float32", "global norm", "adamw", "made"),
    Case("llama", "float32", "agc", "none", "made"),
    Case("llama", "bfloat16", "agc", "none", "made"),
]
OPTIMIZERS = {"adamw": lambda: optax.adamw(1e-4), "none": optax.identity}
CLIPPING = 0.01


def arguments(params: Any, gradients: Any, factor: jax.Array) -> Any:
    return gradients


def made(params: Any, gradients: Any, factor: jax.Array) -> Any:
    """Compute gradients in the step such that XLA must materialize them.

    Unlike real gradients, a cheap product would be computed once per use. XLA removes
    barriers before it fuses, but always materializes the result of a branch.
    """
    return jax.lax.cond(
        factor > 0,
        lambda: jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients),
        lambda: jax.tree.map(jnp.zeros_like, gradients),
    )


SOURCES: dict[str, Gradients] = {
    "made": with_loss(made),
    "arguments": with_loss(arguments),
}


def rows(tiny: bool) -> Iterator[Row]:
    for case in CASES[2::4] if tiny else CASES:
        shapes = trees.workloads(tiny)[case.tree]
        for row in _raced(case, shapes, 2 if tiny else 15):
            yield {**case._asdict(), **row}


def _raced(case: Case, shapes: Any, rounds: int) -> list[Row]:
    source = trees.numbers(shapes, case.dtype)
    arrays = jax.tree.leaves(source)
    gradients = jax.device_put(source)
    limit = exact.FRACTION * trees.exact_norm(arrays)
    stepping = Stepping(
        gradients, OPTIMIZERS[case.optimizer](), SOURCES[case.gradients], gradients,
        jnp.ones(()),
    )  # fmt: skip
    clips = {"unclipped": (optax.identity(), exact.unclipped)}
    clips |= by_global_norm(limit) if case.clip == "global norm" else by_agc()
    contenders = {name: stepping.contender(*each) for name, each in clips.items()}
    if case.gradients == "arguments":
        error = exact.clip_error(arrays, clips["optax"][1](arrays, arrays))
        contenders |= other_frameworks.torch_steps(arrays, limit, error)
    return race(contenders, rounds, against="unclipped")


def by_global_norm(limit: float) -> Clips:
    factors = exact.by(limit, exact.global_norm)
    silent = optclip.clip_by_global_norm(limit, record=False)
    return {
        "optclip": (optclip.clip_by_global_norm(limit), factors),
        "optclip, no record": (silent, factors),
        "optax": (optax.clip_by_global_norm(limit), factors),
    }


def by_agc() -> Clips:
    factors = exact.by_agc(CLIPPING)
    return {
        "optclip": (recipes.agc(CLIPPING), factors),
        "optax": (optax.adaptive_grad_clip(CLIPPING), factors),
    }
