"""The policies for NaN and inf, by the words that every clip takes as `nonfinite=`.

propagate   a non-finite norm makes all that share it NaN: loud, as in TensorFlow
zero        all that share a non-finite norm becomes zero
drop        non-finite entries become zero, the rest is measured and clipped as ever
raise       as propagate, and an error under `jax.experimental.checkify`
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from optclip._arrays import _leaves
from optclip._arrays._types import KeyPath
from optclip.norms import Block

POLICIES = ("propagate", "zero", "drop", "raise")


def dropped(x: jax.Array) -> jax.Array:
    """The array with zeros for its non-finite entries."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def flags(x: jax.Array) -> jax.Array:
    """1.0 where an entry is not finite: what `dropped` takes out of sight."""
    return (~jnp.isfinite(x)).astype(jnp.float32)


def check(paths: list[KeyPath], arrays: list[jax.Array]) -> None:
    """Under checkify, an error that names each leaf with a non-finite entry."""
    for path, x in zip(paths, arrays, strict=True):
        # A debug check is inert outside checkify; a plain one would break jit.
        checkify.debug_check(
            jnp.all(jnp.isfinite(x)),
            f"non-finite update in {_leaves.named(path)} (nonfinite='raise')".replace(
                "{", "{{"
            ).replace("}", "}}"),
        )


def each(function: Callable[[jax.Array], jax.Array], block: Block) -> Block:
    """The block with another array in place of each."""
    leaves = [
        _leaves.wrap(
            function(_leaves.unwrap(x)), _leaves.axis_name_of(x), _leaves.matrix_of(x)
        )
        for x in block.leaves
    ]
    return dataclasses.replace(block, leaves=leaves)
