"""The clipping operations in a transformation, as its closures hold them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from .._transforms import Engine


def engines_in(transformation: Any) -> Iterator[Engine]:
    """Yield the engines in a transformation, also in chains, masks and wrappers.

    A transformation consists of two functions, so it shows its parts only in their
    closures. An engine in an object of another library is not found.
    """
    waiting, seen = [transformation], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Engine):
            yield part
        else:
            waiting.extend(_held_by(part))


def _held_by(part: Any) -> tuple[Any, ...]:
    if isinstance(part, types.MethodType):
        return (part.__self__,)
    if isinstance(part, types.FunctionType):
        return tuple(_contents(part))
    if isinstance(part, dict):  # optax.partition has one transformation per label.
        return tuple(part.values())
    return tuple(part) if isinstance(part, (tuple, list)) else ()


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # A variable that is assigned later.
            continue
