"""The order in which the arrays of a clipping state are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .._arrays import _packed_state
from .._arrays._types import PyTree


def in_model_order(state: PyTree, names: Sequence[str]) -> list[int]:
    """Return the positions of the leaves of a state, independent of variable names.

    JAX sorts the keys of a dict. The keys of a record are names of variables, and a
    process that has built other models before numbers its layers differently: `dense_9`
    and `dense_10` there are `dense` and `dense_1` here, in the other order.
    """
    places = {name: i for i, name in enumerate(names)}
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    first: dict[Any, int] = {}
    for i, path in enumerate(paths):
        for end in range(len(path)):
            first.setdefault(path[: end + 1], i)

    def rank(i: int) -> list[int]:
        # Keys that are no variable keep their place.
        ends = [paths[i][: end + 1] for end in range(len(paths[i]))]
        return [places.get(_name(end[-1]), first[end]) for end in ends]

    return sorted(range(len(paths)), key=rank)


def _name(key: Any) -> str:
    return _packed_state.as_name(str(getattr(key, "key", "")))
