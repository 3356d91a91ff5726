"""Define the public function `measure`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._arrays import _axis_names, _leaves, _validate
from .._arrays._types import AxisName, LeafLike
from ._norm import Block, NormLike, as_norm


def measure(
    blocks: Sequence[Block], norm: NormLike = "l2", axis_name: AxisName | None = None
) -> list[jax.Array]:
    """Compute the norm of each block, over all devices that split it.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import norms
      >>> kernel, bias = jnp.array([[3.0, 0.0], [4.0, 1.0]]), jnp.array([2.0])
      >>> columns, all = norms.Block([kernel], (0,)), norms.Block([kernel, bias])
      >>> print(*norms.measure([columns, all], "inf"))
      [[4. 1.]] 4.0

    Args:
      blocks: List of `Block`, one per norm.
      norm: `"l2"` (default), `"l1"`, `"inf"`, `"rms"`, `"average"`, `"spectral"`, an
        order p above 0, or a `Norm` or `Spectral`.
      axis_name: Mapped axes that split all leaves: a name, a tuple of names (`()` for
        none) or a `PartitionSpec`. Default: read from each leaf's type.

    Returns:
      One norm per block, float32, or float64 if any leaf is. Each is a scalar, or with
      `axis` has the shape of the leaf with 1 at these axes. Norms read inf above the
      largest float, 0 below 2**-60 (2**-500 in float64), and NaN if an element is NaN.

    Raises:
      ValueError: A leaf lacks an axis, or `axis_name` is not mapped.
    """
    _check(blocks, axis_name)
    blocks = [_with_axis_name(block, axis_name) for block in blocks]
    return as_norm(norm).measure(blocks).norms.entries()


def _with_axis_name(block: Block, axis_name: AxisName | None) -> Block:
    leaves = [dataclasses.replace(x, axis_name=axis_name) for x in block.leaves]
    return dataclasses.replace(block, leaves=leaves)


def _check(blocks: Sequence[Block], axis_name: AxisName | None) -> None:
    _validate.kind("blocks", blocks, (list, tuple), "a list of optclip.norms.Block")
    _axis_names.check(axis_name, by_leaf=False)
    for i, block in enumerate(blocks):
        _validate.kind(f"`blocks[{i}]`", block, Block, "an optclip.norms.Block")
        for leaf in block.leaves:
            _check_leaf(block, leaf.value)


def _check_leaf(block: Block, leaf: LeafLike) -> None:
    try:
        is_valid = _leaves.is_clippable((), leaf)
    except TypeError:
        is_valid = False
    if not is_valid:
        wanted = "a real or complex floating-point array, number or BCOO matrix"
        raise TypeError(_validate.must_be("A leaf of a block", wanted, leaf))
    if block.axis and max(block.axis) >= jnp.ndim(leaf):
        raise ValueError(
            f"`axis` must name axes that the leaf has, got {block.axis} for the shape"
            f" {jnp.shape(leaf)}. Count axes from 0."
        )
