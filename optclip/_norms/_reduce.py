"""Reduce arrays to the norm of each block: few reductions, in range, differentiable.

`norms_of` adds powers (`_totals`), takes roots of them, and guards against overflow.
`_combined` merges the values of a block, here and over devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _collectives, _leaves, _maxima, _numerics, _xla
from .._arrays._batching import Batched
from .._arrays._numerics import select
from . import _sums_on_gpu
from ._powers import (
    SHRINK,
    SMALL,
    Member,
    NormPlan,
    Power,
    Shrink,
    Stack,
    batches_of,
    by_pairs,
    merged,
    shrinks,
    stacks_of,
)

# Smaller norms count as 0, since squares of their elements are flushed to zero.
LEAST = {"float32": 2.0**-60, "float64": 2.0**-500}

# Values are reduced in rows of this length, since adding 4,000 values one by one has an
# error of 1e-4.
_ROW = 64

# XLA for TPU puts at most 256 numbers in one all-reduce. Merging values before they are
# sent makes it one all-reduce for 4,000 leaves instead of 16.
_SENT = 128


def flush_small(norm: jax.Array) -> jax.Array:
    """Return the norm, or 0 if it is smaller than `LEAST`."""
    least = LEAST[norm.dtype.name]
    return select(norm < least, jnp.zeros_like(norm), norm)


# The derivative of JAX is not finite at zero, and would differentiate both branches of
# the guard.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def norms_of(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return the norm of each block; inf above the largest float."""
    return _compiled(arrays, plan)


