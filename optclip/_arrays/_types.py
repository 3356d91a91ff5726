"""Name the types of arguments in all of optclip; see `optclip.typing`."""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

PyTree = Any
TreeDef = Any  # jax.tree_util.PyTreeDef, which type checkers do not accept as a class.
LeafLike = Any  # An array, a number, a BCOO matrix, or the `_leaf.Leaf` of one.
KeyPath = tuple[Any, ...]
Number = int | float | jax.Array | np.ndarray | np.number
NumberOrSchedule = Number | Callable[[jax.Array], Any]
Mask = Callable[[PyTree], PyTree] | PyTree
Labels = str | Callable[[PyTree], PyTree] | PyTree
AxisName = Hashable | Callable[[PyTree], PyTree] | PyTree
History = Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | os.PathLike[str]
Nonfinite = Literal["propagate", "zero", "raise"]
Record = bool | Literal["leaves"]
Relative = Literal["rms", "median"] | float | Callable[[jax.Array], Any]
