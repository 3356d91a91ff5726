"""Suggest a microbatch size from the memory of compiled programs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from .._arrays import _validate
from .._arrays._types import Number
from ._clipped_grad import ClippedGrad
from ._example_norms import ExampleNorms
from ._microbatches import batch_size


def suggest_microbatch_size(
    f: ClippedGrad | ExampleNorms, *args: Any, max_bytes: Number
) -> int:
    """Find the largest microbatch size whose compiled program fits in memory.

    The sizes split the batch into 1, 2, 4, ... equal microbatches. A binary search
    compiles a few of them, at most 5 for 1,024 examples, and runs none.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import per_example
      >>> loss = lambda w, example: jnp.sum(jnp.tanh(w * example))
      >>> f = per_example.clipped_grad(loss, 1.0)  # A gradient has 262 kB.
      >>> args = jnp.ones(2**16), jnp.ones(8)
      >>> print(per_example.suggest_microbatch_size(f, *args, max_bytes=3_000_000))
      4

    Args:
      f: Function from `clipped_grad` or `norms`; its own `microbatch_size` is ignored.
      *args: Arguments of the loss, with a batch axis at `batch_argnums`, as arrays or
        `jax.ShapeDtypeStruct`.
      max_bytes: Largest number of bytes of temporary arrays and results on a device,
        excluding the arguments and other programs.

    Returns:
      The size to pass as `microbatch_size=`, an int.

    Raises:
      ValueError: The whole batch and even one example at a time need more than
        `max_bytes`.
    """
    wanted = "a function from per_example.clipped_grad or per_example.norms"
    _validate.kind("f", f, (ClippedGrad, ExampleNorms), wanted)
    _validate.plain("max_bytes", max_bytes, above=True)
    number = batch_size(f.loss.examples(args))
    sizes = sorted({-(-number // 2**k) for k in range(number.bit_length() + 1)} - {0})
    memory = functools.cache(lambda size: _memory(f, args, size))
    # The whole batch needs no accumulator, so it can need less than half of it.
    if not sizes or memory(sizes[-1]) <= max_bytes:
        return max(number, 1)
    least, most = 0, len(sizes) - 1
    while least < most:
        middle = (least + most) // 2
        if memory(sizes[middle]) <= max_bytes:
            least = middle + 1
        else:
            most = middle
    if least == 0:
        fewest = min(memory(sizes[0]), memory(sizes[-1]))
        wanted = f"at least {fewest}, the fewest bytes of any size that was tried"
        raise ValueError(_validate.must_be("max_bytes", wanted, max_bytes))
    return sizes[least - 1]


def _memory(f: ClippedGrad | ExampleNorms, args: tuple[Any, ...], size: int) -> int:
    """Return the bytes of temporary arrays and results with this microbatch size."""
    # Weights are not needed to measure memory.
    bound = dataclasses.replace(f.bound, max_weight=None)
    sized = dataclasses.replace(f, microbatch_size=size, bound=bound)
    analysis = jax.jit(sized).lower(*args).compile().memory_analysis()
    if analysis is None:
        raise NotImplementedError(
            "The backend must report the memory of compiled programs, got none from"
            f" {jax.default_backend()!r}. Call under jax.default_device of a CPU."
        )
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes
