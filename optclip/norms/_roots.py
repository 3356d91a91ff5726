"""Compute norms from sums of powers, guarded against overflow.

One function, `roots`, accepts all blocks, so that they share the collectives and the
guard. Its derivative is custom: it is finite at zero and stores nothing of the guard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _axis_names, _collectives, _leaves, _maxima, _numerics
from optclip._arrays._batching import Batched
from optclip._arrays._numerics import select
from optclip.norms import _sums
from optclip.norms._totals import SHRINK, Member, NormPlan, combined, totals_of

# Smaller norms count as 0, since squares of their elements are flushed to zero.
LEAST = {"float32": 2.0**-60, "float64": 2.0**-500}


def flush_small(norm: jax.Array) -> jax.Array:
    """Return the norm, or 0 if it is smaller than `LEAST`."""
    least = LEAST[norm.dtype.name]
    return select(norm < least, jnp.zeros_like(norm), norm)


# The derivative of JAX is not finite at zero, and would differentiate both branches of
# the guard.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def roots(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return the norm of each block; inf above the largest float."""
    return _compiled(arrays, plan)


@functools.partial(jax.jit, static_argnums=1)
def _compiled(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    # The function is compiled, since each call outside of jax.jit would compile the
    # branches again.
    if plan.ord != math.inf:
        pairs = zip(arrays, plan.members, strict=True)
        arrays = [_sums.joined(x, member.axis) for x, member in pairs]
    return (_guarded if plan.ord in (1, 2, math.inf) else _by_largest)(arrays, plan)


@roots.defjvp
def _roots_jvp(
    plan: NormPlan,
    primals: tuple[list[jax.Array]],
    tangents: tuple[list[jax.Array]],
) -> tuple[Batched, Batched]:
    (arrays,), (tangent_arrays,) = primals, tangents
    norms = roots(arrays, plan)
    entries = norms.entries()
    slopes, ties = [], []
    for x, dx, member in zip(arrays, tangent_arrays, plan.members, strict=True):
        x, dx = (_leaves.widen(each, plan.dtype) for each in (x, dx))
        direction, is_tie = _direction(x, entries[member.block], plan.ord)
        slopes.append(_reduce(jnp.sum, jnp.real(jnp.conj(direction) * dx), member))
        ties.append(_reduce(jnp.sum, is_tie, member))
    slope = combined(lax.psum, _sums.sum_of, slopes, plan.members, plan)
    if plan.ord == math.inf:
        count = combined(lax.psum, _sums.sum_of, ties, plan.members, plan)
        slope = [s / jnp.maximum(c, 1) for s, c in zip(slope, count, strict=True)]
    return norms, norms.with_entries(slope)


def _direction(
    x: jax.Array, norm: jax.Array, ord: float
) -> tuple[jax.Array, jax.Array]:
    """Return the conjugate derivative of the norm, and flags of the largest elements.

    The derivative at a zero norm is 0. Only the order inf returns flags.
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


def _guarded(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return norms of orders 1, 2 and inf; order 2 is guarded against overflow.

    If a sum of squares overflows, the norm is computed from shrunk elements.
    Accelerators always compute both sums, since they read the elements once for both,
    and a branch would make them wait for the host. A CPU would read them twice, so it
    computes the second sum only if the first is inf.
    """
    totals = totals_of(arrays, plan)

    def root(total: jax.Array) -> jax.Array:
        return _root(total, plan.ord)

    overflows = plan.guarded and any(_may_overflow(x, plan) for x in arrays)
    if plan.ord != 2 or not overflows:
        return totals.map(root)

    def shrunk() -> Batched:
        return totals_of(arrays, plan, shrunk=True)

    is_over = totals.map(lambda total: total == jnp.inf)

    def shrunk_if_needed() -> Batched:
        return lax.cond(_agreed(is_over.any(), plan), shrunk, lambda: totals)

    def one(total: jax.Array, small: jax.Array, is_over: jax.Array) -> jax.Array:
        # The root of the sum in use is taken once, then scaled back if it was shrunk.
        norm = root(select(is_over, small, total))
        return select(is_over, norm / SHRINK[plan.dtype], norm)

    small = lax.platform_dependent(cpu=shrunk_if_needed, default=shrunk)
    return totals.map(one, small, is_over)


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


def _by_largest(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return norms of other orders, with powers relative to the largest element.

    Each array is scaled by its own maximum. A common maximum would make XLA copy its
    computation into the loop of every array, and make the compile time quadratic.
    """
    peaks, powers = [], []
    for x, member in zip(arrays, plan.members, strict=True):
        modulus = _sums.Power(plan.ord, plan.dtype)
        peaks.append(_sums.max_over(x, member.axis, modulus))
        fraction = _numerics.fraction_of_peak(modulus(x), peaks[-1]) ** plan.ord
        powers.append(_sums.sum_over(fraction, member.axis))
    across = _maxima.over_devices
    peak = combined(across, _sums.largest_of, peaks, plan.members, plan)
    relative = [
        power * _numerics.fraction_of_peak(leaf_peak, peak[member.block]) ** plan.ord
        for power, leaf_peak, member in zip(powers, peaks, plan.members, strict=True)
    ]
    totals = combined(lax.psum, _sums.sum_of, relative, plan.members, plan)
    # Where the peak is inf the fractions are NaN, but the norm is inf.
    norms = [
        select(p == jnp.inf, p, t ** (1 / plan.ord) * p)
        for t, p in zip(totals, peak, strict=True)
    ]
    return Batched(norms, plan.declared)


def _reduce(
    reduce: Callable[..., jax.Array], x: jax.Array, member: Member
) -> jax.Array:
    return reduce(x, axis=member.axis, keepdims=member.axis is not None)


def _root(total: jax.Array, ord: float) -> jax.Array:
    if ord != 2:
        return total
    root = jnp.sqrt(total)
    # The select keeps XLA on CPU from computing the roots of slices in the kernel of a
    # sum, which made a second sum over the embedding of GPT-2 eight times slower.
    return select(total > 0, root, total) if total.ndim else root


def _may_overflow(x: jax.Array, plan: NormPlan) -> bool:
    """Return whether a sum of squares of finite elements can overflow in plan.dtype."""
    largest = 2 * jnp.finfo(x.dtype).maxexp + math.log2(max(_leaves.size_of(x), 1))
    return largest >= jnp.finfo(plan.dtype).maxexp
