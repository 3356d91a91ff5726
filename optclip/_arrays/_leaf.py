"""Define the record of one leaf that scopes, norms and actions receive."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from . import _leaves, _sparse
from ._types import AxisName, KeyPath

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


# Compared by identity, so that the blocks of a scope tell which leaves they measure.
@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """Hold one leaf to clip; to a scope it has the attributes of an array.

    Attributes:
      value: The leaf as the user passed it.
      array: Its numbers; for a BCOO matrix its data, duplicates summed.
      path: Its path in the tree.
      axis_name: The declared mapped axes that split it; None if there are none.
      matrix: The BCOO matrix whose data `array` is, or None.
    """

    value: Any
    array: Any
    path: KeyPath = ()
    axis_name: AxisName | None = None
    matrix: BCOO | None = None

    @classmethod
    def of(
        cls, value: Any, path: KeyPath = (), axis_name: AxisName | None = None
    ) -> Leaf:
        """Return the record of an array, a number or a BCOO matrix."""
        if not _leaves.is_sparse(value):
            return cls(value, value, path, axis_name)
        matrix = _sparse.summed(value)
        return cls(value, matrix.data, path, axis_name, matrix)

    @property
    def like(self) -> jax.Array:
        """An array of the dtype and weak type in which the leaf is returned."""
        return _leaves.values(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.array if self.matrix is None else self.matrix)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self.array if self.matrix is None else self.matrix)
