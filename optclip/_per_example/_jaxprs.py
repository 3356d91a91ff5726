"""Find custom derivatives and collectives in a jaxpr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

# User functions compute their derivatives, and need not be linear in the cotangent: a
# rule may clip it, and an iterative solver may stop early.
_CUSTOM = frozenset(["custom_vjp_call", "custom_linear_solve"])

# Prefixes of primitive names, because some versions of JAX append suffixes.
_COLLECTIVES = (
    "psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter",
    "ragged_all_to_all", "pgather",
)  # fmt: skip


def has_custom_derivative(eqn: Any) -> bool:
    """Return whether an equation may be nonlinear in its cotangent."""
    return any(each.primitive.name in _CUSTOM for each in _with_inner(eqn))


def collectives(jaxpr: Jaxpr, axes: Any) -> list[str]:
    """Return the names of the collectives over any of these mapped axes."""
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
    """Yield an equation, and the equations of the jaxprs in its parameters."""
    yield eqn
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(x, "jaxpr", x)
            if isinstance(body, Jaxpr):
                for inner in body.eqns:
                    yield from _with_inner(inner)
