"""MEASURE: one norm that is right for every dtype and split of the leaves.

A norm is entrywise, taken over a *block*: all the elements that share it. Sums are
kept in float32 or wider. How it is fast: every element is read once, on CPU again only
if a sum of squares overflowed (`_roots`); blocks are measured at once (`_totals`);
small arrays are reduced together, if of one block into one (`_sums`), if each a block
as rows (`_alike`). What follows a norm is computed for all blocks at once (`_rows`); a
leaf is multiplied once (`_scale`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip import _leaves, _mapped, _roots, _sparse, _totals, _validate
from optclip._rows import Rows
from optclip._types import AxisName


@dataclasses.dataclass(frozen=True)
class Norm:
    r"""An entrywise norm, :math:`(\sum_i |x_i|^p)^{1/p} / n^k` over n elements.

    Use the constants `L1`, `L2`, `INF`, `RMS`, `AVERAGE`, or `Norm(p)` for another p.

    Args:
      ord: p, a Python number above 0, or inf for the largest modulus. Below 0.5
        norms grow as a high power of n and soon read inf.
      per_count: k; 0.5 makes an L2 norm the root mean square, 1 makes it TensorFlow's
        average norm. What is divided reads inf above the largest float.

    Raises:
      TypeError: `ord` or `per_count` is no Python number.
      ValueError: `ord` is not above 0, or `per_count` is not from 0 to 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> cube = optclip.norms.Norm(3.0)
      >>> tx = optclip.clip_by(1.0, norm=cube)
      >>> updates = jnp.array([3.0, 4.0, 5.0])
      >>> _, state = tx.update(updates, tx.init(updates))
      >>> print(optclip.metrics(state)["clip/norm"])
      6.0
    """

    ord: float = 2.0
    per_count: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.ord, bool) or not isinstance(self.ord, (int, float)):
            raise TypeError(
                f"ord={self.ord!r} ({type(self.ord).__name__}) is no Python number."
                " Give a number above 0, float('inf') or None (2). Under"
                " optax.inject_hyperparams, name it in static_args=('ord',)."
            )
        if not self.ord > 0:
            raise ValueError(
                f"ord={self.ord} is not above 0. Give p > 0, or float('inf') for the"
                " largest absolute value."
            )
        if self.ord != math.inf:
            _validate.plain("ord", self.ord)
        _validate.plain("per_count", self.per_count)
        if self.per_count > 1:
            raise ValueError(
                f"per_count={self.per_count} is out of range. Give a finite number of 0"
                " or more, at most 1: 0.5 for a root mean square of order 2, 1 for a"
                " mean."
            )


__all__ = ["AVERAGE", "INF", "L1", "L2", "RMS", "Block", "Norm", "measure"]

L1: Norm = Norm(1.0)
L2: Norm = Norm(2.0)
INF: Norm = Norm(math.inf)
RMS: Norm = Norm(2.0, per_count=0.5)
AVERAGE: Norm = Norm(2.0, per_count=1.0)


def of_order(ord: float | None) -> Norm:
    """The norm that an `ord=` argument names; None is 2."""
    return L2 if ord is None else Norm(ord)


@dataclasses.dataclass(frozen=True)
class Block:
    """The leaves, or with `axis` the slices of one leaf, that share a norm.

    Args:
      leaves: arrays or BCOO matrices.
      axis: None for one norm over all elements of all leaves; else the axes that each
        norm of the single leaf is taken over, counted from 0 (`()`: each element).
    """

    leaves: Sequence[Any]
    axis: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.leaves, (list, tuple)):
            raise TypeError(
                f"leaves={self.leaves!r} ({type(self.leaves).__name__}) is no list."
                " Give a list of arrays; one leaf goes in a list too."
            )
        if self.axis is None:
            return
        sound = isinstance(self.axis, tuple) and len(self.leaves) == 1
        if not sound or not all(type(a) is int and a >= 0 for a in self.axis):
            raise TypeError(
                f"axis={self.axis!r} for {len(self.leaves)} leaves is not accepted."
                " Give a tuple of ints counted from 0 and a single leaf, or None."
            )


def measure(
    blocks: Sequence[Block], norm: Norm = L2, axis_name: AxisName | None = None
) -> list[jax.Array]:
    """The norm of each block, over all devices that the block is split over.

    Args:
      blocks: what shares a norm.
      norm: which norm.
      axis_name: a name, a tuple of names (`()` for none) or a PartitionSpec: the mapped
        axes that all leaves are split over; None reads them off each array's type.

    Returns:
      One norm a block, float32 (float64 if any leaf is), of shape `()`, or with `axis`
      the leaf's own shape with 1 at the reduced axes; inf above the largest float, 0
      below 2**-60 (2**-500 in float64), NaN if an element is.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a leaf lacks an axis, or `axis_name` is not mapped, or not given where
        it is needed.
    """
    _check(blocks, norm, axis_name)
    return measure_rows(
        [
            dataclasses.replace(block, leaves=[_sparse.opened(x) for x in block.leaves])
            for block in blocks
        ],
        norm,
        axis_name,
    ).entries()


def measure_rows(
    blocks: Sequence[Block],
    norm: Norm = L2,
    axis_name: AxisName | None = None,
    *,
    guarded: bool = True,
) -> Rows:
    """The same as rows; not `guarded`, a norm reads inf if the sum of squares does."""
    arrays, parts, counts = [], [], [0] * len(blocks)
    if axis_name is None and any(map(_is_untold, blocks)):
        _mapped.check_known()
    for i, block in enumerate(blocks):
        for held in block.leaves:
            own, matrix = _leaves.axis_name_of(held), _leaves.matrix_of(held)
            x, axis = jnp.asarray(_leaves.unwrap(held)), block.axis
            if matrix is not None and axis is not None:
                axis = _sparse.axes_in_data(matrix, axis)
            count = _count(_leaves.shape_of(held), block.axis)
            own = axis_name if own is None else own
            split = _mapped.split_axes_of_slices(
                x, _leaves.shape_of(held), block.axis, own
            )
            if norm.per_count and split and matrix is not None:
                _refuse_to_count(split)
            arrays.append(x)
            parts.append(_totals.Part(i, axis, split))
            counts[i] += count * _mapped.axes_size(split)
    # The norm of single elements is the modulus, whatever its order.
    elements = all(part.axis == () for part in parts)
    plan = _totals.Plan(
        ord=math.inf if elements else float(norm.ord),
        dtype=_accumulator(arrays),
        parts=tuple(parts),
        num_blocks=len(blocks),
        told=tuple(map(told_across, blocks)),
        guarded=guarded,
    )
    found = _roots.roots(arrays, plan)
    if not norm.per_count:
        return found.map(_roots.large_enough)
    divisors = [_leaves.count_as(n, plan.dtype) ** norm.per_count for n in counts]
    divisors = [_typed(n, plan.dtype) for n in divisors]
    found = found.map(lambda root, n: root / n, found.with_entries(divisors))
    return found.map(_roots.large_enough)


def _typed(number: Any, dtype: str) -> Any:
    return np.dtype(dtype).type(number) if isinstance(number, float) else number


def told_across(block: Block) -> _mapped.Told:
    """Over which mapped axes the norms of a block are split, as far as is told."""
    if block.axis is None:
        return _mapped.Told()
    own = _leaves.axis_name_of(block.leaves[0])
    return _mapped.Told(_mapped.told_across_slices(block.axis, own))


def _refuse_to_count(split: tuple[Any, ...]) -> None:
    raise ValueError(
        f"How many elements a BCOO leaf has that is split over the mesh axes {split} is"
        " not known: each device may have entries of one dense array, or an array of"
        " its own. Give a norm without a mean, or dense leaves."
    )


def _check(blocks: Any, norm: Any, axis_name: Any) -> None:
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(
            f"blocks={blocks!r} ({type(blocks).__name__}) is no list. Give a list of"
            " optclip.norms.Block."
        )
    if not isinstance(norm, Norm):
        raise TypeError(
            f"norm={norm!r} ({type(norm).__name__}) is no norm. Give optclip.norms.L1,"
            " L2, INF, RMS, AVERAGE or Norm(p)."
        )
    _mapped.check(axis_name, by_leaf=False)
    for block in blocks:
        if not isinstance(block, Block):
            raise TypeError(
                f"blocks holds {block!r} ({type(block).__name__}). Give a list of"
                " optclip.norms.Block."
            )
        for leaf in block.leaves:
            _check_leaf(block, leaf)


def _check_leaf(block: Block, leaf: Any) -> None:
    try:
        sound = _leaves.is_clippable((), _leaves.unwrap(leaf))
    except TypeError:
        sound = False
    if not sound:
        raise TypeError(
            f"A block holds {leaf!r} ({type(leaf).__name__}). Give real or complex"
            " floating-point arrays, numbers or BCOO matrices."
        )
    if block.axis and max(block.axis) >= jnp.ndim(leaf):
        raise ValueError(
            f"axis={block.axis} is out of range for a leaf of shape {jnp.shape(leaf)}."
            " Give axes that it has."
        )


def _is_untold(block: Block) -> bool:
    """Whether a norm of this spans devices as the types of its leaves say."""
    told = [_leaves.axis_name_of(x) is not None for x in block.leaves]
    return block.axis != () and not all(told)


def _count(shape: tuple[int, ...], axis: tuple[int, ...] | None) -> int:
    return math.prod(shape if axis is None else [shape[a] for a in axis])


def _accumulator(arrays: Sequence[jax.Array]) -> str:
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in arrays)
    return "float64" if wide else "float32"
