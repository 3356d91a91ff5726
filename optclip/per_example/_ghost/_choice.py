"""What is done about each leaf of a loss, known before it is run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves
from optclip._arrays._types import PyTree
from optclip.per_example._ghost import _plan, _sites
from optclip.per_example._ghost._plan import CONST, DATA, JaxprPlan, Site, Weight

# A leaf whose gradient need not be linear in the cotangents of its sites.
CUSTOM = "custom"


class Trace(NamedTuple):
    """What is known of a loss before it is run."""

    plan: JaxprPlan
    out_tree: Any
    # Of each leaf, its sites.
    sites: list[list[Site]]
    # Of each leaf, what is done about it.
    kinds: list[str]

    def is_narrow(self) -> bool:
        """Whether a gradient is rounded to fewer than 32 bits after it was summed."""
        return any(site.is_narrow() for sites in self.sites for site in sites)


class Choice(NamedTuple):
    """What `scaled_squares` does about each leaf, and the memory that it takes.

    A leaf is of the kind `gram` (products of positions), `product` (a matrix product
    for each example), `embedding` (rows added up), `bias`, `gain` or `materialized`
    (its gradient by itself), `unused`, or `custom`, which is not supported. `kept`
    are the bytes of data and cotangents that are kept for an example, `work` those of
    the largest products of positions; `is_narrow` says whether a sum over examples is
    rounded to fewer than 32 bits.
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
                f" with data, got one at {_leaves.named(path)}: it need not be linear"
                " in the cotangent. Use method='vmap'."
            )
    if not is_rounded:
        return ""
    return (
        "`strict` must be False for method='ghost' where parameters meet data in fewer"
        " than 32 bits, such as bfloat16: the sum over examples is rounded to it."
        " Compute in float32, or use method='vmap'."
    )


def choice_of(
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
    num_bytes = sum(_sites.num_kept_bytes(site) for site in trace.plan.sites)
    pairs = zip(trace.sites, trace.kinds, strict=True)
    work = [_sites.num_work_bytes(sites[0]) for sites, kind in pairs if kind == "gram"]
    kinds = [_named(*pair) for pair in zip(trace.sites, trace.kinds, strict=True)]
    most = max(work, default=0)
    return Choice(treedef.unflatten(kinds), num_bytes, most, trace.is_narrow())


def _named(sites: list[Site], kind: str) -> str:
    """What a leaf is: that it is a bias or a gain makes no difference."""
    names = {"add": "bias", "sub": "bias", "mul": "gain"}
    is_one = kind == "materialized" and len(sites) == 1
    return names.get(sites[0].name, kind) if is_one else kind


def traced(
    loss: Callable[..., Any], params: PyTree, example: PyTree, has_aux: bool
) -> Trace:
    """The plan for a loss, and what is to be done about each leaf."""
    arguments, treedef = jax.tree.flatten((params, example))

    def flat(arguments, zero):
        outputs = loss(*treedef.unflatten(arguments))
        value, aux = outputs if has_aux else (outputs, None)
        value = jnp.asarray(value)
        _check_value(value)
        # Adding the zero makes a loss of parameters alone depend on data.
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
            f"`params` must be real for the norms of method='ghost', got a leaf of"
            f" {leaf.dtype}. Keep its real and its imaginary part as two leaves."
        )
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    if not is_float:
        return CONST
    return Weight(frozenset([i]), is_narrow=_leaves.is_narrow(leaf))


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
    if not all(site.is_linear() for site in sites):
        return CUSTOM
    rule = _sites.rule_of(sites[0]) if len(sites) == 1 else None
    return rule or "materialized"
