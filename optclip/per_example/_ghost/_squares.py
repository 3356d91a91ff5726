"""Squared norms of the gradient of each example, without the gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _placement
from optclip._arrays._types import PyTree
from optclip.per_example._ghost import _formulas, _sites, _walk
from optclip.per_example._ghost._choice import Trace, traced
from optclip.per_example._ghost._formulas import Scaled
from optclip.per_example._ghost._plan import Site

# So many elements of the gradients of all examples are no matter.
SMALL = 2**22


def scaled_squares(
    loss: Callable[..., Any],
    params: PyTree,
    examples: PyTree,
    *,
    has_aux: bool = False,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Losses, aux, and for each leaf the squared norm of each example's gradient.

    The squares are `Scaled`, which neither overflow nor vanish.
    """
    leaves, treedef = jax.tree.flatten(params)
    example = jax.tree.map(lambda x: jnp.asarray(x)[0], examples)
    leaves = [_varying(jnp.asarray(x), jax.tree.leaves(example)) for x in leaves]
    params = jax.tree.unflatten(treedef, leaves)
    trace = traced(loss, params, example, has_aux)
    values, aux, records, cotangents = _run(trace, leaves, examples)
    found = _by_leaf(trace, leaves, examples, records, cotangents)
    return values, aux, treedef.unflatten(found)


def _varying(x: jax.Array, like: list[jax.Array]) -> jax.Array:
    for other in like:
        x = _placement.varying_as(x, other)
    return x


def _run(trace: Trace, leaves: list[jax.Array], examples: PyTree) -> tuple:
    """Losses and aux; of each site what went in, and the cotangent of what came out."""

    def one(example):
        given = [*leaves, *jax.tree.leaves(example), jnp.zeros((), jnp.float32)]
        like = jax.tree.leaves(example)
        taps = {
            site.key: tuple(_varying(x, like) for x in site.zeros())
            for site in trace.plan.sites
        }

        def run(taps):
            outs, records = _walk.tapped(trace.plan, given, taps)
            value, aux = trace.out_tree.unflatten(outs)
            return value, (aux, records)

        value, pull, (aux, records) = jax.vjp(run, taps, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(value))
        return value, aux, records, cotangents

    return jax.vmap(one)(examples)


def _by_leaf(trace, leaves, examples, records, cotangents) -> list[Scaled]:
    count = jax.tree.leaves(examples)[0].shape[0]
    found: list[Any] = []
    for leaf, sites, kind in zip(leaves, trace.sites, trace.kinds, strict=True):
        nothing = jnp.zeros(count, _leaves.real_dtype(_float_of(leaf)))
        found.append(Scaled.of(nothing, jnp.zeros(count, jnp.int32)))
        if kind not in ("unused", "materialized"):
            key = sites[0].key
            found[-1] = _sites.squares(sites[0], records[key], cotangents[key])
    made = [i for i, kind in enumerate(trace.kinds) if kind == "materialized"]
    large = [i for i in made if count * leaves[i].size > _room(count, trace.sites[i])]
    small = [i for i in made if i not in large]
    for group, one_by_one in ((small, False), (large, True)):
        if group:
            squares = _materialized(
                trace, leaves, group, records, cotangents, one_by_one
            )
            for i, square in zip(group, squares, strict=True):
                found[i] = square
    return found


def _float_of(leaf: jax.Array) -> Any:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.dtype if is_float else jnp.float32


def _room(count: int, sites: list[Site]) -> int:
    """How many elements may be kept: few, or as many as the cotangents have."""
    kept = sum(x.size for site in sites for x in jax.tree.leaves(_shapes(site)))
    return max(SMALL, count * kept)


def _shapes(site: Site) -> Any:
    return jax.eval_shape(site.zeros)


def _materialized(
    trace, leaves, group, records, cotangents, one_by_one
) -> list[Scaled]:
    """Of each leaf of the group, from its gradient."""
    keys = {site.key for i in group for site in trace.sites[i]}
    records = {key: records[key] for key in keys}
    cotangents = {key: cotangents[key] for key in keys}
    num_data = len(trace.plan.jaxpr.invars) - len(leaves)

    def one(records, cotangents):
        def outputs(own):
            given = list(leaves) + [None] * num_data
            for i, leaf in zip(group, own, strict=True):
                given[i] = leaf
            return _walk.replayed(trace.plan, given, records)[1]

        _, pull = jax.vjp(outputs, [leaves[i] for i in group])
        (gradients,) = pull(cotangents)
        return [_formulas.of_gradient(x) for x in gradients]

    size = max(leaves[i].size for i in group) if one_by_one else 0
    return _formulas.mapped(one, size, records, cotangents)
