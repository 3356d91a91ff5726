"""Blocks to norms: axes, counts, the dtype of the sum, the mesh axes that it spans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _axis_names, _leaves, _sparse, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName, Leaf
from optclip.norms import _matrices, _roots, _spectral, _totals
from optclip.norms._norm import L2, Block, Norm
from optclip.norms._spectral import NormLike, Spectral, as_norm


def measure(
    blocks: Sequence[Block], norm: NormLike = "l2", axis_name: AxisName | None = None
) -> list[jax.Array]:
    """The norm of each block, over all devices that the block is split over.

    Args:
      blocks: what shares a norm.
      norm: which norm: `"l1"`, `"l2"`, `"inf"`, `"rms"`, `"average"`, an order p above
        0, or a `Norm`.
      axis_name: a name, a tuple of names (`()` for none) or a PartitionSpec: the mapped
        axes that all leaves are split over; None reads them off each array's type.

    Returns:
      One norm a block, float32 (float64 if any leaf is), of shape `()`, or with `axis`
      the leaf's own shape with 1 at the reduced axes; inf above the largest float, 0
      below 2**-60 (2**-500 in float64), NaN if an element is.

    Raises:
      ValueError: a leaf lacks an axis, or `axis_name` is not mapped, or not given where
        it is needed.
    """
    _check(blocks, axis_name)
    return measure_batched(
        [
            dataclasses.replace(
                block, leaves=[_sparse.unwrapped(x) for x in block.leaves]
            )
            for block in blocks
        ],
        as_norm(norm),
        axis_name,
    ).entries()


def measure_batched(
    blocks: Sequence[Block],
    norm: Norm = L2,
    axis_name: AxisName | None = None,
    *,
    guarded: bool = True,
    flushed: bool = True,
) -> Batched:
    """The same, batched; not `guarded`, a norm reads inf if the sum of squares does.

    Not `flushed`, a norm below 2**-60 is not 0 yet: it is to be part of a larger one.
    """
    if isinstance(norm, Spectral):
        leaves = [_leaves.unwrap(x) for block in blocks for x in block.leaves]
        dtype = _accumulator([jnp.asarray(x) for x in leaves])
        norms = with_vectors(
            blocks,
            lambda i: _spectral.spectral_norm(blocks[i], dtype, axis_name),
            axis_name,
        )
        norms = [norm.astype(dtype) for norm in norms]
        found = Batched(norms, tuple(map(declared_across, blocks)))
        return found.map(_roots.large_enough) if flushed else found
    arrays, members, counts = [], [], [0] * len(blocks)
    for i, block in enumerate(blocks):
        for leaf in block.leaves:
            x, shape, own, matrix = _leaves.taken_apart(leaf)
            own, x, axis = axis_name if own is None else own, jnp.asarray(x), block.axis
            if own is None and axis != ():
                _axis_names.check_known()
            split = _axis_names.split_axes_of_slices(x, shape, axis, own)
            if norm.per_count:
                counts[i] += _count(shape, axis, split, is_sparse=matrix is not None)
            if matrix is not None and axis is not None:
                axis = _sparse.axes_in_data(matrix, axis)
            arrays.append(x)
            members.append(_totals.Member(i, axis, split))
    # The norm of single elements is the modulus, whatever its order.
    elements = all(member.axis == () for member in members)
    plan = _totals.Plan(
        ord=math.inf if elements else float(norm.ord),
        dtype=_accumulator(arrays),
        members=tuple(members),
        num_blocks=len(blocks),
        declared=tuple(map(declared_across, blocks)),
        guarded=guarded,
    )
    found = _roots.roots(arrays, plan)
    if norm.per_count:
        divisors = [_leaves.count_as(n, plan.dtype) ** norm.per_count for n in counts]
        divisors = [_typed(n, plan.dtype) for n in divisors]
        found = found.map(lambda root, n: root / n, found.with_entries(divisors))
    return found.map(_roots.large_enough) if flushed else found


def with_vectors(
    blocks: Sequence[Block],
    of_matrix: Callable[[int], jax.Array],
    axis_name: AxisName | None = None,
) -> list[jax.Array]:
    """The norms of vectors, measured together; `of_matrix(i)` for each other block.

    A model has hundreds of vectors, of which matrices of one row take XLA far longer.
    """
    flags = [_matrices.is_vector(block) for block in blocks]
    vectors = [b for b, is_vector in zip(blocks, flags, strict=True) if is_vector]
    batched = measure_batched(vectors, L2, axis_name, flushed=False)
    norms = iter(batched.entries(as_slices=True))
    return [next(norms) if flag else of_matrix(i) for i, flag in enumerate(flags)]


def _typed(number: Any, dtype: str) -> Any:
    return np.dtype(dtype).type(number) if isinstance(number, float) else number


def declared_across(block: Block) -> _axis_names.Declared:
    """Over which mapped axes the norms of a block are split, as far as is declared."""
    if block.axis is None:
        return _axis_names.Declared()
    own = _leaves.axis_name_of(block.leaves[0])
    return _axis_names.Declared(_axis_names.declared_across_slices(block.axis, own))


def _count(
    shape: tuple[int, ...],
    axis: tuple[int, ...] | None,
    split: _axis_names.Axes,
    *,
    is_sparse: bool,
) -> Any:
    """How many elements of one leaf a norm is of, on all devices it is split over."""
    if is_sparse and split:
        raise ValueError(
            "A BCOO leaf must be on one device for a norm with a mean, got one that is"
            f" split over the mesh axes {split}: each device may have entries of one"
            " dense array, or an array of its own. Give a norm without a mean, or dense"
            " leaves."
        )
    here = math.prod(shape if axis is None else [shape[a] for a in axis])
    return here * _axis_names.axes_size(split)


def _check(blocks: Sequence[Block], axis_name: AxisName | None) -> None:
    _validate.kind("blocks", blocks, (list, tuple), "a list of optclip.norms.Block")
    _axis_names.check(axis_name, by_leaf=False)
    for i, block in enumerate(blocks):
        _validate.kind(f"`blocks[{i}]`", block, Block, "an optclip.norms.Block")
        for leaf in block.leaves:
            _check_leaf(block, leaf)


def _check_leaf(block: Block, leaf: Leaf) -> None:
    try:
        is_valid = _leaves.is_clippable((), _leaves.unwrap(leaf))
    except TypeError:
        is_valid = False
    if not is_valid:
        wanted = "a real or complex floating-point array, number or BCOO matrix"
        raise TypeError(_validate.must_be("A leaf of a block", wanted, leaf))
    if block.axis and max(block.axis) >= jnp.ndim(leaf):
        raise ValueError(
            f"`axis` must name axes that the leaf has, got {block.axis} for the shape"
            f" {jnp.shape(leaf)}."
        )


def _accumulator(arrays: Sequence[jax.Array]) -> str:
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in arrays)
    return "float64" if wide else "float32"
