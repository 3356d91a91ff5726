"""Move the elements of one array to two bounds, exactly.

Bounds in float32 or wider are rounded once, to the dtype of a leaf, and complex numbers
keep their direction. Strict clipping rounds toward zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._arrays import _leaves, _numerics, _placement, _validate
from .._arrays._types import Number
from .._responses import Hard
from . import _scale
from ._clip import as_limit


class ElementResponse(Protocol):
    """Describe a response that defines a function of single numbers."""

    def element(
        self, x: jax.Array, lower: jax.Array, upper: jax.Array, /
    ) -> jax.Array: ...


class Limits(NamedTuple):
    """Hold two thresholds for the elements of a leaf, which broadcast to its shape.

    `is_symmetric` is whether they are known to differ by their signs alone, so that
    only moduli matter.
    """

    lower: Any
    upper: Any
    is_symmetric: bool


def bounded(
    name: str,
    x: jax.Array,
    lower: Number,
    upper: Number,
    response: ElementResponse,
    like: jax.Array,
    *,
    strict: bool,
    cleaned: bool,
) -> tuple[jax.Array, jax.Array]:
    """Move the elements of an array to their bounds.

    Args:
      name: The name of the array in errors.
      x: The array.
      lower: Broadcasts to the shape of the array, in any real dtype.
      upper: Likewise.
      response: Defines `element`.
      like: An array of the dtype to return.
      strict: Whether bounds are rounded towards zero rather than to nearest.
      cleaned: Whether non-finite elements become zero, unless both bounds are infinite.

    Returns:
      The array, and the factor by which each element shrank (1 if unclipped).
    """
    # Bounds are compared in the precision of the norm, where float16 has no overflow.
    dtype = _leaves.real_dtype(x.dtype)
    lower, upper = (
        as_limit(bound, dtype, towards_zero=strict) for bound in (lower, upper)
    )
    if jnp.iscomplexobj(x) and not getattr(response, "signed", False):
        upper = _of_modulus(name, upper)
    _check_shape(name, "lower", lower, x)
    _check_shape(name, "upper", upper, x)
    is_eager = not any(isinstance(each, Tracer) for each in (x, lower, upper, like))
    # Compiled, an eager call dispatches one operation per leaf, not thirty. Responses
    # that hold numbers or functions would compile again for each of them.
    moved = _compiled if is_eager and isinstance(response, Hard) else _moved
    return moved(response, strict, cleaned, x, lower, upper, like)


def _of_modulus(name: str, upper: jax.Array | np.ndarray) -> jax.Array:
    """Return an upper bound of moduli, at least 0; raise if it is known to be below."""
    known = _validate.concrete(upper)
    # A schedule that ends at 0 may end at -5e-8 by rounding, which is no mistake.
    is_right = known is None or not np.any(known < -1e-6)
    wanted = f"at least 0 for {name}, whose complex elements are clipped by modulus"
    advice = "Clip real and imaginary parts as two leaves."
    _validate.require("upper", upper, is_right, wanted, advice)
    return jnp.maximum(upper, 0)


def _moved(
    response: ElementResponse,
    strict: bool,
    cleaned: bool,
    x: jax.Array,
    lower: jax.Array | np.ndarray,
    upper: jax.Array | np.ndarray,
    like: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the array in the dtype of `like`, and the factor of each element."""
    size = jnp.abs(_leaves.widen(x))
    lower, upper = _at(lower, size), _at(upper, size)
    if cleaned:
        # Elements are cleaned before the bounds apply, since these keep NaN and turn
        # inf into a bound.
        is_off = jnp.isinf(lower) & jnp.isinf(upper)
        x = jnp.where(~is_off & ~jnp.isfinite(x), jnp.zeros_like(x), x)
    wide = _leaves.widen(x)
    size = jnp.abs(wide)
    if jnp.iscomplexobj(wide):
        goal, moved = _complex_goal(wide, size, lower, upper, response, strict)
        near_side = upper
    else:
        goal = response.element(wide, lower, upper)
        moved = goal != wide
        if like.dtype != wide.dtype:
            # A bound above the largest number of the dtype would be infinite after the
            # cast. NaN is selected, so that it stays visible.
            largest = jnp.asarray(jnp.finfo(like.dtype).max).astype(wide.dtype)
            goal = jnp.where(jnp.isnan(goal), goal, jnp.clip(goal, -largest, largest))
        # The bound on an element's own side of zero limits its modulus.
        near_side = jnp.where(jnp.signbit(wide), -lower, upper)
    # NaN differs from any bound and must stay NaN.
    moved &= ~jnp.isnan(size)
    unclipped = x
    if x.dtype != like.dtype:
        unclipped = _scale.cast(x, like, towards_zero=strict)
    selects = isinstance(response, Hard) and not jnp.iscomplexobj(x) and not strict
    if selects and goal.dtype == x.dtype:
        # Hard clipping selects the element or its bound, so unclipped elements are
        # bit-identical without a second select, in half the time.
        out = _scale.cast(goal, like)
    elif selects and x.dtype == like.dtype:
        out = _between(x, wide, lower, upper)
    else:
        # The select keeps unclipped elements bit-identical; other responses compute.
        out = jnp.where(moved, _scale.cast(goal, like, towards_zero=strict), unclipped)
    if strict:
        # A bound that is subnormal in float32 counts as 0 on a CPU.
        tiny = jnp.asarray(jnp.finfo(size.dtype).tiny, size.dtype)
        out = _scale.without_subnormals(out, near_side < tiny)
    # A zero has no factor: it is divided by 1 here, and 1 is selected below.
    shrunk = jnp.abs(goal) / jnp.where(size > 0, size, jnp.ones_like(size))
    return out, jnp.where(moved & (size > 0), shrunk, jnp.ones_like(size))


