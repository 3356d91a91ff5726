"""Blocks to norms: axes, counts, the dtype of the sum, the mesh axes that it spans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _axis_names, _leaves, _sparse
from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName
from optclip.norms import _roots, _totals
from optclip.norms._block import Block, declared_across


def entrywise_norms(
    blocks: Sequence[Block],
    ord: float,
    per_count: float,
    axis_name: AxisName | None = None,
    *,
    guarded: bool = True,
    flushed: bool = True,
) -> Batched:
    """Return the norm of order `ord` of each block over its count to `per_count`.

    Unless `guarded`, a norm reads inf where the sum of its squares overflows. Unless
    `flushed`, a norm below 2**-60 is returned as it is: it will be part of another.
    """
    arrays, members, counts = [], [], [0] * len(blocks)
    for i, block in enumerate(blocks):
        for leaf in block.leaves:
            x, shape, leaf_axes, matrix = _leaves.taken_apart(leaf)
            if leaf_axes is None:
                leaf_axes = axis_name
            x, axis = jnp.asarray(x), block.axis
            if leaf_axes is None and axis != ():
                _axis_names.check_known()
            split = _axis_names.split_axes_of_slices(x, shape, axis, leaf_axes)
            if per_count:
                counts[i] += _count(shape, axis, split, is_sparse=matrix is not None)
            if matrix is not None and axis is not None:
                axis = _sparse.axes_in_data(matrix, axis)
            arrays.append(x)
            members.append(_totals.Member(i, axis, split))
    # The norm of single elements is the modulus, whatever its order.
    elements = all(member.axis == () for member in members)
    plan = _totals.NormPlan(
        ord=math.inf if elements else ord,
        dtype=accumulator(arrays),
        members=tuple(members),
        num_blocks=len(blocks),
        declared=tuple(map(declared_across, blocks)),
        guarded=guarded,
    )
    norms = _roots.roots(arrays, plan)
    if per_count:
        divisors = [_leaves.count_as(n, plan.dtype) ** per_count for n in counts]
        divisors = [_typed(n, plan.dtype) for n in divisors]
        norms = norms.map(lambda root, n: root / n, norms.with_entries(divisors))
    return norms.map(_roots.flush_small) if flushed else norms


def _typed(number: float | jax.Array, dtype: str) -> float | np.generic | jax.Array:
    """Return a Python number as a NumPy number, which has no weak type."""
    return np.dtype(dtype).type(number) if isinstance(number, float) else number


def _count(
    shape: tuple[int, ...],
    axis: tuple[int, ...] | None,
    split: _axis_names.Axes,
    *,
    is_sparse: bool,
) -> Any:
    """Count the elements of one leaf in a norm, on all devices of its split.

    The count is an int, or under `jax.export` a symbol, whose type is not public.
    """
    if is_sparse and split:
        raise ValueError(
            "A BCOO leaf must be on one device for a norm with a mean, got one that is"
            f" split over the mesh axes {split}: each device may have entries of one"
            " dense array, or an array of its own. Give a norm without a mean, or dense"
            " leaves."
        )
    here = math.prod(shape if axis is None else [shape[a] for a in axis])
    return here * _axis_names.axes_size(split)


def accumulator(arrays: Sequence[jax.Array]) -> str:
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in arrays)
    return "float64" if wide else "float32"
