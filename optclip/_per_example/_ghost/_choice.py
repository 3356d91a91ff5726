"""Decide how to measure each leaf of a loss before running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arrays import _leaves
from ..._arrays._types import PyTree
from . import _plan, _sites
from ._plan import CONST, DATA, JaxprPlan, Site, Weight

# A leaf whose gradient may be nonlinear in the cotangents of its sites.
CUSTOM = "custom"


class Trace(NamedTuple):
    """Hold the static analysis of a loss."""

    plan: JaxprPlan
    out_tree: Any
    # The sites of each leaf.
    sites: list[list[Site]]
    # How each leaf is measured: `gram` (products of positions), `product` (a matrix
    # product per example), `embedding` (summed rows), `materialized` (from its
    # gradient), `unused`, or `custom`, which is not supported.
    kinds: list[str]

    def is_narrow(self) -> bool:
        """Return whether a summed gradient is rounded to fewer than 32 bits."""
        return any(site.is_narrow() for sites in self.sites for site in sites)


def unsupported(kinds: PyTree, *, is_rounded: bool) -> str:
    """Return the error message if a sum would be wrong, else an empty string."""
    flat = _leaves.flatten(kinds)
    for path, kind in zip(flat.paths, flat.leaves, strict=True):
        if kind == CUSTOM:
            return (
                "method='ghost' does not support a custom derivative (`jax.custom_vjp`,"
                " `jax.lax.custom_linear_solve`) between a parameter and its first use"
                f" with data, got one at {_leaves.named(path)}. It may be nonlinear in"
                " the cotangent. Use method='vmap'."
            )
    if not is_rounded:
        return ""
    return (
        "`strict` must be False for method='ghost' if parameters meet data in fewer"
        " than 32 bits, such as bfloat16, because the sum over examples is rounded to"
        " it. Compute in float32, use method='vmap', or pass strict=False."
    )


def traced(
    loss: Callable[..., Any], params: PyTree, example: PyTree, has_aux: bool
) -> Trace:
    """Trace a loss, and decide how to measure each leaf."""
    arguments, treedef = jax.tree.flatten((params, example))

    def flat(arguments, zero):
        outputs = loss(*treedef.unflatten(arguments))
        value, aux = outputs if has_aux else (outputs, None)
        value = jnp.asarray(value)
        # Adding the zero makes a loss that depends only on parameters depend on data.
        return value + zero.astype(value.dtype), aux

    zero = jnp.zeros((), jnp.float32)
    jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(arguments, zero)
    leaves = jax.tree.leaves(params)
    infos = [_info(i, leaf) for i, leaf in enumerate(leaves)]
    data = [DATA] * (len(arguments) + 1 - len(leaves))
    plan = _plan.planned(jaxpr, [*infos, *data])
    sites = [[s for s in plan.sites if i in s.leaves] for i in range(len(leaves))]
    kinds = [_kind(leaf_sites) for leaf_sites in sites]
    return Trace(plan, jax.tree.structure(shapes), sites, kinds)


def _info(i: int, leaf: jax.Array) -> Any:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    if not is_float:
        return CONST
    return Weight(frozenset([i]), is_narrow=_leaves.is_narrow(leaf))


def _kind(sites: list[Site]) -> str:
    if not sites:
        return "unused"
    if not all(site.is_linear() for site in sites):
        return CUSTOM
    rule = _sites.rule_of(sites[0]) if len(sites) == 1 else None
    return rule or "materialized"
