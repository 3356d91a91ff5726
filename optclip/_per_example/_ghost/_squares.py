"""Compute squared norms of per-example gradients without the gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._arrays import _leaves
from ..._arrays._types import PyTree
from . import _formulas, _sites
from ._formulas import Scaled
from ._ghost_backward import BackwardPass, gradients
from ._plan import Site

# Number of gradient elements over all examples whose memory is negligible.
SMALL = 2**22


def scaled_squares(back: BackwardPass) -> PyTree:
    """Return the squared norms of a batch's gradients for each leaf.

    They are `Scaled`, so they neither overflow nor underflow.
    """
    leaves, count = back.leaves, len(back.values)
    sites, kinds = back.trace.sites, back.trace.kinds
    by_leaf: list[Any] = []
    for i, leaf in enumerate(leaves):
        nothing = jnp.zeros(count, _leaves.real_dtype(_float_of(leaf)))
        by_leaf.append(Scaled.of(nothing, jnp.zeros(count, jnp.int32)))
        if kinds[i] not in ("unused", "materialized"):
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


def _float_of(leaf: jax.Array) -> Any:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.dtype if is_float else jnp.float32


def _room(count: int, sites: list[Site]) -> int:
    """Return the number of gradient elements that may be stored together."""
    cotangent_size = sum(
        x.size for site in sites for x in jax.tree.leaves(_shapes(site))
    )
    return max(SMALL, count * cotangent_size)


def _shapes(site: Site) -> Any:
    return jax.eval_shape(site.zeros)


def _materialized(
    back: BackwardPass, group: list[int], one_by_one: bool
) -> list[Scaled]:
    """Return the squared norms of the group's leaves from their gradients."""

    def one(records, cotangents):
        grads = gradients(back, group, records, cotangents)
        return [_formulas.of_gradient(x) for x in grads]

    size = max(back.leaves[i].size for i in group) if one_by_one else 0
    return _formulas.mapped(one, size, *back.of(group))
