"""The arithmetic of norms: sums of powers that neither overflow nor underflow.

One function, `roots`, takes all blocks at once, so that the collectives and the
branch to the second pass are shared. Its derivative is stated, not traced: it is
finite at zero and keeps nothing of the branch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optclip import _arithmetic, _collectives, _leaves, _mapped, _sums
from optclip._rows import Rows
from optclip._totals import Part, Plan, combined, totals_of

# Powers of two by which the second pass multiplies elements whose sum of powers
# overflowed (down) or was too small to trust (up); every product stays in range.
_DOWN = {"float32": 2.0**-80, "float64": 2.0**-600}
_UP = {"float32": 2.0**90, "float64": 2.0**600}


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def roots(arrays: list[jax.Array], plan: Plan) -> Rows:
    """The norm of each block as (root, unit), their product: see `norms.Measured`."""
    return _compiled(arrays, plan)


@functools.partial(jax.jit, static_argnums=1)
def _compiled(arrays, plan):
    # So that what branches is not compiled anew by each call outside of jax.jit.
    if plan.ord in (1, 2, math.inf):
        return _two_pass(arrays, plan)
    return _by_largest(arrays, plan)


@roots.defjvp
def _roots_jvp(plan, primals, tangents):
    (arrays,), (tangent_arrays,) = primals, tangents
    found = roots(arrays, plan)
    pairs = found.entries()
    norms, units = [root for root, _ in pairs], [unit for _, unit in pairs]
    slopes, ties = [], []
    for x, dx, part in zip(arrays, tangent_arrays, plan.parts, strict=True):
        unit = units[part.block]
        x, dx = (
            _arithmetic.over(_leaves.widen(x, plan.dtype), unit),
            _arithmetic.over(_leaves.widen(dx, plan.dtype), unit),
        )
        direction, is_tie = _direction(x, norms[part.block], plan.ord)
        slopes.append(_reduce(jnp.sum, jnp.real(jnp.conj(direction) * dx), part))
        ties.append(_reduce(jnp.sum, is_tie, part))
    slope = combined(lax.psum, _sums.plain_sum_of, slopes, plan.parts, plan)
    if plan.ord == math.inf:
        count = combined(lax.psum, _sums.plain_sum_of, ties, plan.parts, plan)
        slope = [s / jnp.maximum(c, 1) for s, c in zip(slope, count, strict=True)]
    still = [jnp.zeros_like(unit) for unit in units]
    return found, found.with_entries(list(zip(slope, still, strict=True)))


def _direction(x, norm, ord):
    """The derivative of the norm by `x` (conjugated), 0 at zero; and where x is it."""
    size = jnp.abs(x)
    moving = (norm > 0) & jnp.isfinite(norm)
    live = (size > 0) & moving
    norm = jnp.where(moving, norm, jnp.ones_like(norm))
    if ord == 2:
        # Zeros are not left out: there too the second derivative is 1 / norm.
        direction = jnp.where(moving, _arithmetic.over(x, norm), jnp.zeros_like(x))
        return direction, jnp.zeros_like(size)
    modulus = jnp.where(live, size, jnp.ones_like(size))
    sign = jnp.where(live, _arithmetic.over(x, modulus), jnp.zeros_like(x))
    if ord == 1:
        return sign, jnp.zeros_like(size)
    if ord == math.inf:
        tie = (live & (size == norm)).astype(size.dtype)
        return sign * tie.astype(sign.dtype), tie
    share = jnp.where(live, _arithmetic.ratio(size, norm), jnp.ones_like(size))
    return sign * (share ** (ord - 1)).astype(sign.dtype), jnp.zeros_like(size)


def _two_pass(arrays, plan):
    """Orders 1, 2, inf: the plain sum or maximum; scaled, if that left the range."""
    totals = totals_of(arrays, plan)
    lows = totals.with_entries(_trusted_from(arrays, plan))

    def root(total):
        return _root(total, plan.ord)

    if not any(_may_leave_range(x, plan) for x in arrays):
        return totals.map(lambda total: (root(total), jnp.ones_like(total)))
    down, up = _DOWN[plan.dtype], _UP[plan.dtype]

    def scale(total, low):
        grown = jnp.where(total < low, up, jnp.ones_like(total))
        return jnp.where(jnp.isinf(total), down, grown)

    def root_of_scaled(found, total, low):
        back = jnp.where(total < low, 1 / up, jnp.ones_like(total))
        return root(found) * back

    def again(arrays, totals):
        scaled = totals_of(arrays, plan, totals.map(scale, lows))
        return scaled.map(root_of_scaled, totals, lows)

    def keep(arrays, totals):
        del arrays
        return totals.map(root)

    left_range = totals.map(lambda total, low: (total < low) | jnp.isinf(total), lows)
    is_needed = _agreed(left_range.any(), plan)
    found = lax.cond(is_needed, again, keep, arrays, totals)

    def with_unit(root, total):
        return root, jnp.where(jnp.isinf(total), 1 / down, jnp.ones_like(total))

    return found.map(with_unit, totals)


def _agreed(flag, plan):
    """The flag, set on all devices that the branch talks to if it is on one of them.

    A device that took the branch alone would wait there for the others for ever: one
    with a column of zeros, say, beside another leaf whose columns are split.
    """
    of_block: dict[int, set[Any]] = {}
    for part in plan.parts:
        of_block.setdefault(part.block, set()).update(part.split)
    # No set: all processes must name the axes in one order.
    spoken = dict.fromkeys(name for part in plan.parts for name in part.split)
    # And what some block is not added over: types may not say what the flag varies by.
    apart = tuple(n for n in spoken if any(n not in b for b in of_block.values()))
    varies = {*_mapped.split_axes(flag), *_mapped.split_axes(flag, apart)}
    axes = tuple(name for name in spoken if name in varies)
    return _collectives.spanning(lax.pmax, flag.astype(jnp.float32), axes) > 0


def _by_largest(arrays, plan):
    """Any other order: each array's powers relative to its own largest element.

    Scaling all arrays by one common maximum would make XLA copy the whole maximum
    into every array's loop, and the compile time quadratic.
    """
    peaks, powers = [], []
    # The modulus of a finite complex number may be above the largest float.
    shrink = 0.25 if any(jnp.iscomplexobj(x) for x in arrays) else 1.0
    for x, part in zip(arrays, plan.parts, strict=True):
        size = jnp.abs(_leaves.widen(x, plan.dtype) * shrink)
        peak = _reduce(functools.partial(jnp.max, initial=0.0), size, part)
        peaks.append(peak)
        share = _arithmetic.share(size, peak) ** plan.ord
        powers.append(_sums.exact_sum(share, part.axis))
    peak = combined(lax.pmax, _sums.largest_of, peaks, plan.parts, plan)
    parts = [
        power * _arithmetic.share(own, peak[part.block]) ** plan.ord
        for power, own, part in zip(powers, peaks, plan.parts, strict=True)
    ]
    totals = combined(lax.psum, _sums.exact_sum_of, parts, plan.parts, plan)
    big = _DOWN[plan.dtype] ** -0.75
    units = [jnp.where(p > big, 1 / _DOWN[plan.dtype], jnp.ones_like(p)) for p in peak]
    found = [
        t ** (1 / plan.ord) * (p / u)
        for t, p, u in zip(totals, peak, units, strict=True)
    ]
    # Orders near 0 overflow where no element does.
    over = [jnp.isfinite(p) & jnp.isinf(f) for p, f in zip(peak, found, strict=True)]
    largest = jnp.finfo(plan.dtype).max
    found = [jnp.where(o, largest, f) for o, f in zip(over, found, strict=True)]
    units = [
        jnp.where(o, 1 / _DOWN[plan.dtype], u) / shrink
        for o, u in zip(over, units, strict=True)
    ]
    return Rows(list(zip(found, units, strict=True)), plan.told)


def _reduce(reduce: Callable[..., jax.Array], x: jax.Array, part: Part) -> jax.Array:
    return reduce(x, axis=part.axis, keepdims=part.axis is not None)


def _root(total, ord):
    if ord != 2:
        return total
    root = jnp.sqrt(total)
    # Of slices not at once: XLA on CPU would take the root in the kernel that adds,
    # which made the second pass over the embedding of GPT-2 eight times as long.
    return jnp.where(total > 0, root, total) if total.ndim else root


def _may_leave_range(x: jax.Array, plan: Plan) -> bool:
    """Whether powers of finite elements of x can overflow or vanish in plan.dtype."""
    if plan.ord == math.inf:
        return jnp.issubdtype(x.dtype, jnp.complexfloating)
    leaf, wide = jnp.finfo(x.dtype), jnp.finfo(plan.dtype)
    power = int(plan.ord)
    largest = power * leaf.maxexp + math.log2(max(x.size, 1))
    smallest = power * (leaf.minexp - leaf.nmant)
    return largest >= wide.maxexp or smallest <= wide.minexp + wide.nmant


def _trusted_from(arrays, plan) -> list[np.generic]:
    """The smallest sum to which what vanished on the way adds under half an ULP."""
    counts = [0] * plan.num_blocks
    for x, part in zip(arrays, plan.parts, strict=True):
        counts[part.block] += x.size * _mapped.axes_size(part.split)
    wide = jnp.finfo(plan.dtype)
    floor = 0.0 if plan.ord == math.inf else float(wide.tiny) * 2.0 ** (wide.nmant + 1)
    return [np.dtype(plan.dtype).type(max(count, 1) * floor) for count in counts]
