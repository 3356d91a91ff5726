"""Norms of the gradient of each example, without the gradients.

Two passes: this one, and then the gradient of the weighted sum of the losses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _placement
from optclip._arrays._types import PyTree
from optclip.per_example import _ghost_norms, _ghost_plan, _ghost_sites, _ghost_walk
from optclip.per_example._ghost_norms import Scaled
from optclip.per_example._ghost_plan import CONST, DATA, Plan, Site, Weight

# So many elements of the gradients of all examples are no matter.
SMALL = 2**22


class Trace(NamedTuple):
    """What is known of a loss before it is run."""

    plan: Plan
    out_tree: Any
    # Of each leaf, its sites.
    sites: list[list[Site]]
    # Of each leaf, what is done about it.
    kinds: list[str]


class Choice(NamedTuple):
    """What `ghost_squares` does about each leaf, and the memory that it takes.

    A leaf is of the kind `gram` (products of positions), `product` (a matrix product
    for each example), `embedding` (rows added up), `bias`, `gain` or `materialized`
    (its gradient by itself) or `unused`. `kept` are the bytes of data and cotangents
    that are kept for an example, `work` those of the largest products of positions.
    """

    kinds: PyTree
    kept: int
    work: int


def ghost_squares(
    loss: Callable[..., Any],
    params: PyTree,
    examples: PyTree,
    *,
    has_aux: bool = False,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Losses, aux, and for each leaf the squared norm of each example's gradient."""
    values, aux, scaled = scaled_squares(loss, params, examples, has_aux=has_aux)
    found, treedef = jax.tree.flatten(scaled, is_leaf=_is_scaled)
    return values, aux, treedef.unflatten(_squares(found))


def scaled_squares(
    loss: Callable[..., Any],
    params: PyTree,
    examples: PyTree,
    *,
    has_aux: bool = False,
) -> tuple[jax.Array, PyTree, PyTree]:
    """The same with a `Scaled` for each leaf, which neither overflows nor vanishes."""
    leaves, treedef = jax.tree.flatten(params)
    example = jax.tree.map(lambda x: jnp.asarray(x)[0], examples)
    leaves = [_varying(jnp.asarray(x), jax.tree.leaves(example)) for x in leaves]
    params = jax.tree.unflatten(treedef, leaves)
    trace = traced(loss, params, example, has_aux)
    values, aux, records, cotangents = _run(trace, leaves, examples)
    found = _by_leaf(trace, leaves, examples, records, cotangents)
    return values, aux, treedef.unflatten(found)


def _is_scaled(x: Any) -> bool:
    return isinstance(x, Scaled)


def plan(
    loss: Callable[..., Any],
    params: PyTree,
    example: PyTree,
    *,
    has_aux: bool = False,
) -> Choice:
    """What is done about each leaf, and how much memory an example takes."""
    leaves, treedef = jax.tree.flatten(params)
    leaves = [jnp.asarray(x) for x in leaves]
    trace = traced(loss, treedef.unflatten(leaves), example, has_aux)
    kept = sum(_ghost_sites.num_kept_bytes(site) for site in trace.plan.sites)
    pairs = zip(trace.sites, trace.kinds, strict=True)
    work = [
        _ghost_sites.num_work_bytes(sites[0]) for sites, kind in pairs if kind == "gram"
    ]
    kinds = [_named(*pair) for pair in zip(trace.sites, trace.kinds, strict=True)]
    return Choice(treedef.unflatten(kinds), kept, max(work, default=0))


def _named(sites: list[Site], kind: str) -> str:
    """What a leaf is: that it is a bias or a gain makes no difference."""
    names = {"add": "bias", "sub": "bias", "mul": "gain"}
    is_one = kind == "materialized" and len(sites) == 1
    return names.get(sites[0].name, kind) if is_one else kind


def _squares(found: list[Scaled]) -> list[jax.Array]:
    """All of one dtype at once: a thousand leaves are not to be a thousand shifts."""
    squares: list[Any] = [None] * len(found)
    for dtype in dict.fromkeys(one.square.dtype for one in found):
        own = [i for i, one in enumerate(found) if one.square.dtype == dtype]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(found[i] for i in own))
        square = stacked.at(jnp.zeros_like(stacked.exponent))
        for i, one in zip(own, square, strict=True):
            squares[i] = one
    return squares


def traced(
    loss: Callable[..., Any], params: PyTree, example: PyTree, has_aux: bool
) -> Trace:
    """The plan for a loss, and what is to be done about each leaf."""
    given, treedef = jax.tree.flatten((params, example))

    def flat(given, zero):
        found = loss(*treedef.unflatten(given))
        value, aux = found if has_aux else (found, None)
        value = jnp.asarray(value)
        _check_value(value)
        # A loss of parameters alone meets data here.
        return value + zero.astype(value.dtype), aux

    zero = jnp.zeros((), jnp.float32)
    jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(given, zero)
    leaves = jax.tree.leaves(params)
    infos = [_info(i, leaf) for i, leaf in enumerate(leaves)]
    data = [DATA] * (len(given) + 1 - len(leaves))
    plan = _ghost_plan.planned(jaxpr, [*infos, *data])
    sites = [[s for s in plan.sites if i in s.leaves] for i in range(len(leaves))]
    kinds = [_kind(own) for own in sites]
    return Trace(plan, jax.tree.structure(shapes), sites, kinds)


def _info(i: int, leaf: jax.Array) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(
            f"`params` must be real for the norms of method='ghost', got a leaf of"
            f" {leaf.dtype}. Keep its real and its imaginary part as two leaves."
        )
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return Weight(frozenset([i])) if is_float else CONST


def _check_value(value: jax.Array) -> None:
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"`loss` must be a function that returns one real number for one example,"
            f" got {value.dtype}{list(value.shape)}. Give the function of one example,"
            " without a batch axis."
        )


def _kind(sites: list[Site]) -> str:
    if not sites:
        return "unused"
    rule = _ghost_sites.rule_of(sites[0]) if len(sites) == 1 else None
    return rule or "materialized"


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
            outs, records = _ghost_walk.tapped(trace.plan, given, taps)
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
            found[-1] = _ghost_sites.squares(sites[0], records[key], cotangents[key])
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
            return _ghost_walk.replayed(trace.plan, given, records)[1]

        _, pull = jax.vjp(outputs, [leaves[i] for i in group])
        (gradients,) = pull(cotangents)
        return [_ghost_norms.of_gradient(x) for x in gradients]

    size = max(leaves[i].size for i in group) if one_by_one else 0
    return _ghost_norms.mapped(one, size, records, cotangents)
