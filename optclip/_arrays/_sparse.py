"""Unwrap BCOO leaves, the IndexedSlices of JAX, for clipping, and wrap them again.

In between such a leaf is the array of its data, duplicates summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from . import _leaves, _placement

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


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
    data = _placement.placed_as(data, original.data)
    indices = _placement.placed_as(mat.indices, original.indices)
    indices = jnp.where(is_unclipped, original.indices, indices)
    data = jnp.where(is_unclipped, original.data, data)
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


def summed(mat: BCOO) -> BCOO:
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
    inside = inside.reshape(inside.shape + (1,) * mat.n_dense)
    inside = jnp.broadcast_to(inside, mat.data.shape)
    data = jnp.where(inside, mat.data, jnp.zeros_like(mat.data))
    return with_data(mat, data)


def _without_duplicates(mat: BCOO) -> BCOO:
    data = _placement.whole(_leaves.widen(mat.data))
    # JAX finds duplicates by sorting, which requires gathered arrays.
    indices = _placement.whole(mat.indices)
    if indices.dtype.itemsize >= 4:
        return with_data(mat, data, indices=indices).sum_duplicates(nse=mat.nse)
    # The index of padding is the size, which a dtype of fewer bits may not hold. As its
    # data is 0, it may wrap to any index afterwards.
    wide = with_data(mat, data, indices=indices.astype(jnp.int32))
    out = wide.sum_duplicates(nse=mat.nse)
    return with_data(mat, out.data, indices=out.indices.astype(indices.dtype))


def _as_it_varies(mat: BCOO, like: BCOO) -> BCOO:
    """Return `mat` with the varying axes that JAX's sparse operations drop."""
    pairs = (mat.data, like.data), (mat.indices, like.indices)
    data, indices = (_placement.varying_as(*pair) for pair in pairs)
    return with_data(mat, data, indices=indices)
