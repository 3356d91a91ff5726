"""The arithmetic of norms: sums of powers, none of which leaves the range unseen.

One function, `roots`, takes all blocks at once, so that the collectives and the guard
against overflow are shared. Its derivative is stated, not traced: it is finite at zero
and keeps nothing of the guard.
"""

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

# A smaller norm counts as 0: squares of its elements are flushed to zero.
LEAST = {"float32": 2.0**-60, "float64": 2.0**-500}


def flush_small(norm: jax.Array) -> jax.Array:
    """The norm, 0 if it is smaller."""
    least = LEAST[norm.dtype.name]
    return select(norm < least, jnp.zeros_like(norm), norm)


# JAX's own derivative is not finite at zero, and would differentiate both branches of
# the guard.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def roots(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """The norm of each block; inf above the largest float."""
    return _compiled(arrays, plan)


@functools.partial(jax.jit, static_argnums=1)
def _compiled(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    # The function is compiled: each call outside of jax.jit would otherwise compile the
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
    """The derivative of the norm by `x` (conjugated), 0 at zero; and where x is it."""
    size = jnp.abs(x)
    moving = (norm > 0) & jnp.isfinite(norm)
    live = (size > 0) & moving
    # The divisor is 1 where there is no direction, so that derivatives of the quotient
    # stay finite; the selects below make these directions 0.
    norm = jnp.where(moving, norm, jnp.ones_like(norm))
    if ord == 2:
        # Zeros are included: there too the second derivative is 1 / norm.
        direction = jnp.where(moving, _numerics.over(x, norm), jnp.zeros_like(x))
        return direction, jnp.zeros_like(size)
    modulus = jnp.where(live, size, jnp.ones_like(size))
    sign = jnp.where(live, _numerics.over(x, modulus), jnp.zeros_like(x))
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
    """Orders 1 and inf: the sum or maximum. Order 2: the root of it, or of shrunk ones.

    Both sums on accelerators, which read the elements once for both; a branch on a
    number of theirs would make them wait for the host. A CPU would read them twice, so
    there the second sum is made only if the first is inf.
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
    """The flag, set on all devices that the branch talks to if it is on one of them.

    A device that took the branch alone would wait there for the others for ever: one
    with a column of zeros, say, beside another leaf whose columns are split.
    """
    of_block: dict[int, set[Hashable]] = {}
    for member in plan.members:
        of_block.setdefault(member.block, set()).update(member.split)
    # No set: all processes must name the axes in one order.
    spoken = dict.fromkeys(name for member in plan.members for name in member.split)
    # And what some block is not added over: types may not say what the flag varies by.
    apart = tuple(n for n in spoken if any(n not in b for b in of_block.values()))
    varies = {*_axis_names.split_axes(flag), *_axis_names.split_axes(flag, apart)}
    axes = tuple(name for name in spoken if name in varies)
    if not axes:
        return flag
    # The flag is sent as a number, whose maximum is 1 if it is set on any device.
    return _collectives.spanning(lax.pmax, flag.astype(jnp.float32), axes) > 0


def _by_largest(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Any other order: each array's powers relative to its own largest element.

    Scaling all arrays by one common maximum would make XLA copy the whole maximum
    into every array's loop, and the compile time quadratic.
    """
    peaks, powers = [], []
    for x, member in zip(arrays, plan.members, strict=True):
        modulus = _sums.Power(plan.ord, plan.dtype)
        peaks.append(_sums.max_over(x, member.axis, modulus))
        fraction = _numerics.fraction(modulus(x), peaks[-1]) ** plan.ord
        powers.append(_sums.sum_over(fraction, member.axis))
    across = _maxima.over_devices
    peak = combined(across, _sums.largest_of, peaks, plan.members, plan)
    relative = [
        power * _numerics.fraction(leaf_peak, peak[member.block]) ** plan.ord
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
    # The select keeps XLA on CPU from taking the roots of slices in the kernel that
    # adds, which made a second sum over the embedding of GPT-2 eight times as long.
    return select(total > 0, root, total) if total.ndim else root


def _may_overflow(x: jax.Array, plan: NormPlan) -> bool:
    """Whether a sum of squares of finite elements of x can overflow in plan.dtype."""
    largest = 2 * jnp.finfo(x.dtype).maxexp + math.log2(max(_leaves.size_of(x), 1))
    return largest >= jnp.finfo(plan.dtype).maxexp