_compiled = jax.jit(_moved, static_argnums=(0, 1, 2))


def _complex_goal(
    wide: jax.Array,
    size: jax.Array,
    lower: jax.Array,
    upper: jax.Array,
    response: ElementResponse,
    strict: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return complex numbers with clipped moduli, and which of them are clipped."""
    if not getattr(response, "signed", False):
        lower = jnp.maximum(lower, 0)
    goal = response.element(size, lower, upper)
    moved = goal != size
    wide = _pointing(wide)
    # The modulus has rounding errors, so strict clipping stays below by their bound.
    goal = goal * (1 - 8 * jnp.finfo(goal.dtype).eps) if strict else goal
    # Halves stay in range: the modulus of a finite number may exceed the largest float.
    half = jnp.abs(wide * 0.5)
    # Zero has no direction; dividing it by 1 keeps its derivative finite.
    safe = jnp.where(half > 0, half, jnp.ones_like(half))
    return _numerics.divided_by(wide * 0.5, safe) * goal.astype(wide.dtype), moved


def _between(
    x: jax.Array, wide: jax.Array, lower: jax.Array, upper: jax.Array
) -> jax.Array:
    """Return `x`, or the bound that it exceeds, rounded to the dtype of `x`.

    Elements are selected in their own dtype, which takes a third of the time.
    """
    # Where traced bounds are out of order, the lower one holds.
    upper = jnp.where(upper < lower, lower, upper)
    low, high = (_in_range(bound, x) for bound in (lower, upper))
    # Wide elements are compared, since a rounded bound may equal an element past it.
    out = jnp.where(wide < lower, low, x)
    out = jnp.where(wide > upper, high, out)
    # Comparisons with a NaN bound are false; the maximum returns NaN, so it is visible.
    return jnp.where(lower <= upper, out, jnp.maximum(low, high))


def _in_range(bound: jax.Array, x: jax.Array) -> jax.Array:
    """Return a bound in the dtype of `x`, at most its largest number."""
    # The cast would make a larger bound infinite, which an infinite element passes.
    largest = jnp.asarray(jnp.finfo(x.dtype).max).astype(bound.dtype)
    return _leaves.narrow(jnp.clip(bound, -largest, largest), x)


def _pointing(wide: jax.Array) -> jax.Array:
    """Return complex numbers, infinite ones replaced by a number of their direction."""
    parts = jnp.real(wide), jnp.imag(wide)
    infinite = jnp.isinf(parts[0]) | jnp.isinf(parts[1])
    # The quotient of inf by inf would be NaN, so infinite parts are replaced by their
    # signs; the finite part of an infinite number counts as 0.
    signs = (jnp.where(jnp.isinf(p), jnp.sign(p), jnp.zeros_like(p)) for p in parts)
    return jnp.where(infinite, jax.lax.complex(*signs), wide)


def _check_shape(
    name: str, which: str, bound: jax.Array | np.ndarray, x: jax.Array
) -> None:
    """Raise unless a bound broadcasts to the shape of `x`."""
    advice = (
        "Pass a number, an array that broadcasts, or a tree with one for each leaf."
    )
    _validate.broadcasts(which, bound.shape, x.shape, name, advice)


def _at(bound: jax.Array | np.ndarray, x: jax.Array) -> jax.Array:
    """Return a bound in the shape of `x`."""
    if bound.ndim == 0:
        # The array is built from the leaf, so it is split over devices like the leaf.
        return jnp.zeros_like(x) + bound
    return _placement.placed_as(jnp.broadcast_to(bound, x.shape), x)
