"""Choose whether per-example gradients are computed, or only their norms."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from .._arrays import _axis_names
from . import _microbatches, _weighted_sum
from ._bound import Bound
from ._example_gradients import Source

Method = Literal["vmap", "ghost"]
METHODS = ("vmap", "ghost")


def is_ghost(source: Source, bound: Bound, method: str) -> bool:
    """Return whether to compute norms without gradients; raise if unsupported."""
    if method == "vmap":
        return False
    if why := unsupported(source, bound):
        raise ValueError(why)
    # Without examples there is nothing to trace.
    return _microbatches.batch_size(source.examples) > 0


def unsupported(source: Source, bound: Bound) -> str:
    """Return the error message if `"ghost"` is unsupported, else an empty string."""
    if any(map(jnp.iscomplexobj, jax.tree.leaves(source.params))):
        return (
            "method='ghost' does not support complex parameters. Use method='vmap', or"
            " pass real and imaginary parts as two leaves."
        )
    arrays = jax.tree.leaves((source.params, source.examples))
    kinds = [jax.typeof(jnp.asarray(x)) for x in arrays]
    if any(_axis_names.varying(kind) - {*source.axes} for kind in kinds):
        return (
            "method='ghost' does not support parameters that are split inside"
            " shard_map. Use method='vmap', or jax.jit without shard_map."
        )
    # Only Explicit axes are part of an array's type.
    if any(any(kind.sharding.spec) for kind in kinds):
        return (
            "method='ghost' does not support arrays that are split over Explicit mesh"
            " axes. Use method='vmap', or Auto axes."
        )
    return _weighted_sum.unsupported(bound)
