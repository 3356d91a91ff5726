"""What a function does, read off its jaxpr: rules of the user's, and collectives."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

# By the first letters of their names, which have suffixes in some versions of JAX.
_COLLECTIVES = (
    "psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter",
    "ragged_all_to_all", "pgather",
)  # fmt: skip


def has_custom_vjp(eqn: Any) -> bool:
    """Whether an equation calls a `custom_vjp`, or has such a call in its functions."""
    return any(each.primitive.name == "custom_vjp_call" for each in _with_inner(eqn))


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
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return found if isinstance(found, tuple) else (found,)


def _with_inner(eqn: Any) -> Iterator[Any]:
    """An equation and those of the jaxprs among its parameters, alone or in tuples."""
    yield eqn
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(x, "jaxpr", x)
            if isinstance(body, Jaxpr):
                for inner in body.eqns:
                    yield from _with_inner(inner)
