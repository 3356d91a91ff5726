"""Sums and maxima over many arrays: few reductions, no bit lost, no large copy.

`_xla` says what is done for CPU alone.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _leaves, _maxima, _xla
from optclip._arrays._xla import Axis, Reduce

# So many small arrays of one type are merged element by element, in pairs, before they
# are reduced; on CPU so many of the results are concatenated. 2,000 reductions take XLA
# 18 s to compile, the few that are left 2 s. Five roundings more, of each sum.
_MERGED, _CONCATENATED = 32, 64

# XLA for TPU puts at most 256 numbers in one all-reduce; of what is added in pairs it
# sends the sums alone: 4,000 leaves in one, not 16, at the cost of five roundings.
_SENT = 128


Merge = Callable[[Any, Any], Any]


class Scale(NamedTuple):
    """What elements are multiplied by, and 0 to be added.

    XLA is not to know either: a barrier comes before each use.
    """

    factor: jax.Array
    zero: jax.Array


class Power(NamedTuple):
    """The power of each element; equal to others of one kind, so traced once."""

    ord: float
    dtype: str

    def __call__(self, x: jax.Array, scale: Scale | None = None) -> jax.Array:
        x = _leaves.widen(x, self.dtype)
        if self.ord != 2:
            return lax.abs(x)
        parts = (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
        if scale is not None:
            # The square of x * c alone XLA may turn into x * x * (c * c), inf * 0.
            parts = [part * scale.factor + scale.zero for part in parts]
        squares = [lax.square(part) for part in parts]
        return squares[0] if len(squares) == 1 else squares[0] + squares[1]


class Term(NamedTuple):
    """One array, to be reduced over `axis` after `power(array, scale)`, if it is given.

    Terms of one key may be reduced together; a term whose key is None is alone.
    """

    array: jax.Array
    key: Hashable
    axis: Axis
    power: Power | None
    scale: Scale | None = None

    def reduced(self, reduce: Reduce) -> jax.Array:
        if self.power is None:
            return reduce(self.array, self.axis)
        if reduce is max_over:
            # A maximum reads the array twice, and on CPU a power of it would be a copy.
            return max_over(self.array, self.axis, self.power)
        return reduce(self.power(self.array, self.scale), self.axis)


def by_pairs(merge: Merge, values: list[Any]) -> Any:
    """All values merged in pairs: thirty-two lose at most five roundings."""
    return merged_to(1, merge, values)[0]


def merged_to(most: int, merge: Merge, values: list[Any]) -> list[Any]:
    while len(values) > most:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [merge(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values


def total(terms: list[Term]) -> list[tuple[int, jax.Array]]:
    """Sums of terms, several of one key at once, each with the index of its first."""
    return _reduced(lax.add, sum_over, exact_sum, terms)


def largest(terms: list[Term]) -> list[tuple[int, jax.Array]]:
    """Maxima of terms, 0 of nothing, likewise."""
    return _reduced(lax.max, max_over, max_over, terms)


def _reduced(
    merge: Merge,
    reduce: Reduce,
    reduce_on_cpu: Reduce,
    terms: list[Term],
) -> list[tuple[int, jax.Array]]:
    def apart(group: list[Term]) -> jax.Array:
        return _folded(reduce, [term.reduced(reduce) for term in group])

    def concatenated(group: list[Term]) -> jax.Array:
        batches = _batches(group, _CONCATENATED, lambda t: (t.array.dtype, t.power))
        return _folded(
            reduce, [_concatenated(batch).reduced(reduce_on_cpu) for batch in batches]
        )

    groups = _merged(merge, _groups(terms))
    delicate = {i: g for i, g in groups.items() if _xla.is_compensated(g[0].array)}
    found = {i: apart(group) for i, group in groups.items() if i not in delicate}
    # Where CPU is no exception, XLA is not to see branches.
    if delicate:
        found |= lax.platform_dependent(
            cpu=lambda: {i: concatenated(group) for i, group in delicate.items()},
            default=lambda: {i: apart(group) for i, group in delicate.items()},
        )
    return list(found.items())


def _groups(terms: list[Term]) -> dict[int, list[Term]]:
    """Small terms of one key together, others alone, by the index of the first."""
    groups: dict[Hashable, list[int]] = {}
    for i, term in enumerate(terms):
        is_large = _leaves.size_of(term.array) >= _xla.ADDED_IN_PARTS
        alone = term.key is None or is_large
        key = i if alone else (term.key, _devices(term.array))
        groups.setdefault(key, []).append(i)
    return {group[0]: [terms[i] for i in group] for group in groups.values()}


def _batches(
    terms: list[Term], size: int, kind: Callable[[Term], Hashable]
) -> list[list[Term]]:
    by_type: dict[Hashable, list[Term]] = {}
    for term in terms:
        by_type.setdefault(kind(term), []).append(term)
    return [
        found[start : start + size]
        for found in by_type.values()
        for start in range(0, len(found), size)
    ]


def _merged(merge: Merge, groups: dict[int, list[Term]]) -> dict[int, list[Term]]:
    batches = [
        (i, batch) for i in groups for batch in _batches(groups[i], _MERGED, _type)
    ]
    scales = [batch[0].scale for _, batch in batches]
    if any(scale is not None for scale in scales):
        # One of its own for each batch: a shared one XLA would write out, as large as
        # the largest array.
        scales = lax.optimization_barrier(scales)
    found: dict[int, list[Term]] = {i: [] for i in groups}
    for (i, batch), scale in zip(batches, scales, strict=True):
        first = batch[0]._replace(scale=scale)
        if len(batch) > 1 and first.power is not None:
            arrays = [term.array for term in batch]
            array = _powers_merged(merge, first.power, arrays, scale)
            first = first._replace(array=array, power=None, scale=None)
        found[i].append(first)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _powers_merged(
    merge: Merge, power: Power, arrays: list[jax.Array], scale: Scale | None
) -> jax.Array:
    """Compiled, so that batches of one kind are traced once.

    2,000 leaves are traced in .3 s then, not in 1.5.
    """
    return by_pairs(merge, [power(x, scale) for x in arrays])


def _concatenated(terms: list[Term]) -> Term:
    return terms[0]._replace(array=_xla.concatenated([term.array for term in terms]))


def _folded(reduce: Reduce, values: list[jax.Array]) -> jax.Array:
    if len(values) == 1:
        return values[0]
    # Without the barrier XLA unrolls this to one chain over all values and what made
    # them, which takes a minute for 2,000.
    return reduce(lax.optimization_barrier(jnp.stack(values)), (0,))[0]


def exact_sum(x: jax.Array, axis: Axis = None) -> jax.Array:
    """The sum over `axis` (all if None), kept as dimensions of 1 where given.

    XLA on CPU adds what has fewer than 4,096 elements one by one, which may cost
    hundreds of units in the last place; there the summation is compensated.
    """
    return (
        _xla.compensated_sum(x, axis) if _xla.is_compensated(x) else sum_over(x, axis)
    )


def exact_sum_of(values: list[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape: folding a thousand plainly costs 4 ULP."""
    if _xla.may_be_split(values[0]):
        values = merged_to(_SENT, lax.add, values)
    return _xla.compensated_sum(jnp.stack(values), axis=(0,))[0]


def plain_sum_of(values: list[jax.Array]) -> jax.Array:
    """The plain sum, for tangents: what is not linear cannot be transposed."""
    return _folded(sum_over, values)


def largest_of(values: list[jax.Array]) -> jax.Array:
    """The maximum, element by element."""
    return _folded(max_over, values)


def sum_over(x: jax.Array, axis: Axis) -> jax.Array:
    """The sum, as XLA adds."""
    return jnp.sum(x, axis=axis, keepdims=axis is not None)


def max_over(x: jax.Array, axis: Axis, power: Power | None = None) -> jax.Array:
    """The maximum of the elements or their powers, 0 of nothing."""
    return _maxima.largest(x, axis, 0.0, power)


def _type(term: Term) -> Hashable:
    return jax.typeof(term.array)


def _devices(x: jax.Array) -> Hashable:
    """What must be the same in arrays that are reduced together."""
    return _xla.may_be_split(x), _axis_names.varying(jax.typeof(x))
