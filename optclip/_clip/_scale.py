"""APPLY: one multiplication in float32 or wider, one cast back.

Where the coefficient is exactly 1 the leaf is selected, not multiplied: it stays as
it was to the bit, subnormals included.
"""

import functools
import numbers
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from optclip._arrays import _leaves
from optclip._arrays._numerics import select
from optclip._arrays._types import Number
from optclip.responses import Detached, Response
from optclip.responses._resolve import is_ours

Limit = TypeVar("Limit", bound=jax.Array | np.ndarray)


def coefficient_of(
    response: Response, norm: jax.Array, threshold: jax.Array, eps: Number
) -> jax.Array:
    """What to multiply by: 1 for a threshold of inf, NaN if a norm is not finite."""
    is_eager = not any(isinstance(x, Tracer) for x in (norm, threshold))
    if is_eager and is_ours(response) and _is_hashable((response, eps)):
        # One dispatch, not twenty.
        return _compiled(response, norm, threshold, eps)
    return _coefficient_of(response, norm, threshold, eps)


def _is_hashable(value: Any) -> bool:
    """Whether no array is in it, traced or not, nor a schedule's answer."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _coefficient_of(
    response: Response, norm: jax.Array, threshold: jax.Array, eps: Number
) -> jax.Array:
    one = jnp.ones_like(norm)
    is_live = norm > 0
    # 0, or NaN to be loud; a NaN constant would trip jax.debug_nans on healthy input.
    # No derivative: that of norm - norm is g - g, which swallows the smaller true one.
    off = threshold == jnp.inf
    known = select(off, one, threshold)
    alarm = lax.stop_gradient((norm - norm) * known)
    shown = select(is_live, norm, one)
    if not (isinstance(eps, (int, float)) and eps == 0):
        # One that is traced is not checked; below 0 it would switch the clip off.
        added = jnp.asarray(eps).astype(norm.dtype)
        shown = shown + select(added < 0, jnp.zeros_like(added), added)
    found = jnp.asarray(response.coefficient(shown, threshold), norm.dtype)
    # Zeros stay zeros, whatever a response makes of 0 / 0. What is too small for a norm
    # need not be zero: at a threshold of 0 it is made so.
    found = select(is_live, found, jnp.sign(threshold)) + alarm
    found = select(off, one, found)
    return lax.stop_gradient(found) if isinstance(response, Detached) else found


_compiled = jax.jit(_coefficient_of, static_argnums=(0, 3))


def at_least(least: float, limit: Limit) -> Limit:
    """The threshold, 0 if it is below `least`; at 0 its derivative is that from above.

    Of an array of NumPy one of NumPy: nothing is left to do in a program then.
    """
    if isinstance(limit, np.ndarray):
        return np.where(limit < least, np.zeros_like(limit), limit)
    return select((limit < least) & (limit != 0), jnp.zeros_like(limit), limit)


def as_limit(
    value: Number, dtype: DTypeLike, *, towards_zero: bool = False
) -> jax.Array | np.ndarray:
    """A threshold in `dtype`, of NumPy if it is a number or of NumPy already.

    A finite one stays finite, or it would touch nothing.
    """
    if not isinstance(value, (numbers.Real, np.ndarray)):
        return _narrowed(jnp.asarray(value), dtype, towards_zero=towards_zero)
    exact = np.asarray(value, np.float64)
    largest = float(jnp.finfo(dtype).max)
    bounded = np.where(np.isinf(exact), exact, np.clip(exact, -largest, largest))
    found = bounded.astype(dtype)
    if towards_zero:
        grew = np.abs(found.astype(np.float64)) > np.abs(exact)
        found = np.where(grew, np.nextafter(found, np.zeros_like(found)), found)
    return found


def _narrowed(value: jax.Array, dtype: DTypeLike, *, towards_zero: bool) -> jax.Array:
    found = value.astype(dtype)
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize < 8:
        return found
    largest = jnp.asarray(jnp.finfo(dtype).max, value.dtype)
    kept = jnp.where(jnp.isinf(value), value, jnp.clip(value, -largest, largest))
    found = kept.astype(dtype)
    if not towards_zero:
        return found
    grew = jnp.abs(found.astype(value.dtype)) > jnp.abs(value)
    return jnp.where(grew, jnp.nextafter(found, jnp.zeros_like(found)), found)


@functools.partial(jax.jit, static_argnames=("strict", "policy"))
def settled(
    original: jax.Array,
    x: jax.Array,
    coefficient: jax.Array,
    limit: jax.Array,
    like: jax.Array,
    *,
    strict: bool,
    policy: str,
) -> jax.Array:
    """`x` scaled, as the policy says; compiled, so that like leaves are traced once.

    2,000 leaves are then traced in 1 s, not 6.6.
    """
    if policy in ("zero", "drop"):
        # Before the product: inf * 0 would trip jax.debug_nans.
        x = jnp.where(coefficient == 0, jnp.zeros_like(x), x)
    out = scale(x, coefficient, like, towards_zero=strict)
    if policy != "drop":
        return out
    # An infinite threshold touches nothing, whatever the updates hold.
    kept = cast(original, like) if original.dtype != like.dtype else original
    return jnp.where(jnp.isinf(limit), kept, out)


def scale(
    x: jax.Array,
    coefficient: jax.Array,
    like: jax.Array,
    *,
    towards_zero: bool = False,
) -> jax.Array:
    """`x` times the coefficient in the dtype of `like`; `x` itself where that is 1."""
    whole = _leaves.widen(x)
    wide = _times(whole, coefficient)
    is_one = coefficient == 1
    if x.dtype == like.dtype and not towards_zero:
        # Before the cast: XLA on CPU selects bfloat16 in float32, and would cast twice,
        # and take a tenth longer.
        return cast(_kept(whole, wide, is_one), like)
    kept = x if x.dtype == like.dtype else cast(x, like, towards_zero=towards_zero)
    return _kept(kept, cast(wide, like, towards_zero=towards_zero), is_one)


@jax.custom_jvp
def _times(x: jax.Array, coefficient: jax.Array) -> jax.Array:
    """The product, whose derivative has no inf * 0 where an entry is not finite."""
    return x * coefficient.astype(x.dtype)


@_times.defjvp
def _times_jvp(primals, tangents):
    (x, coefficient), (dx, dcoefficient) = primals, tangents
    finite = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
    slope = finite * dcoefficient.astype(x.dtype)
    return _times(x, coefficient), dx * coefficient.astype(x.dtype) + slope


@jax.custom_jvp
def _kept(x: jax.Array, scaled: jax.Array, whole: jax.Array) -> jax.Array:
    """`x` where `whole`, with the derivative of `scaled`, which may bend there."""
    return select(whole, x, scaled)


@_kept.defjvp
def _kept_jvp(primals, tangents):
    return _kept(*primals), tangents[1]


def without_subnormals(x: jax.Array, where: jax.Array) -> jax.Array:
    """`x` with zeros, where asked for, in place of what a CPU takes for zeros."""
    if jnp.iscomplexobj(x):
        parts = (without_subnormals(part, where) for part in (jnp.real(x), jnp.imag(x)))
        return lax.complex(*parts)
    wide = _leaves.widen(x)
    tiny = jnp.asarray(jnp.finfo(wide.dtype).tiny, wide.dtype)
    return jnp.where(where & (jnp.abs(wide) < tiny), jnp.zeros_like(x), x)


def cast(wide: jax.Array, like: jax.Array, *, towards_zero: bool = False) -> jax.Array:
    """`wide` in the dtype of `like`, rounded to nearest or towards zero."""
    return _truncated(wide, like) if towards_zero else _leaves.narrow(wide, like)


@jax.custom_jvp
def _truncated(wide: jax.Array, like: jax.Array) -> jax.Array:
    """`wide` in the dtype of `like`, no part of it larger in magnitude than it was."""
    if jnp.iscomplexobj(wide):
        part = jnp.real(like)
        return lax.complex(
            _truncated(jnp.real(wide), part), _truncated(jnp.imag(wide), part)
        )
    tiny = jnp.asarray(jnp.finfo(wide.dtype).tiny, wide.dtype)
    # Subnormals of the wide dtype may have been rounded up already.
    wide = jnp.where(jnp.abs(wide) < tiny, jnp.zeros_like(wide), wide)
    out = wide.astype(like.dtype)
    grew = jnp.abs(out.astype(wide.dtype)) > jnp.abs(wide)
    return _leaves.narrow(jnp.where(grew, _one_step_down(out), out), like)


@_truncated.defjvp
def _truncated_jvp(primals, tangents):
    wide, like = primals
    return _truncated(wide, like), tangents[0].astype(like.dtype)


def _one_step_down(x: jax.Array) -> jax.Array:
    """The next number of the dtype towards zero; formats are sign and magnitude."""
    bits = jnp.finfo(x.dtype).bits
    if bits < 8:
        # No integers of that width to count in: there are few numbers, so halve.
        return (x.astype(jnp.float32) * 0.5).astype(x.dtype)
    whole = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[bits]
    pattern = lax.bitcast_convert_type(x, whole)
    lower = lax.bitcast_convert_type(pattern - jnp.asarray(1, whole), x.dtype)
    magnitude = pattern & jnp.asarray(2 ** (bits - 1) - 1, whole)
    return jnp.where(magnitude <= 1, jnp.zeros_like(x), lower)