@functools.partial(jax.jit, static_argnums=1)
def _compiled(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    # The function is compiled, since each call outside of jax.jit would compile the
    # branches again.
    if plan.ord not in (1, 2, math.inf):
        return _by_largest(_joined(arrays, plan), plan)
    if plan.ord == 1:
        return _xla.on_gpu(
            lambda arrays: _totals_on_gpu(arrays, plan, guarded=False)[0],
            lambda arrays: _totals(arrays, plan, stacks_of(arrays, plan)),
            _joined(arrays, plan),
        )
    if plan.ord != 2:
        arrays = _joined(arrays, plan)
        return _totals(arrays, plan, stacks_of(arrays, plan))
    return _by_squares(_joined(arrays, plan), plan)


@norms_of.defjvp
def _norms_of_jvp(
    plan: NormPlan,
    primals: tuple[list[jax.Array]],
    tangents: tuple[list[jax.Array]],
) -> tuple[Batched, Batched]:
    (arrays,), (tangent_arrays,) = primals, tangents
    norms = norms_of(arrays, plan)
    entries = norms.entries()
    slopes, ties = [], []
    for x, dx, member in zip(arrays, tangent_arrays, plan.members, strict=True):
        x, dx = (_leaves.widen(each, plan.dtype) for each in (x, dx))
        norm = member.of_array(entries[member.block], x)
        direction, is_tie = _direction(x, norm, plan.ord)
        slopes.append(_sum(jnp.real(jnp.conj(direction) * dx), member.axis))
        ties.append(_sum(is_tie, member.axis))
    slope = _combined(slopes, plan.members, plan)
    if plan.ord == math.inf:
        count = _combined(ties, plan.members, plan)
        slope = [s / jnp.maximum(c, 1) for s, c in zip(slope, count, strict=True)]
    return norms, norms.with_entries(slope)


def _direction(
    x: jax.Array, norm: jax.Array, ord: float
) -> tuple[jax.Array, jax.Array]:
    """Return the conjugate derivative of the norm, and flags of the largest elements.

    With respect to a leaf of zeros both are zero.
    """
    size = jnp.abs(x)
    moving = (norm > 0) & jnp.isfinite(norm)
    live = (size > 0) & moving
    # The divisor is 1 for a zero or non-finite norm, so that the derivatives of the
    # quotient stay finite. The selects below set the direction to 0.
    norm = jnp.where(moving, norm, jnp.ones_like(norm))
    if ord == 2:
        # Zeros are included: there too the second derivative is 1 / norm.
        direction = jnp.where(moving, _numerics.divided_by(x, norm), jnp.zeros_like(x))
        return direction, jnp.zeros_like(size)
    modulus = jnp.where(live, size, jnp.ones_like(size))
    sign = jnp.where(live, _numerics.divided_by(x, modulus), jnp.zeros_like(x))
    if ord == 1:
        return sign, jnp.zeros_like(size)
    if ord == math.inf:
        # Elements that share the maximum share its derivative; the flags are counted.
        tie = (live & (size == norm)).astype(size.dtype)
        return sign * tie.astype(sign.dtype), tie
    # A zero to a negative power would be infinite; it is replaced before the power.
    fraction = jnp.where(live, _numerics.ratio(size, norm), jnp.ones_like(size))
    return sign * (fraction ** (ord - 1)).astype(sign.dtype), jnp.zeros_like(size)


def _by_squares(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return L2 norms, guarded against overflow.

    If a sum of squares overflows, the norm is computed from shrunk elements.
    Accelerators always compute both sums, since they read the elements once for both,
    and a branch would make them wait for the host. A CPU would read them twice, so it
    computes the second sum only if the first is inf.
    """
    guarded = plan.guarded and any(_may_overflow(x, plan) for x in arrays)

    def elsewhere(arrays: list[jax.Array]) -> Batched:
        stacks = stacks_of(arrays, plan)
        totals = _totals(arrays, plan, stacks)
        if not guarded:
            return totals.map(_root)
        is_over = totals.map(lambda total: total == jnp.inf)

        def shrunk(small: float = SMALL) -> Batched:
            return _totals(arrays, plan, stacks, shrunk=True, small=small)

        def shrunk_if_needed() -> Batched:
            # A branch that hardly ever runs may add large arrays too, which halves it.
            merging = functools.partial(shrunk, math.inf)
            return lax.cond(_agreed(is_over.any(), plan), merging, lambda: totals)

        small = lax.platform_dependent(cpu=shrunk_if_needed, default=shrunk)
        return totals.map(functools.partial(_guarded_root, plan.dtype), small, is_over)

    def on_gpu(arrays: list[jax.Array]) -> Batched:
        totals, *small = _totals_on_gpu(arrays, plan, guarded=guarded)
        if not guarded:
            return totals.map(_root)
        is_over = totals.map(lambda total: total == jnp.inf)
        guard = functools.partial(_guarded_root, plan.dtype)
        return totals.map(guard, *small, is_over)

    return _xla.on_gpu(on_gpu, elsewhere, arrays)


def _guarded_root(
    dtype: str, total: jax.Array, small: jax.Array, is_over: jax.Array
) -> jax.Array:
    # The root of the sum in use is taken once, then scaled back if it was shrunk.
    norm = _root(select(is_over, small, total))
    return select(is_over, norm / SHRINK[dtype], norm)


def _totals_on_gpu(
    arrays: list[jax.Array], plan: NormPlan, *, guarded: bool
) -> list[Batched]:
    """Compute the sum of powers of each block and, if guarded, of shrunk powers."""
    kinds, members = _sums_on_gpu.sums(arrays, plan, guarded=guarded)
    totals = (_combined(values, members, plan) for values in kinds)
    return [Batched(each, plan.declared) for each in totals]


def _by_largest(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return norms of other orders, with powers relative to the largest element.

    Each array is scaled by its own maximum. A common maximum would make XLA copy its
    computation into the loop of every array, and make the compile time quadratic.
    """
    peaks, powers = [], []
    for x, member in zip(arrays, plan.members, strict=True):
        modulus = Power(plan.ord, plan.dtype)
        peaks.append(_maxima.largest(x, member.axis, 0.0, modulus))
        fraction = _numerics.fraction_of_peak(modulus(x), peaks[-1]) ** plan.ord
        powers.append(_sum(fraction, member.axis))
    peak = _combined(peaks, plan.members, plan, largest=True)
    relative = []
    for power, leaf_peak, member in zip(powers, peaks, plan.members, strict=True):
        of_block = member.of_array(peak[member.block], leaf_peak)
        fraction = _numerics.fraction_of_peak(leaf_peak, of_block)
        relative.append(power * fraction**plan.ord)
    totals = _combined(relative, plan.members, plan)
    # Where the peak is inf the fractions are NaN, but the norm is inf.
    norms = [
        select(p == jnp.inf, p, t ** (1 / plan.ord) * p)
        for t, p in zip(totals, peak, strict=True)
    ]
    return Batched(norms, plan.declared)


def _totals(
    arrays: list[jax.Array],
    plan: NormPlan,
    stacks: list[Stack],
    *,
    shrunk: bool = False,
    small: float = SMALL,
) -> Batched:
    """Compute the sum of powers of each block, or its largest element.

    If `shrunk`, compute the sum of squares of shrunk elements. Arrays smaller than
    `small` are merged.
    """
    power, is_max = Power(plan.ord, plan.dtype), plan.ord == math.inf
    stacked = {i for stack in stacks for i in stack.indices}
    batches = batches_of(arrays, plan, small)
    batches = [batch for batch in batches if batch[0] not in stacked]
    scales: list[Shrink | None] = [None] * (len(batches) + len(stacks))
    if shrunk:
        scales = [*shrinks(len(scales), plan.dtype)]

    def total(x: jax.Array, axis: _xla.Axis, of: _maxima.Of) -> jax.Array:
        if is_max:
            return _maxima.largest(x, axis, 0.0, of)
        return _sum(x if of is None else of(x), axis)

    values, members = [], [plan.members[batch[0]] for batch in batches]
    for batch, member, scale in zip(batches, members, scales, strict=False):
        x, of = arrays[batch[0]], functools.partial(power, scale=scale)
        if len(batch) > 1:
            x, of = merged(is_max, power, [arrays[i] for i in batch], scale), None
        values.append(total(x, member.axis, of))
    for (indices, x), scale in zip(stacks, scales[len(batches) :], strict=True):
        of_rows = total(x, (1,), functools.partial(power, scale=scale))
        if plan.members[indices[0]].axis is None:
            of_rows = of_rows[:, 0]
        for i, value in zip(indices, jnp.unstack(of_rows), strict=True):
            members.append(plan.members[i])
            is_shaped = members[-1].axis is None or arrays[i].ndim == 1
            shape = (1,) * arrays[i].ndim
            values.append(value if is_shaped else lax.reshape(value, shape))
    return Batched(_combined(values, members, plan, largest=is_max), plan.declared)


def _combined(
    values: Sequence[jax.Array],
    members: Sequence[Member],
    plan: NormPlan,
    *,
    largest: bool = False,
) -> list[jax.Array]:
    """Add the values of each block, or take their maximum; 0 for an empty block.

    One collective per set of mapped axes combines the values of all blocks.
    """
    by_axes: dict[_axis_names.Axes, dict[int, list[jax.Array]]] = {}
    for value, member in zip(values, members, strict=True):
        by_block = by_axes.setdefault(member.split, {})
        by_block.setdefault(member.block, []).append(member.of_block(value))
    totals: list[list[jax.Array]] = [[] for _ in plan.declared]
    for axes, by_block in by_axes.items():
        here = {i: _in_rows(x, largest=largest) for i, x in by_block.items()}
        if axes:
            here = (_maxima.over_devices if largest else lax.psum)(here, axes)
        for i, value in here.items():
            totals[i].append(value)
    zero = jnp.zeros((), plan.dtype)
    return [_in_rows(each or [zero], largest=largest) for each in totals]


def _in_rows(values: list[jax.Array], *, largest: bool) -> jax.Array:
    """Add arrays of one shape, or take their maximum, element by element."""
    if not largest and _xla.may_be_split(values[0]):
        values = by_pairs(lax.add, values, _SENT)
    while len(values) > 1:
        rows = [values[i : i + _ROW] for i in range(0, len(values), _ROW)]
        # Without the barrier XLA unrolls this into a chain over all values and the
        # kernels that compute them, which takes a minute to compile for 2,000 values.
        stacks = [lax.optimization_barrier(jnp.stack(row)) for row in rows]
        reduce = functools.partial(_maxima.largest, initial=0.0) if largest else _sum
        values = [reduce(stack, (0,))[0] for stack in stacks]
    return values[0]


def _sum(x: jax.Array, axis: _xla.Axis) -> jax.Array:
    """Sum over `axis`, kept as dimensions of 1; None sums all, to a scalar."""
    return jnp.sum(x, axis=axis, keepdims=axis is not None)


def _joined(arrays: list[jax.Array], plan: NormPlan) -> list[jax.Array]:
    """Merge adjacent reduced axes into one, and leave axes of length 1 in their place.

    XLA on CPU adds along one axis in a tree of sums of 32 elements, and along k axes in
    sums of 32**k, which lose up to 45 and 7,000 roundings. An array that XLA splits
    over devices is unchanged, since XLA would gather it.
    """
    if plan.ord == math.inf:
        return arrays
    joined = []
    for x, member in zip(arrays, plan.members, strict=True):
        axis = member.axis
        shape = [math.prod(x.shape)] if axis is None else list(x.shape)
        reduced = () if axis is None else axis
        for i in sorted(reduced):
            if i + 1 in reduced:
                shape[i], shape[i + 1] = 1, shape[i] * shape[i + 1]
        joined.append(x if _xla.may_be_split(x) else lax.reshape(x, shape))
    return joined


def _agreed(flag: jax.Array, plan: NormPlan) -> jax.Array:
    """Return the flag, set on all devices of a collective if it is set on one of them.

    A device that takes the branch alone would wait forever for the others. This happens
    if, for example, one device has a column of zeros in a leaf, and the columns of
    another leaf are split.
    """
    of_block: dict[int, set[Hashable]] = {}
    for member in plan.members:
        of_block.setdefault(member.block, set()).update(member.split)
    # A dict and not a set, since all processes must name the axes in the same order.
    spoken = dict.fromkeys(name for member in plan.members for name in member.split)
    # Axes over which some block is not summed, since types may not specify which axes
    # the flag varies over.
    apart = tuple(n for n in spoken if any(n not in b for b in of_block.values()))
    varies = {*_axis_names.split_axes(flag), *_axis_names.split_axes(flag, apart)}
    axes = tuple(name for name in spoken if name in varies)
    if not axes:
        return flag
    # The flag is sent as a number, whose maximum is 1 if it is set on any device.
    return _collectives.reduced_over(lax.pmax, flag.astype(jnp.float32), axes) > 0


def _root(total: jax.Array) -> jax.Array:
    root = jnp.sqrt(total)
    # The select keeps XLA on CPU from computing the roots of slices in the kernel of a
    # sum, which made a second sum over the embedding of GPT-2 eight times slower.
    return select(total > 0, root, total) if total.ndim else root


def _may_overflow(x: jax.Array, plan: NormPlan) -> bool:
    """Return whether a sum of squares of finite elements can overflow in plan.dtype."""
    largest = 2 * jnp.finfo(x.dtype).maxexp + math.log2(max(_leaves.size_of(x), 1))
    return largest >= jnp.finfo(plan.dtype).maxexp
