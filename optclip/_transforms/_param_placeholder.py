"""Build the state for the object that `optax.tree_map_params` passes to `init`.

It marks the entries of a true state that are like the parameters. A `PerNorm` is one
number here, since its key is unknown: a prefix of the true state.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays import _packed_state
from .._arrays._packed_state import PerNorm
from .._arrays._types import PyTree
from .._scopes import EachElement, Scope, Tree
from .._thresholds import is_rule

# A shape other than a scalar's, so that a sum of norms is not mistaken for the norms.
_SHAPE = (2, 3)


def is_placeholder(params: PyTree) -> bool:
    """Return whether this stands for parameters, in `optax.tree_map_params`."""
    return isinstance(params, _placeholder())


def memory(scope: Scope, rules: Any, placeholder: Any) -> list[Any]:
    """Return the memory of each rule; `placeholder` replaces parameter-like trees."""
    if isinstance(scope, Tree) or not is_rule(rules):
        leaves = jax.tree.leaves(rules, is_leaf=is_rule)
        return [rule.init(jnp.zeros(())) for rule in leaves]
    norm = {"": jnp.zeros(_SHAPE)}
    packed_memory = _packed_state.packed(
        rules.init(norm), norm, is_like_params=isinstance(scope, EachElement)
    )

    def is_whole(x: Any) -> bool:
        return isinstance(x, PerNorm) or jax.tree.structure(x) == jax.tree.structure(
            norm
        )

    def replaced(x: Any) -> Any:
        if isinstance(x, PerNorm):
            return jnp.zeros(())
        return placeholder if is_whole(x) else x

    return [jax.tree.map(replaced, packed_memory, is_leaf=is_whole)]


@functools.cache
def _placeholder() -> type:
    # Optax has no public name for the class, so it is read from a call.
    received: list[PyTree] = []

    def init(params: PyTree) -> tuple[()]:
        received.append(params)
        return ()

    optax.tree_map_params(init, lambda x: x, ())
    return type(received[0])
