"""Sums and maxima over many arrays, as XLA adds, in few reductions."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _leaves, _maxima, _xla
from optclip._arrays._xla import Axis

# Arrays with fewer elements are merged, up to so many of one type: each reduction takes
# XLA 9 ms to compile, and 2,000 of them 18 s.
_SMALL, _MERGED = 4096, 32

# Values are reduced in rows of so many: added one by one, 4,000 cost 1e-4 of their sum.
_ROW = 64

# XLA for TPU puts at most 256 numbers in one all-reduce. Merging values before they are
# sent makes it one all-reduce for 4,000 leaves instead of 16.
_SENT = 128

Merge = Callable[[jax.Array, jax.Array], jax.Array]
Of = Callable[[jax.Array], jax.Array] | None
Reduce = Callable[..., jax.Array]


class Shrink(NamedTuple):
    """What elements are multiplied by, and 0 to be added.

    A barrier before each use hides both values from XLA, which would otherwise merge
    the factors of a square.
    """

    factor: jax.Array
    zero: jax.Array


class Power(NamedTuple):
    """The power of each element; equal to others of one kind, so traced once."""

    ord: float
    dtype: str

    def __call__(self, x: jax.Array, scale: Shrink | None = None) -> jax.Array:
        # Powers are computed in the dtype of the sum, where squares of float16 fit.
        x = _leaves.widen(x, self.dtype)
        if self.ord != 2:
            return lax.abs(x)
        parts = (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
        if scale is not None:
            # The added zero keeps the product whole: XLA may turn the square of x * c
            # alone into x * x * (c * c), which is inf * 0.
            parts = [part * scale.factor + scale.zero for part in parts]
        squares = [lax.square(part) for part in parts]
        return squares[0] if len(squares) == 1 else squares[0] + squares[1]


class Term(NamedTuple):
    """One array, to be reduced over `axis` after `power(array, scale)`, if it is given.

    Terms of one key may be reduced together; a term whose key is None is alone.
    """

    array: jax.Array
    axis: Axis
    key: Hashable
    power: Power | None
    scale: Shrink | None = None

    def operands(self) -> tuple[jax.Array, Axis, Of]:
        of = self.power and functools.partial(self.power, scale=self.scale)
        return self.array, self.axis, of


def joined(x: jax.Array, axis: Axis) -> jax.Array:
    """Make one axis of reduced axes that are adjacent, and leave 1 for the others.

    XLA on CPU adds along one axis in a tree of sums of 32 elements, and along k axes in
    sums of 32**k: sums lose up to 45 and 7,000 roundings. An array that XLA splits over
    devices stays as it is, or XLA would gather it.
    """
    if _xla.may_be_split(x):
        return x
    if axis is None:
        return lax.reshape(x, (math.prod(x.shape),))
    shape = list(x.shape)
    for i in sorted(axis):
        if i + 1 in axis:
            shape[i], shape[i + 1] = 1, shape[i] * shape[i + 1]
    return lax.reshape(x, shape)


def by_pairs(merge: Merge, values: list[jax.Array], most: int = 1) -> list[jax.Array]:
    """Merge values in pairs until at most `most` are left."""
    while len(values) > most:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [merge(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values


def total(terms: list[Term]) -> list[tuple[int, jax.Array]]:
    """Sum terms, several of one key at once, each with the index of its first."""
    return _reduced(lax.add, sum_over, terms)


def largest(terms: list[Term]) -> list[tuple[int, jax.Array]]:
    """Compute the maxima of terms, 0 of nothing, likewise."""
    return _reduced(lax.max, max_over, terms)


def sum_of(values: list[jax.Array]) -> jax.Array:
    """Sum arrays of one shape, element by element."""
    if _xla.may_be_split(values[0]):
        values = by_pairs(lax.add, values, _SENT)
    return _in_rows(sum_over, values)


def largest_of(values: list[jax.Array]) -> jax.Array:
    """Compute the maximum of arrays of one shape, element by element."""
    return _in_rows(max_over, values)


def sum_over(x: jax.Array, axis: Axis, of: Of = None) -> jax.Array:
    """Sum `of(x)` over `axis`, kept as dimensions of 1; None is all, to a scalar."""
    return jnp.sum(x if of is None else of(x), axis=axis, keepdims=axis is not None)


def max_over(x: jax.Array, axis: Axis, of: Of = None) -> jax.Array:
    """Compute the maximum of `of(x)`, 0 of nothing, likewise."""
    return _maxima.largest(x, axis, 0.0, of)


def _in_rows(reduce: Reduce, values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        rows = [values[i : i + _ROW] for i in range(0, len(values), _ROW)]
        values = [_of_row(reduce, row) for row in rows]
    return values[0]


def _of_row(reduce: Reduce, row: list[jax.Array]) -> jax.Array:
    # Without the barrier XLA unrolls this to one chain over all values and the kernels
    # that compute them, which takes a minute to compile for 2,000.
    return reduce(lax.optimization_barrier(jnp.stack(row)), (0,))[0]


def _reduced(
    merge: Merge, reduce: Reduce, terms: list[Term]
) -> list[tuple[int, jax.Array]]:
    groups = _merged(merge, _groups(terms))
    values = {i: [reduce(*term.operands()) for term in g] for i, g in groups.items()}
    return [(i, _in_rows(reduce, group)) for i, group in values.items()]


def _groups(terms: list[Term]) -> dict[int, list[Term]]:
    """Small terms of one key together, others alone, by the index of the first."""
    groups: dict[Hashable, list[int]] = {}
    for i, term in enumerate(terms):
        is_large = _leaves.size_of(term.array) >= _SMALL
        alone = term.key is None or is_large
        key = i if alone else (term.key, _devices(term.array))
        groups.setdefault(key, []).append(i)
    return {group[0]: [terms[i] for i in group] for group in groups.values()}


def _merged(merge: Merge, groups: dict[int, list[Term]]) -> dict[int, list[Term]]:
    batches = [(i, batch) for i in groups for batch in _batches(groups[i])]
    scales = [batch[0].scale for _, batch in batches]
    if any(scale is not None for scale in scales):
        # The barrier returns one scale per batch. XLA would write out a shared scale as
        # an array as large as the largest leaf.
        scales = lax.optimization_barrier(scales)
    merged: dict[int, list[Term]] = {i: [] for i in groups}
    for (i, batch), scale in zip(batches, scales, strict=True):
        first = batch[0]._replace(scale=scale)
        if len(batch) > 1 and first.power is not None:
            arrays = [term.array for term in batch]
            array = _powers_merged(merge, first.power, arrays, scale)
            first = first._replace(array=array, power=None, scale=None)
        merged[i].append(first)
    return merged


def _batches(terms: list[Term]) -> list[list[Term]]:
    by_type: dict[Hashable, list[Term]] = {}
    for term in terms:
        by_type.setdefault(jax.typeof(term.array), []).append(term)
    return [
        same[start : start + _MERGED]
        for same in by_type.values()
        for start in range(0, len(same), _MERGED)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _powers_merged(
    merge: Merge, power: Power, arrays: list[jax.Array], scale: Shrink | None
) -> jax.Array:
    """Merge powers; compiled, so that batches of one kind are traced once.

    2,000 leaves are traced in .3 s then, not in 1.5.
    """
    return by_pairs(merge, [power(x, scale) for x in arrays])[0]


def _devices(x: jax.Array) -> Hashable:
    """What must be the same in arrays that are reduced together."""
    return _xla.may_be_split(x), _axis_names.varying(jax.typeof(x))
