"""Compute quotients, roots, counts and new parameters in range, with derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _axis_names, _leaves, _placement
from ._types import Number


def select(where: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """Compute `jnp.where`, without its nested function for arrays of one type."""
    if (
        where.shape in ((), yes.shape)
        and yes.shape == no.shape
        and yes.dtype == no.dtype
    ):
        return lax.select(where, yes, no)
    return jnp.where(where, yes, no)


def as_array(value: Number) -> jax.Array:
    """Return a number or array as a JAX array of floats of 32 bits or more.

    It is on the device. Without 64-bit types JAX rejects Python integers beyond 32
    bits, and wraps those of NumPy. It promotes floats of 8 bits with no other dtype.
    """
    if isinstance(value, int):
        return jnp.asarray(float(value))
    # JAX has no `np.longdouble`, whose character is "g".
    if isinstance(value, (np.number, np.ndarray)) and value.dtype.char in "bhilqBHILQg":
        return jnp.asarray(value.astype(np.float64))
    array = jnp.asarray(_placement.on_device(value))
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits >= 32:
        return array
    return array.astype(jnp.float64 if array.dtype.itemsize == 8 else jnp.float32)


def promotable(value: Any) -> Any:
    """Return a Python number unchanged, so it adapts to others; an array by `as_array`.

    For parameters of optimizers that optax computes with.
    """
    return value if isinstance(value, (int, float)) else as_array(value)


def as_like(value: Number, like: jax.Array) -> jax.Array:
    """Return a number or an array, traced or not, in the dtype of another array."""
    return as_array(value).astype(like.dtype)


def rounding_error(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """Return the exact rounding error of `total = a + b` (Knuth 1969)."""
    other = total - a
    return (a - (total - other)) + (b - other)


@jax.custom_jvp
def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute `a / b`, with a derivative that never squares `b`, which may overflow."""
    return a / b


@ratio.defjvp
def _ratio_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (a, b), (da, db) = primals, tangents
    quotient = ratio(a, b)
    # A constant power of two, from 2 / b to 4 / b, first scales both, since
    # differentiating again squares the divisor. Both 4 / b and b are in range.
    _, exponent = jnp.frexp(lax.stop_gradient(b))
    shrink = jnp.ldexp(jnp.ones_like(b), 2 - exponent)
    return quotient, ((da - quotient * db) * shrink) / (b * shrink)


def divided_by(x: jax.Array, real: jax.Array) -> jax.Array:
    """Return `x` divided by a real array, part by part if it is complex."""
    if jnp.iscomplexobj(x):
        return lax.complex(ratio(jnp.real(x), real), ratio(jnp.imag(x), real))
    return ratio(x, real)


def root(x: jax.Array) -> jax.Array:
    """Compute the square root of numbers of at least 0, with derivative 0 at zero."""
    live = x > 0
    return select(live, jnp.sqrt(select(live, x, jnp.ones_like(x))), x)


def power(x: jax.Array, exponent: Any) -> jax.Array:
    """Compute `x**exponent`, with a finite derivative at 0 for all exponents."""
    live = x > 0
    base = select(live, x, jnp.ones_like(x))
    return select(live, base**exponent, jnp.zeros_like(x))


def fraction_of_peak(x: jax.Array, peak: jax.Array) -> jax.Array:
    """Compute `x / peak` for `x` up to the peak, and 0 if the peak is 0."""
    # XLA multiplies by 1 / peak, which would be flushed to 0 for the largest peaks.
    shrink = jnp.where(peak > 1, 2.0**-4, jnp.ones_like(peak))
    divisor = jnp.where(peak == 0, jnp.ones_like(peak), peak) * shrink
    return ratio(x * shrink, broadcast_like(divisor, x))


def broadcast_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return `value` in the shape of `like`, split like it on Explicit axes."""
    # Before JAX 0.10, full_like rejects numbers that vary over devices.
    is_rejected = _axis_names.IS_OLD and _axis_names.varying(jax.typeof(value))
    if value.ndim or is_rejected:
        return _placement.placed_as(jnp.broadcast_to(value, like.shape), like)
    return jnp.full_like(like, value, dtype=value.dtype)


def as_count(value: Any) -> jax.Array:
    """Return a count of a state as an integer.

    Averaging a state over replicas, or casting it, turns counts into floats, of which
    an average may be off by a rounding.
    """
    value = jnp.asarray(value)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return jnp.round(value).astype(jnp.int32) if is_float else value


def as_counted_in(value: Any, kind: Any) -> Any:
    """Return a value as a count if `kind` is an integer array, else unchanged."""
    dtype = getattr(kind, "dtype", None)
    is_count = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    return as_count(value) if is_count else value


def counted(total: Any, once: Any = True) -> jax.Array:
    """Return the count plus one where `once` is set, up to the largest number."""
    total = as_count(total)
    return total + (once & (total < jnp.iinfo(total.dtype).max)).astype(total.dtype)


def applied(param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the new parameter before it is rounded to the dtype of `param`."""
    real = jnp.promote_types(*(_leaves.real_dtype(x.dtype) for x in (param, update)))
    return _leaves.widen(param, real) + _leaves.widen(update, real)


def update_to(new: jax.Array, param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the difference from `param` to `new`, in the dtype of `update`.

    `new` is rounded to the dtype of `param` first: applying the difference then leads
    to this rounded number, unless it is much smaller than `param`.
    """
    rounded = _rounded(new, param)
    return _leaves.narrow(rounded - param.astype(rounded.dtype), update)


# Rounding by steps has no derivative, so it gets the derivative 1.
@jax.custom_jvp
def _rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` rounded to the precision of `like`, in its own dtype.

    A number above the largest of `like` keeps its size, so that the cast decides.
    """
    if x.dtype == like.dtype:
        return x
    if jnp.iscomplexobj(x):
        part = jnp.real(like)
        return lax.complex(_rounded(jnp.real(x), part), _rounded(jnp.imag(x), part))
    # XLA may remove a cast to a narrow dtype and back, but never this operation. With
    # fewer exponent bits it would flush subnormal numbers of the narrow dtype.
    exponent_bits, digits = jnp.finfo(x.dtype).nexp, jnp.finfo(like.dtype).nmant
    rounded = lax.reduce_precision(x, exponent_bits, digits)
    return with_subnormals(x, rounded, like, _to_nearest)


_to_nearest = functools.partial(
    lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN
)


def with_subnormals(
    x: jax.Array,
    normal: jax.Array,
    like: jax.Array,
    to_integer: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return `normal`, or `x` by `to_integer` where it is subnormal in `like`."""
    info = jnp.finfo(like.dtype)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return normal
    # Subnormal numbers are multiples of the smallest one, a power of two.
    step = float(info.smallest_subnormal)
    multiple = to_integer(x * (1 / step)) * step
    return select(jnp.abs(x) < float(info.tiny), multiple, normal)


@_rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals), tangents[0]
