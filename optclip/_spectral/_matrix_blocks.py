"""Arrange slices over two or more axes as matrices, and compute their spectra.

The smaller side of a matrix comes first, so that its Gram matrix is the smaller one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._arrays import _axis_names, _collectives, _leaves, _placement
from .._arrays._numerics import root
from .._arrays._types import AxisName
from .._norms import L2, Block
from ._matrix_algebra import eigenvalues, eigh, gram

# The exponent is bounded, so that the unit and its square are in the range of float32.
_LEAST_EXPONENT = -100


# The axes of the rows and of the columns of a matrix; one side for a vector.
Sides = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlattenedBlock(Block):
    """Group the slices of one leaf over several axes, each flattened to a matrix."""

    sides: Sides


class MatrixBlock(NamedTuple):
    """Hold the slices of one leaf as matrices.

    Attributes:
      x: `(..., p, q)`, in float32 or wider, divided by `unit`; zeros for a matrix with
        a non-finite element.
      unit: `(..., 1, 1)`, a power of two such that elements are at most 2.
      size: `(..., 1, 1)`, the largest modulus; NaN or inf if an element is.
      split: Mapped axes that split the columns.
      sides: The axes of the leaf, rows first.
    """

    x: jax.Array
    unit: jax.Array
    size: jax.Array
    split: _axis_names.Axes
    sides: Sides


def matrices_of(block: Block, dtype: DTypeLike | None = None) -> MatrixBlock:
    """Return the matrices of a block of one leaf, in `dtype` or the dtype of its norm.

    Raises:
      ValueError: The block has several leaves, or slices over more than two axes that
        are not flattened; a leaf is a BCOO matrix; or both sides of a matrix are split
        over mapped axes.
    """
    if len(block.leaves) != 1 or block.stacked is not None:
        of = "stacked layers" if block.stacked is not None else "leaves"
        raise ValueError(
            "A spectral norm requires one matrix per block, got a block of"
            f" {len(block.leaves)} {of}. Pass over=optclip.matrices(), or 'leaf' if"
            " no leaf has more than two axes."
        )
    (leaf,) = block.leaves
    shape, declared = leaf.shape, leaf.axis_name
    sides = _sides_of(block)
    if leaf.matrix is not None:
        raise ValueError(
            "Singular values require a dense leaf, got a BCOO matrix of shape"
            f" {shape}. Convert it with todense(), or exclude it with mask=."
        )
    if len(sides) > 2:
        raise ValueError(
            f"A matrix must have two axes, got {len(sides)} for a leaf of shape"
            f" {shape}. Pass over=optclip.matrices(), which batches over the others, or"
            " matrices((..., -1)), which flattens all but the last."
        )
    x = _leaves.widen(jnp.asarray(leaf.array), dtype)
    sides, split = _smaller_first(x, shape, sides, declared)
    return _scaled(as_matrices(x, sides), split, sides)


def _sides_of(block: Block) -> Sides:
    if isinstance(block, FlattenedBlock):
        return block.sides
    axis = range(block.leaves[0].ndim) if block.axis is None else block.axis
    return tuple((a,) for a in axis)


def _smaller_first(
    x: jax.Array,
    shape: tuple[int, ...],
    sides: Sides,
    declared: AxisName | None,
) -> tuple[Sides, _axis_names.Axes]:
    """Return the sides, the larger one last, and the mapped axes that split it."""

    def split_of(axis: tuple[int, ...]) -> _axis_names.Axes:
        return _axis_names.split_axes_of_slices(x, shape, axis, declared)

    axis = sum(sides, ())
    if len(sides) < 2:
        return sides, split_of(axis)
    if _are_descending([math.prod(shape[a] for a in side) for side in sides], shape):
        sides = sides[::-1]
    if not split_of(axis):
        return sides, ()
    by_side = [*map(split_of, sides)]
    if all(by_side):
        raise ValueError(
            "Inside shard_map a matrix can be split along one side only, got both"
            f" sides of shape {shape} split over the mesh axes {by_side[0]} and"
            f" {by_side[1]}. Clip it under jit, or gather one side first."
        )
    # Products along the split side are added over devices; the other side is whole.
    return (sides, by_side[1]) if by_side[1] else (sides[::-1], by_side[0])


def _are_descending(lengths: list[int], shape: tuple[int, ...]) -> bool:
    """Return whether the first side of a matrix is longer.

    Raises:
      ValueError: The smaller side is symbolic, as under `jax.export`.
    """
    try:
        is_static = isinstance(min(lengths), int)
    except Exception:
        # Comparing symbols may raise; JAX 0.8.3 has no public name for the error.
        is_static = False
    if not is_static:
        raise ValueError(
            "The smaller side of a matrix must be static under jax.export, got the"
            f" shape {shape}. Export it with a static size, or bound the symbol of the"
            " larger side, as in jax.export.symbolic_shape('b', constraints=['b >="
            " 100'])."
        )
    return lengths[0] > lengths[1]


def with_vectors(
    blocks: Sequence[Block],
    of_matrix: Callable[[int], jax.Array],
) -> list[jax.Array]:
    """Return the norms of all blocks: vectors together, others by `of_matrix(i)`.

    Models have hundreds of vectors, and XLA is much slower on matrices of one row.
    """
    # Each of these is one dense leaf whose singular value is its L2 norm.
    flags = [
        len(b.leaves) == 1
        and b.stacked is None
        and b.leaves[0].matrix is None
        and len(_sides_of(b)) < 2
        for b in blocks
    ]
    vectors = [b for b, is_vector in zip(blocks, flags, strict=True) if is_vector]
    norms = iter(L2.measure(vectors, flushed=False).norms.entries(as_slices=True))
    return [next(norms) if flag else of_matrix(i) for i, flag in enumerate(flags)]


def as_matrices(x: jax.Array, sides: Sides) -> jax.Array:
    """Return an array as `(..., p, q)`; a vector is one row, a number one element."""
    axis = sum(sides, ())
    last = jnp.moveaxis(x, axis, tuple(range(-len(axis), 0))) if axis else x[..., None]
    if len(sides) < 2:
        return last[..., None, :]
    if len(axis) == 2:
        return last
    # On Explicit axes only some reshapes of a split array are defined.
    lengths = [math.prod(x.shape[a] for a in side) for side in sides]
    return _placement.whole(last).reshape(*last.shape[: -len(axis)], *lengths)


def from_matrices(x: jax.Array, sides: Sides, like: jax.Array) -> jax.Array:
    """Return matrices `(..., p, q)` of both `sides` in the shape of the leaf `like`."""
    axis = sum(sides, ())
    lengths = [like.shape[a] for a in axis]
    last = x if len(axis) == 2 else x.reshape(*x.shape[:-2], *lengths)
    return _placement.placed_as(
        jnp.moveaxis(last, tuple(range(-len(axis), 0)), axis), like
    )


def _scaled(x: jax.Array, split: _axis_names.Axes, sides: Sides) -> MatrixBlock:
    # The gradient is stopped, since the unit cancels in every result.
    size = _collectives.largest(lax.stop_gradient(x), (-2, -1), 0.0, jnp.abs)
    size = _collectives.reduced_over(_collectives.over_devices, size, split)
    finite = jnp.isfinite(size)
    # A matrix with NaN or inf has the unit 1.
    _, exponent = jnp.frexp(jnp.where(finite, size, jnp.ones_like(size)))
    # XLA divides by multiplying with the inverse, which must not be subnormal.
    exponent = jnp.clip(exponent - 1, _LEAST_EXPONENT, jnp.finfo(size.dtype).maxexp - 3)
    unit = jnp.ldexp(jnp.ones_like(size), exponent)
    # Zeros replace such a matrix, so that its decomposition is finite; `size` holds the
    # NaN or inf.
    scaled = jnp.where(finite, x, jnp.zeros_like(x)) / unit.astype(x.dtype)
    return MatrixBlock(scaled, unit, size, split, sides)


class Factored(NamedTuple):
    """Hold matrices with the eigenvalues and eigenvectors of their Gram matrices.

    The latter are None for matrices of at most one row, and if the method does not use
    them.
    """

    matrices: MatrixBlock
    squares: jax.Array | None
    vectors: jax.Array | None


def factored(matrices: MatrixBlock) -> Factored:
    """Decompose matrices."""
    if matrices.x.shape[-2] <= 1:
        return Factored(matrices, None, None)
    return Factored(matrices, *eigh(gram(matrices.x, matrices.split)))


def singular_values(
    matrices: MatrixBlock, squares: jax.Array | None = None
) -> jax.Array:
    """Return the singular values, `(..., k)` in ascending order.

    Args:
      matrices: The matrices; one without elements has a norm of 0.
      squares: The eigenvalues of their Gram matrices, if these are decomposed.
    """
    x, split = matrices.x, matrices.split
    if not x.shape[-2]:
        return jnp.zeros_like(matrices.size[..., 0])
    if squares is None:
        squared = gram(x, split)
        is_row = x.shape[-2] == 1
        squares = jnp.real(squared)[..., 0] if is_row else eigenvalues(squared)
    # There are as many as the smaller side of a matrix has, which is the last one if it
    # is split over devices.
    count = min(x.shape[-2], x.shape[-1] * _axis_names.axes_size(split))
    nonnegative = jnp.maximum(squares, jnp.zeros_like(squares))[..., -count:]
    return in_units(matrices, root(nonnegative))


def in_units(matrices: MatrixBlock, norms: jax.Array) -> jax.Array:
    """Return norms of `x`, `(..., k)`, for the leaf; NaN or inf if `size` is."""
    size = matrices.size[..., 0]
    scaled = norms * matrices.unit[..., 0]
    return jnp.where(jnp.isfinite(size), scaled, jnp.broadcast_to(size, scaled.shape))
