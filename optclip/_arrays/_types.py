"""Name the types of arguments in all of optclip; see `optclip.typing`."""

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax
import numpy as np

T = TypeVar("T")

PyTree = Any
"""Any JAX pytree, such as dicts, lists, tuples, modules or a single leaf."""

TreeDef = Any  # jax.tree_util.PyTreeDef, which type checkers do not accept as a class.
LeafLike = Any  # An array, a number, a BCOO matrix, or the `_leaf.Leaf` of one.
KeyPath = tuple[Any, ...]
Number = int | float | jax.Array | np.ndarray | np.number
"""A real number of Python or NumPy, or an array, traced or not; not a bool."""

NumberOrSchedule = Number | Callable[[jax.Array], Any]
"""A number, or an optax schedule (a function of the step)."""

Mask = Callable[[PyTree], PyTree] | PyTree
"""A tree of bools, a prefix of one, or a function of the updates."""

Labels = str | Callable[[PyTree], PyTree] | PyTree
"""A tree of strings, a prefix of one, or a function of the updates."""

AxisName = Hashable | Callable[[PyTree], PyTree] | PyTree
"""A mesh axis, a tuple of them, a `PartitionSpec`, a tree of these, or a function."""

History = Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | os.PathLike[str]
"""The output of `optclip.metrics` as a list of dicts, a dict of arrays, or a file."""

Nonfinite = Literal["propagate", "zero", "raise"]
"""The policy `"propagate"`, `"zero"` or `"raise"` for NaN and inf."""

Record = bool | Literal["leaves"]
"""True, False or `"leaves"`, which also records the norm of each leaf."""

Relative = Literal["median"] | Callable[[jax.Array], Any]
"""The unit of a cotangent threshold, computed from all norms of a leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Held(Generic[T]):
    """Hold a value that may have no hash, such as an array or a dict.

    Equinox and Optimistix open the functions of a transformation and hash the contents
    of their closures.
    """

    value: T
