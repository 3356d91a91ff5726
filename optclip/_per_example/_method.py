"""Choose the method that computes per-example gradients, and estimate its memory."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _axis_names, _leaves
from .._arrays._types import PyTree
from . import _microbatches, _weighted_sum
from ._example_clip import Bound
from ._example_gradients import Source
from ._ghost import _choice

Method = Literal["vmap", "ghost", "auto"]
METHODS = ("vmap", "ghost", "auto")


class Plan(NamedTuple):
    """Describe the chosen method, with the memory estimates for `method="auto"`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(jnp.tanh(example @ w))
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, method="auto")
      >>> plan = f.plan(jnp.ones((64, 64)), jnp.ones((8, 64)))
      >>> print(plan.method, plan.leaves, plan.vmap_bytes)
      ghost gram 131072

    Args:
      method: `"vmap"` or `"ghost"`.
      leaves: How `"ghost"` measures each leaf: by a formula (`"gram"`, `"product"`,
        `"embedding"`) or from its gradient (`"bias"`, `"gain"`, `"materialized"`). An
        `"unused"` leaf has no gradient. A `"custom"` leaf, with a custom derivative
        before its first use with data, is rejected.
      vmap_bytes: Bytes of a microbatch's gradients, excluding activations.
      ghost_bytes: Bytes of a microbatch's layer inputs, cotangents and their products.
      unsupported: Error message of `"ghost"` here, or an empty string.
    """

    method: str
    leaves: PyTree
    vmap_bytes: int
    ghost_bytes: int
    unsupported: str


def planned(
    source: Source, bound: Bound, size: int | None, method: str = "auto"
) -> Plan:
    """Return the plan for these examples, `size` at a time."""
    number = _microbatches.batch_size(source.examples)
    together = number if size is None else min(size, number)
    wide = sum(map(_num_bytes, jax.tree.leaves(source.params)))
    vmap_bytes = together * wide
    if method != "ghost" and not _is_real(source.params):
        kinds = jax.tree.map(lambda _: "materialized", source.params)
        why = unsupported(source, bound)
        return Plan("vmap", kinds, vmap_bytes, vmap_bytes, why)
    one = jax.tree.map(_first, source.examples)
    choice = _choice.choice_of(source.loss, source.params, one, has_aux=True)
    ghost_bytes = together * (choice.kept + choice.work)
    is_rounded = bound.strict and choice.is_narrow
    why = unsupported(source, bound)
    why = why or _choice.unsupported(choice.kinds, is_rounded=is_rounded)
    if method == "auto":
        is_less = ghost_bytes + wide < vmap_bytes
        method = "ghost" if is_less and not why else "vmap"
    return Plan(method, choice.kinds, vmap_bytes, ghost_bytes, why)


def _is_real(params: PyTree) -> bool:
    return not any(map(jnp.iscomplexobj, jax.tree.leaves(params)))


def _num_bytes(x: Any) -> int:
    """Return the bytes of a gradient in the precision of its sum."""
    return jnp.size(x) * _leaves.widen(jnp.zeros((), jnp.result_type(x))).itemsize


def _first(x: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(jnp.asarray(x))
    return jax.ShapeDtypeStruct(kind.shape[1:], kind.dtype)


def unsupported(source: Source, bound: Bound) -> str:
    """Return the error message if `"ghost"` is unsupported, else an empty string."""
    if not _is_real(source.params):
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


def is_ghost(source: Source, bound: Bound, size: int | None, method: str) -> bool:
    """Return whether to compute norms without gradients; raise if unsupported."""
    if method == "vmap":
        return False
    why = unsupported(source, bound)
    if method == "auto":
        return not why and planned(source, bound, size).method == "ghost"
    if why:
        raise ValueError(why)
    # Without examples there is nothing to trace for a plan.
    return _microbatches.batch_size(source.examples) > 0
