"""The public function `measure`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optclip._arrays import _axis_names, _leaves, _sparse, _validate
from optclip._arrays._types import AxisName, Leaf
from optclip.norms._block import Block
from optclip.norms._norm_argument import NormLike, as_norm


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
    unwrapped = [
        dataclasses.replace(block, leaves=[_sparse.unwrapped(x) for x in block.leaves])
        for block in blocks
    ]
    measured = as_norm(norm).measure(unwrapped, (), axis_name)
    return measured.norms.entries()


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
