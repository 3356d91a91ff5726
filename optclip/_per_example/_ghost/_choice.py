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
    # The kind of each leaf, as in `Choice`.
    kinds: list[str]

    def is_narrow(self) -> bool:
        """Return whether a summed gradient is rounded to fewer than 32 bits."""
        return any(site.is_narrow() for sites in self.sites for site in sites)


class Choice(NamedTuple):
    """Describe how `scaled_squares` measures each leaf, and the memory it uses.

    The kind of a leaf is `gram` (products of positions), `product` (a matrix product
    per example), `embedding` (summed rows), `bias`, `gain` or `materialized` (its
    gradient is computed), `unused`, or `custom`, which is not supported. `kept` is the
    number of bytes of data and cotangents stored per example, `work` the bytes of the
    largest products of positions. `is_narrow` is whether a sum over examples is rounded
    to fewer than 32 bits.
    """

    kinds: PyTree
    kept: int
    work: int
    is_narrow: bool


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


def choice_of(
    loss: Callable[..., Any],
    params: PyTree,
    example: PyTree,
    *,
    has_aux: bool = False,
) -> Choice:
    """Decide how to measure each leaf, and estimate the memory per example."""
    leaves, treedef = jax.tree.flatten(params)
    leaves = [jnp.asarray(x) for x in leaves]
    trace = traced(loss, treedef.unflatten(leaves), example, has_aux)
    num_bytes = sum(_sites.num_kept_bytes(site) for site in trace.plan.sites)
    pairs = zip(trace.sites, trace.kinds, strict=True)
    work = [_sites.num_work_bytes(sites[0]) for sites, kind in pairs if kind == "gram"]
    kinds = [_named(*pair) for pair in zip(trace.sites, trace.kinds, strict=True)]
    most = max(work, default=0)
    return Choice(treedef.unflatten(kinds), num_bytes, most, trace.is_narrow())


def _named(sites: list[Site], kind: str) -> str:
    """Return the kind of a leaf, with biases and gains named."""
    names = {"add": "bias", "sub": "bias", "mul": "gain"}
    is_one = kind == "materialized" and len(sites) == 1
    return names.get(sites[0].name, kind) if is_one else kind


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
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(
            "`params` must be real for the norms of method='ghost', got a leaf of"
            f" {leaf.dtype}. Pass its real and imaginary parts as two leaves."
        )
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
