"""Run one backward pass per example, down to the sites where parameters meet data.

Each pass starts from a cotangent of 1. Gradients are linear in the cotangents of their
sites, so cotangents multiplied by the examples' coefficients give the clipped sum.
Every `jax.custom_vjp` between a site and the loss, such as `clip_cotangent`, has then
been applied to the unscaled cotangent of one example.

References:
  Bu, Wang, Zha and Karypis, "Differentially Private Optimization on Large Model at
  Small Cost", 2022, arXiv:2210.00038 (book-keeping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arrays import _leaves, _placement
from ..._arrays._types import PyTree
from .._example_gradients import by_example, harmless
from . import _formulas, _sites, _walk
from ._formulas import Scaled
from ._plan import Site
from ._sites import Trace, traced

# Derivatives with respect to one operand are linear in the other: zeros give zeros.
BILINEAR = frozenset(["dot_general", "conv_general_dilated", "mul", "gather"])

# Number of gradient elements over all examples whose memory is negligible.
SMALL = 2**22


class BackwardPass(NamedTuple):
    """Hold the losses of a batch, and the data and cotangents of each site."""

    trace: Trace
    params: PyTree
    values: jax.Array
    aux: PyTree
    # Arrays by site key, with the axis of examples first.
    records: dict[int, tuple[jax.Array, ...]]
    cotangents: dict[int, tuple[jax.Array, ...]]

    @property
    def leaves(self) -> list[jax.Array]:
        return jax.tree.leaves(self.params)

    def of(self, which: Sequence[int]) -> tuple[dict, dict]:
        """Return the records and cotangents that some leaves' gradients need."""
        keys = {site.key for i in which for site in self.trace.sites[i]}
        records = {key: self.records[key] for key in keys}
        return records, {key: self.cotangents[key] for key in keys}


def backward(
    loss: Callable[..., Any], params: PyTree, examples: PyTree
) -> BackwardPass:
    """Run the loss and its backward pass for each example of a batch."""
    leaves, treedef = jax.tree.flatten(params)
    example = jax.tree.map(lambda x: jnp.asarray(x)[0], examples)
    like = jax.tree.leaves(example)
    leaves = [_varying(jnp.asarray(x), like) for x in leaves]
    params = treedef.unflatten(leaves)
    trace = traced(loss, params, example)

    def one(example):
        arguments = [*leaves, *jax.tree.leaves(example), jnp.zeros((), jnp.float32)]
        like = jax.tree.leaves(example)
        taps = {
            site.key: tuple(_varying(x, like) for x in site.zeros())
            for site in trace.plan.sites
        }

        def run(taps):
            outs, records = _walk.tapped(trace.plan, arguments, taps)
            value, aux = trace.out_tree.unflatten(outs)
            return value, (aux, records)

        value, pull, (aux, records) = jax.vjp(run, taps, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(value))
        return value, aux, records, cotangents

    return BackwardPass(trace, params, *jax.vmap(one)(examples))


def weighted_gradients(
    back: BackwardPass, which: Sequence[int], weights: jax.Array
) -> list[jax.Array]:
    """Return the sum over examples of some leaves' gradients times weights.

    An example with weight 0 adds nothing, even if its data or cotangents are
    non-finite.
    """
    records, cotangents = back.of(which)
    counts = weights != 0
    sites = {site.key: site for i in which for site in back.trace.sites[i]}
    # 0 times inf is NaN, so the data of excluded examples must be replaced too: by
    # zeros, or by another example's data where a derivative may divide by it.
    plain = {k: x for k, x in records.items() if sites[k].name in BILINEAR}
    plain = jax.tree.map(lambda x: _selected(counts, x), plain)
    other = {k: x for k, x in records.items() if k not in plain}
    other, is_any = harmless(other, counts)
    cotangents = jax.tree.map(lambda d: _scaled(weights, d), cotangents)

    def outputs(leaves):
        one = jax.vmap(
            lambda records: _site_outputs(back, which, leaves, records),
            axis_size=len(weights),
        )
        return one({**plain, **other})

    _, pull = jax.vjp(outputs, [back.leaves[i] for i in which])
    (grads,) = pull(cotangents)
    # Select zeros if no example counts: a derivative may then divide by data of zero.
    wide = [_leaves.widen(x) for x in grads]
    return [jnp.where(is_any, x, jnp.zeros_like(x)) for x in wide]


def _site_outputs(
    back: BackwardPass, which: Sequence[int], leaves: list[jax.Array], records: dict
) -> dict:
    """Compute the outputs of the sites as a function of some leaves."""
    num_data = len(back.trace.plan.jaxpr.invars) - len(back.leaves)
    arguments = [*back.leaves, *[None] * num_data]
    for i, leaf in zip(which, leaves, strict=True):
        arguments[i] = leaf
    return _walk.replayed(back.trace.plan, arguments, records)[1]


def _selected(counts: jax.Array, x: jax.Array) -> jax.Array:
    """Return the arrays of examples that count, and zeros: 0 times inf is NaN."""
    return jnp.where(by_example(counts, x), x, jnp.zeros_like(x))


def _scaled(weights: jax.Array, d: jax.Array) -> jax.Array:
    """Return cotangents times weights, in float32 or wider, rounded once."""
    wide = _leaves.widen(d)
    product = wide * by_example(weights, d).astype(wide.dtype)
    return _selected(weights != 0, product.astype(d.dtype))


def _varying(x: jax.Array, like: list[jax.Array]) -> jax.Array:
    for other in like:
        x = _placement.varying_as(x, other)
    return x


def scaled_squares(back: BackwardPass) -> PyTree:
    """Return the squared norms of a batch's gradients for each leaf.

    They are `Scaled`, so they neither overflow nor underflow.
    """
    leaves, count = back.leaves, len(back.values)
    sites, kinds = back.trace.sites, back.trace.kinds
    by_leaf: list[Any] = []
    for i, leaf in enumerate(leaves):
        nothing = jnp.zeros(count, _leaves.real_dtype(leaf.dtype))
        by_leaf.append(Scaled.of(nothing, jnp.zeros(count, jnp.int32)))
        if kinds[i] == "formula":
            key = sites[i][0].key
            by_leaf[i] = _sites.squares(
                sites[i][0], back.records[key], back.cotangents[key]
            )
    made = [i for i, kind in enumerate(kinds) if kind == "materialized"]
    large = [i for i in made if count * leaves[i].size > _room(count, sites[i])]
    small = [i for i in made if i not in large]
    for group, one_by_one in ((small, False), (large, True)):
        if group:
            squares = _materialized(back, group, one_by_one)
            for i, square in zip(group, squares, strict=True):
                by_leaf[i] = square
    return jax.tree.unflatten(jax.tree.structure(back.params), by_leaf)


def _room(count: int, sites: list[Site]) -> int:
    """Return the number of gradient elements that may be stored together."""
    cotangent_size = sum(
        math.prod(site.lengths) * aval.size for site in sites for aval in site.avals
    )
    return max(SMALL, count * cotangent_size)


def _materialized(
    back: BackwardPass, group: list[int], one_by_one: bool
) -> list[Scaled]:
    """Return the squared norms of the group's leaves from their gradients."""

    def one(records, cotangents):
        _, pull = jax.vjp(
            lambda leaves: _site_outputs(back, group, leaves, records),
            [back.leaves[i] for i in group],
        )
        (grads,) = pull(cotangents)
        return [_formulas.of_gradient(x) for x in grads]

    size = max(back.leaves[i].size for i in group) if one_by_one else 0
    return _formulas.mapped(one, size, *back.of(group))
