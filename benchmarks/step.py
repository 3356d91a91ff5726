"""Benchmark `step`: an AdamW step of GPT-2 with clipping, compared with unclipped.

The gradients are either computed in the step ("made"), into buffers that clipping may
overwrite, as after a backward pass; or they are arguments, computed by another `jit`.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import clip, trees
from benchmarks.stepping import Gradients, Stepping, with_loss
from benchmarks.timing import Row, race


def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


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
    cases = itertools.product(SOURCES, ("float32", "bfloat16"))
    for gradients, dtype in [("made", "float32")] if tiny else cases:
        source = trees.numbers(trees.workloads(tiny)["gpt2"], dtype)
        limit, _ = clip.checked(jax.tree.leaves(source))
        stepping = stepping_of(source, gradients)
        clips = {"unclipped": optax.identity(), **clip.by_global_norm(limit)}
        contenders = {name: stepping.contender(tx) for name, tx in clips.items()}
        for row in race(contenders, 2 if tiny else 15, against="unclipped"):
            yield {"dtype": dtype, "gradients": gradients, **row}


def stepping_of(source: Any, gradients: str, optimizer: Any = None) -> Stepping:
    """Build an AdamW step whose gradients are "made" in it or "arguments"."""
    tree = jax.device_put(source)
    return Stepping(tree, optimizer or adamw(), SOURCES[gradients], tree, jnp.ones(()))
