"""Define the record of one leaf, which scopes, norms and actions receive.

A BCOO leaf, the IndexedSlices of JAX, is the array of its data, duplicates summed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from . import _leaves, _placement
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
        matrix = _summed(value)
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
    axis: tuple[int, ...],
    x: LeafLike,
    path: KeyPath,
    name: str = "axis",
    passed: object = None,
) -> tuple[int, ...]:
    """Return the axes of a leaf in ascending order, counted from 0.

    Errors show `axis`, or the argument `passed` from which it was read.

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
        return f"`{name}` must name {wanted}, got {passed or axis} for {leaf}."

    if any(not -ndim <= a < ndim for a in axis):
        raise ValueError(f"{wrong('axes that each leaf has')} {advice}")
    axes = tuple(sorted(a % ndim for a in axis))
    if len(set(axes)) < len(axes):
        raise ValueError(wrong("each axis once"))
    return axes


def in_range(data: jax.Array, summed: jax.Array) -> jax.Array:
    """Return the data, with the largest number for a finite sum that overflowed."""
    if jnp.finfo(data.dtype).bits >= 32:
        return data
    largest = jnp.asarray(jnp.finfo(data.dtype).max, data.dtype)
    lost = ~(jnp.abs(data) <= largest) & jnp.isfinite(summed)
    return jnp.where(lost, jnp.where(summed < 0, -largest, largest), data)


def wrapped(
    is_unclipped: jax.Array, original: BCOO, mat: BCOO, data: jax.Array
) -> BCOO:
    """Return the matrix with its data clipped, or the original one if unclipped."""
    pairs = (original.data, data), (original.indices, mat.indices)
    data, indices = (
        jnp.where(is_unclipped, old, _placement.placed_as(new, old))
        for old, new in pairs
    )
    return with_data(original, data, indices=indices)


def axes_in_data(mat: BCOO, axis: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of the data that correspond to these of the dense shape.

    Raises:
      ValueError: The axes are in the indices.
    """
    if len(axis) == mat.ndim:
        return tuple(range(mat.data.ndim))
    if any(a < mat.n_batch + mat.n_sparse for a in axis):
        raise ValueError(
            f"`axis` must name dense axes of a BCOO matrix, got {axis} for the shape"
            f" {mat.shape}, whose first {mat.n_batch + mat.n_sparse} axes are batched"
            " or sparse. Pass a later axis, or make the leaf dense with todense()."
        )
    return tuple(a - mat.n_sparse + 1 for a in axis)


def with_data(mat: BCOO, data: jax.Array, indices: jax.Array | None = None) -> BCOO:
    """Return a matrix like `mat` with other data and, unless None, other indices."""
    return type(mat)(
        (data, mat.indices if indices is None else indices),
        shape=mat.shape,
        indices_sorted=mat.indices_sorted,
        unique_indices=mat.unique_indices,
    )


def _summed(mat: BCOO) -> BCOO:
    """Return `mat` with duplicates summed and padding zeroed; shape and nse unchanged.

    Duplicates are summed, and returned, in float32 or wider. Entries past the end are
    padding, which is not part of the dense gradient.
    """
    if not mat.n_sparse:
        return mat
    if not mat.unique_indices:
        mat = _as_it_varies(_without_duplicates(mat), mat)
    ends = jnp.array(mat.shape[mat.n_batch : mat.n_batch + mat.n_sparse])
    inside = jnp.all(mat.indices < jnp.broadcast_to(ends, mat.indices.shape), axis=-1)
    inside = jnp.expand_dims(inside, range(inside.ndim, mat.data.ndim))
    inside = jnp.broadcast_to(inside, mat.data.shape)
    return with_data(mat, jnp.where(inside, mat.data, jnp.zeros_like(mat.data)))


def _without_duplicates(mat: BCOO) -> BCOO:
    data = _placement.whole(_leaves.widen(mat.data))
    # JAX finds duplicates by sorting, which requires gathered arrays.
    indices = _placement.whole(mat.indices)
    # The index of padding is the size, which a dtype of fewer bits may not hold. As its
    # data is 0, it may wrap to any index afterwards.
    wide = indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices
    out = with_data(mat, data, indices=wide).sum_duplicates(nse=mat.nse)
    return with_data(mat, out.data, indices=out.indices.astype(indices.dtype))


def _as_it_varies(mat: BCOO, like: BCOO) -> BCOO:
    """Return `mat` with the varying axes that JAX's sparse operations drop."""
    pairs = (mat.data, like.data), (mat.indices, like.indices)
    data, indices = (_placement.varying_as(*pair) for pair in pairs)
    return with_data(mat, data, indices=indices)
