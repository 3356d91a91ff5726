"""Compute entrywise norms of blocks, with their axes, counts, dtypes and mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _axis_names, _leaves, _sparse, _validate
from optclip._arrays._types import AxisName
from optclip.norms import _roots, _totals
from optclip.norms._block import Block, declared_across
from optclip.norms._norm_protocol import Measured, Measurement


@dataclasses.dataclass(frozen=True)
class Norm(Measurement):
    """Compute an entrywise norm: `sum(abs(x) ** p) ** (1 / p) / n ** k`.

    Here n is the number of elements. Names and orders are also accepted as norms:
    `"l1"`, `"l2"`, `"inf"`, `"rms"` (`Norm(2.0, 0.5)`), `"average"` (`Norm(2.0, 1.0)`),
    or a number p.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> tx = optclip.clip_by(1.0, norm=optclip.norms.Norm(3.0))
      >>> updates = jnp.array([3.0, 4.0, 5.0])
      >>> _, state = tx.update(updates, tx.init(updates))
      >>> print(optclip.metrics(state)["clip/norm"])
      6.0

    Args:
      ord: Order p, a Python number above 0, or inf for the largest modulus. Orders
        below 0.5 soon overflow to inf. Default: 2.
      per_count: Exponent k, from 0 to 1; with p = 2, 0.5 is the root mean square and 1
        TensorFlow's average norm. Default: 0.
    """

    ord: float = 2.0
    per_count: float = 0.0

    is_entrywise = True

    def __post_init__(self) -> None:
        wanted = "a Python number above 0, or inf for the largest absolute value"
        if isinstance(self.ord, bool) or not isinstance(self.ord, (int, float)):
            advice = f"None means 2. {_validate.static('ord', self.ord)}"
            if isinstance(self.ord, str):
                advice = "Pass a number, such as 2.0 or float('inf')."
            raise TypeError(_validate.must_be("ord", wanted, self.ord, advice))
        if not self.ord > 0 or _validate.is_beyond_floats(self.ord):
            raise ValueError(_validate.must_be("ord", wanted, self.ord))
        _validate.fraction("per_count", self.per_count)

    @property
    def is_a_mean(self) -> bool:
        """Return whether the norm is divided by a power of the number of elements."""
        return self.per_count > 0

    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        axis_name: AxisName | None = None,
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the norm of each block."""
        del memory
        arrays, members, counts = [], [], [0] * len(blocks)
        for i, block in enumerate(blocks):
            for leaf in block.leaves:
                x, shape, leaf_axes, matrix = _leaves.taken_apart(leaf)
                is_sparse = matrix is not None
                if leaf_axes is None:
                    leaf_axes = axis_name
                x, axis = jnp.asarray(x), block.axis
                if leaf_axes is None and axis != ():
                    _axis_names.check_known()
                split = _axis_names.split_axes_of_slices(x, shape, axis, leaf_axes)
                if self.per_count:
                    counts[i] += _count(shape, axis, split, is_sparse=is_sparse)
                if is_sparse and axis is not None:
                    axis = _sparse.axes_in_data(matrix, axis)
                arrays.append(x)
                members.append(_totals.Member(i, axis, split))
        # The norm of single elements is the modulus, for any order.
        are_elements = all(member.axis == () for member in members)
        plan = _totals.NormPlan(
            ord=math.inf if are_elements else float(self.ord),
            dtype=accumulator(arrays),
            members=tuple(members),
            num_blocks=len(blocks),
            declared=tuple(map(declared_across, blocks)),
            guarded=guarded,
        )
        norms = _roots.roots(arrays, plan)
        if self.per_count:
            divisors = [self._divisor(n, plan.dtype) for n in counts]
            norms = norms.map(lambda root, n: root / n, norms.with_entries(divisors))
        return Measured(norms.map(_roots.flush_small) if flushed else norms)

    def _divisor(self, count: Any, dtype: str) -> np.generic | jax.Array:
        """Return a power of `_count`, as a NumPy number, which has no weak type."""
        power = _leaves.count_as(count, dtype) ** self.per_count
        return np.dtype(dtype).type(power) if isinstance(power, float) else power


L1: Norm = Norm(1.0)
L2: Norm = Norm(2.0)
INF: Norm = Norm(math.inf)
RMS: Norm = Norm(2.0, per_count=0.5)
AVERAGE: Norm = Norm(2.0, per_count=1.0)


def of_order(ord: float | None) -> Norm:
    """Return the norm of an `ord=` argument; None means 2."""
    return L2 if ord is None else Norm(ord)


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
            "A BCOO leaf must be on one device for a norm with a mean, such as 'rms',"
            f" got one that is split over the mesh axes {split}, whose number of"
            " elements is unknown. Pass a norm without a mean, or dense leaves."
        )
    here = math.prod(shape if axis is None else [shape[a] for a in axis])
    return here * _axis_names.axes_size(split)


def accumulator(arrays: Sequence[jax.Array]) -> str:
    """Return the dtype in which elements of these arrays are added."""
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in arrays)
    return "float64" if wide else "float32"
