"""Compute sums and maxima of many arrays in few reductions, as accurately as XLA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _leaves, _maxima, _xla
from optclip._arrays._xla import Axis

# Smaller arrays are merged, up to this many of one type, since XLA compiles a reduction
# in 9 ms, and 2,000 of them in 18 s.
_SMALL, _MERGED = 4096, 32

# Values are reduced in rows of this length, since adding 4,000 values one by one has an
# error of 1e-4.
_ROW = 64

# XLA for TPU puts at most 256 numbers in one all-reduce. Merging values before they are
# sent makes it one all-reduce for 4,000 leaves instead of 16.
_SENT = 128

Merge = Callable[[jax.Array, jax.Array], jax.Array]
Of = Callable[[jax.Array], jax.Array] | None
Reduce = Callable[..., jax.Array]


class Shrink(NamedTuple):
    """Hold the factor of shrunk elements, and a zero to add.

    A barrier before each use hides both values from XLA, which would otherwise merge
    the factors of a square.
    """

    factor: jax.Array
    zero: jax.Array


class Power(NamedTuple):
    """Compute the power of each element; equal instances are traced once."""

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
    """Describe an array to reduce over `axis` after `power(array, scale)`, if any.

    Terms with equal keys may be reduced together; a term with the key None is reduced
    alone.
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
    """Merge adjacent reduced axes into one, and leave axes of length 1 in their place.

    XLA on CPU adds along one axis in a tree of sums of 32 elements, and along k axes in
    sums of 32**k, which lose up to 45 and 7,000 roundings. An array that XLA splits
    over devices is unchanged, since XLA would gather it.
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
    """Merge values in pairs until at most `most` remain."""
    while len(values) > most:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [merge(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values


def total(terms: list[Term]) -> list[tuple[int, jax.Array]]:
    """Sum terms, merging terms of one key, and return each sum with its first index."""
    return _reduced(lax.add, sum_over, terms)


def largest(terms: list[Term]) -> list[tuple[int, jax.Array]]:
    """Compute maxima of terms, 0 if empty, merged and indexed as in `total`."""
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
    """Sum `of(x)` over `axis`, kept as dimensions of 1; None sums all, to a scalar."""
    return jnp.sum(x if of is None else of(x), axis=axis, keepdims=axis is not None)


def max_over(x: jax.Array, axis: Axis, of: Of = None) -> jax.Array:
    """Compute the maximum of `of(x)` over `axis`, 0 if empty, in the same way."""
    return _maxima.largest(x, axis, 0.0, of)


def _in_rows(reduce: Reduce, values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        rows = [values[i : i + _ROW] for i in range(0, len(values), _ROW)]
        values = [_of_row(reduce, row) for row in rows]
    return values[0]


def _of_row(reduce: Reduce, row: list[jax.Array]) -> jax.Array:
    # Without the barrier XLA unrolls this into a chain over all values and the kernels
    # that compute them, which takes a minute to compile for 2,000 values.
    return reduce(lax.optimization_barrier(jnp.stack(row)), (0,))[0]


def _reduced(
    merge: Merge, reduce: Reduce, terms: list[Term]
) -> list[tuple[int, jax.Array]]:
    groups = _merged(merge, _groups(terms))
    values = {i: [reduce(*term.operands()) for term in g] for i, g in groups.items()}
    return [(i, _in_rows(reduce, group)) for i, group in values.items()]


def _groups(terms: list[Term]) -> dict[int, list[Term]]:
    """Group small terms of one key, and each other term alone, by the first index."""
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
    """Merge powers; compiled, so that equal batches are traced once.

    This reduces tracing of 2,000 leaves from 1.5 s to 0.3 s.
    """
    return by_pairs(merge, [power(x, scale) for x in arrays])[0]


def _devices(x: jax.Array) -> Hashable:
    """Return properties that arrays must share to be reduced together."""
    return _xla.may_be_split(x), _axis_names.varying(jax.typeof(x))
