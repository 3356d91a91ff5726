"""Define the record of one leaf, which scopes, norms and actions receive."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from . import _leaves, _placement, _sparse
from ._types import AxisName, KeyPath, LeafLike

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


# Compared by identity, so that the blocks of a scope tell which leaves they measure.
@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """Hold one leaf to clip; to a scope it has the attributes of an array.

    Attributes:
      value: The leaf as the user passed it, moved from host memory to the device.
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
        value = _placement.on_device(value)
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


def counted_from_zero(
    axis: tuple[int, ...], x: LeafLike, path: KeyPath, name: str = "axis"
) -> tuple[int, ...]:
    """Return the axes of a leaf in ascending order, counted from 0.

    Raises:
      ValueError: The leaf lacks an axis, or an axis is repeated.
    """
    shape = getattr(x, "shape", ())
    ndim = len(shape)
    advice = (
        "Exclude such leaves with mask=, or pass them to another transformation with"
        " optax.masked."
    )
    if isinstance(getattr(x, "value", x), (int, float, complex)):
        advice = "A list of numbers has one leaf per number: pass jnp.asarray(list)."

    def wrong(wanted: str) -> str:
        leaf = f"{_leaves.named(path)} of shape {shape}"
        return f"`{name}` must name {wanted}, got {axis} for {leaf}."

    if any(not -ndim <= a < ndim for a in axis):
        raise ValueError(f"{wrong('axes that each leaf has')} {advice}")
    axes = tuple(sorted(a % ndim for a in axis))
    if len(set(axes)) < len(axes):
        raise ValueError(wrong("each axis once"))
    return axes
