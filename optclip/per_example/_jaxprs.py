"""Find custom derivatives and collectives in a jaxpr."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

# Their derivatives are computed by functions of the user's, which need not be linear in
# the cotangent: a rule may clip it, and an iterative solver may stop early.
_CUSTOM = frozenset(["custom_vjp_call", "custom_linear_solve"])

# By the first letters of their names, which have suffixes in some versions of JAX.
_COLLECTIVES = (
    "psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter",
    "ragged_all_to_all", "pgather",
)  # fmt: skip


def has_custom_derivative(eqn: Any) -> bool:
    """Whether an equation, or one inside it, need not be linear in its cotangent."""
    return any(each.primitive.name in _CUSTOM for each in _with_inner(eqn))


def collectives(jaxpr: Jaxpr, axes: Any) -> list[str]:
    """The names of the collectives over some of these mapped axes."""
    return [
        each.primitive.name
        for eqn in jaxpr.eqns
        for each in _with_inner(eqn)
        if each.primitive.name.startswith(_COLLECTIVES)
        and not {*axes}.isdisjoint(_axes_of(each))
    ]


def _axes_of(eqn: Any) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _with_inner(eqn: Any) -> Iterator[Any]:
    """An equation and those of the jaxprs among its parameters, alone or in tuples."""
    yield eqn
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(x, "jaxpr", x)
            if isinstance(body, Jaxpr):
                for inner in body.eqns:
                    yield from _with_inner(inner)
