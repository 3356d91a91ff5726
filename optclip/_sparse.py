"""BCOO leaves, the IndexedSlices of JAX, as the dense gradients they stand for."""

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.experimental.sparse import BCOO

from optclip import _leaves, _placement


def summed(mat: BCOO) -> BCOO:
    """`mat` with duplicate indices summed and padding zeroed; shape and nse unchanged.

    Duplicates are summed, and returned, in float32 or wider. Entries past the end are
    padding: they are part of no dense gradient.
    """
    if not mat.n_sparse:
        return mat
    if has_duplicates(mat):
        mat = _as_it_varies(_without_duplicates(mat), mat)
    ends = jnp.array(mat.shape[mat.n_batch : mat.n_batch + mat.n_sparse])
    inside = jnp.all(mat.indices < jnp.broadcast_to(ends, mat.indices.shape), axis=-1)
    inside = inside.reshape(inside.shape + (1,) * mat.n_dense)
    inside = jnp.broadcast_to(inside, mat.data.shape)
    data = jnp.where(inside, mat.data, jnp.zeros_like(mat.data))
    return with_data(mat, data)


def _without_duplicates(mat: BCOO) -> BCOO:
    data = _placement.whole(_leaves.widen(mat.data))
    # JAX finds duplicates by sorting.
    indices = _placement.whole(mat.indices)
    return with_data(mat, data, indices=indices).sum_duplicates(nse=mat.nse)


def _as_it_varies(mat: BCOO, like: BCOO) -> BCOO:
    """`mat`, of which JAX's sparse operations forgot that devices differ in it."""
    pairs = (mat.data, like.data), (mat.indices, like.indices)
    data, indices = (_placement.varying_as(*pair) for pair in pairs)
    return with_data(mat, data, indices=indices)


def has_duplicates(mat: BCOO) -> bool:
    """Whether one index may be stored twice."""
    return bool(mat.n_sparse) and not mat.unique_indices


def sums_at_entries(mat: BCOO) -> jax.Array:
    """For each stored entry the sum of all entries at its index."""

    def in_one(data: jax.Array, indices: jax.Array) -> jax.Array:
        size = indices.shape[0]
        _, place = jnp.unique(indices, axis=0, size=size, return_inverse=True)
        place = place.reshape(size)
        return jax.ops.segment_sum(data, place, size)[place]

    for _ in range(mat.n_batch):
        in_one = jax.vmap(in_one)
    batch = mat.data.shape[: mat.n_batch]
    shape = batch + mat.indices.shape[mat.n_batch :]
    indices = _placement.whole(jnp.broadcast_to(mat.indices, shape))
    found = in_one(_placement.whole(_leaves.widen(mat.data)), indices)
    return _placement.placed_as(found, mat.data)


def with_data(mat: BCOO, data: jax.Array, indices: jax.Array | None = None) -> BCOO:
    """`data` at `indices` (those of `mat` if None), with the treedef of `mat`."""
    return BCOO(
        (data, mat.indices if indices is None else indices),
        shape=mat.shape,
        indices_sorted=mat.indices_sorted,
        unique_indices=mat.unique_indices,
    )


def unless(off: jax.Array, original: BCOO, mat: BCOO, data: jax.Array) -> BCOO:
    """`data` at the indices of `mat`; where `off`, the original, to the bit."""
    data = _placement.placed_as(data, original.data)
    indices = _placement.placed_as(mat.indices, original.indices)
    indices = jnp.where(off, original.indices, indices)
    return with_data(original, jnp.where(off, original.data, data), indices)


def lies_in_data(mat: BCOO, axis: tuple[int, ...]) -> bool:
    """Whether slices along `axis` of the dense shape are slices of the data itself."""
    return all(a >= mat.n_batch + mat.n_sparse for a in axis)


def open_axes(mat: BCOO, axis: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """An array with the same slices along `axis` as the dense shape, and their axes.

    Batch and sparse axes are found only in the dense array, which is then made.
    """
    if lies_in_data(mat, axis):
        return mat.data, tuple(a - mat.n_sparse + 1 for a in axis)
    return _placement.varying_as(mat.todense(), mat.data), axis


def at_entries(dense: jax.Array, mat: BCOO) -> jax.Array:
    """`dense`, which broadcasts to the dense shape, at the stored entries of `mat`."""
    ones = with_data(mat, jnp.ones(mat.data.shape, dense.dtype))
    full = jnp.broadcast_to(dense, mat.shape)
    # Under vmap jax can take this product only if both are batched.
    full = jnp.where(jnp.any(mat.indices >= 0), full, full)
    found = sparse.bcoo_multiply_dense(ones, full)
    return _placement.varying_as(found, mat.indices)
