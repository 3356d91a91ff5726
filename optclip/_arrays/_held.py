"""Hold any value in a closure, hashed by identity."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Held(Generic[T]):
    """Hold a value that may have no hash, such as an array or a dict.

    Equinox and Optimistix open the functions of a transformation and hash the contents
    of their closures.
    """

    value: T
