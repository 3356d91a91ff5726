"""Scale leaves by coefficients: one multiplication in float32 or wider, one cast back.

Unclipped leaves are bit-identical: the coefficient is then 1 and the leaf is selected.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .._arrays import _leaf, _leaves, _placement, _validate, _xla
from .._arrays._batching import MANY, Batched
from .._arrays._leaf import Leaf
from .._arrays._numerics import as_array, select, with_subnormals
from .._arrays._types import LeafLike, Number
from .._responses import BaseResponse, UserResponse
from ._clip import Action, Clip, Decision, Layout

# The primals and tangents of functions of two and of three arrays.
_Pair = tuple[jax.Array, jax.Array]
_Triple = tuple[jax.Array, jax.Array, jax.Array]

# Half the width of the band that strict clipping keeps clear, 1,024 roundings of 2**-24
# of the norm. In such roundings, the error of a sum is at most:
#   186  in a leaf: XLA on CPU adds fewer than 4,096 elements in a tree of sums of 32,
#        31 roundings per level, and six levels hold 2**30 elements; it adds more
#        elements in library kernels, where no probed path had more than 46 additions,
#     5  in merging 32 small leaves by pairs,
#   252  in rows of 64 leaves, two levels of 63 for the merged and two for the large,
#     5  in the square, the root, the quotient and the product.
# A GPU adds in other orders, and fewer. A thread adds at most 16 elements of a row, and
# a tree of 10 levels the sums of 1,024 threads; rows, and rows of their sums, of two
# levels as XLA splits these, hold 2**40 elements in 78 roundings. For columns they are
# 128 per thread, 5 levels and 31 parts, where XLA does not split the column. The other
# terms are the same.
# The error of a norm of order p is 1 / p of that: 224 for p = 2, 448 for p = 1, 896 for
# p = 0.5. For p = 2 squares flushed to zero add 512, see `_clip._LEAST_STRICT`. Smaller
# p are not covered, nor are CPU meshes and axes that are not adjacent, which add in
# other orders.
_BAND = {"float32": 2.0**-14, "float64": 2.0**-40}


class Scale(Action):
    """Multiply each leaf by the coefficient of its block."""

    def apply(self, decision: Decision) -> tuple[dict[int, LeafLike], Batched]:
        """Return the scaled leaves by index, and the coefficients."""
        clip, layout, norms = decision.clip, decision.layout, decision.norms
        coefficients = coefficients_of(clip, norms, decision.thresholds)
        coefficients = _stored(coefficients, len(layout.scaled))
        of_block = coefficients.entries()
        scaled = {}
        for i, leaf, owner in layout.scaled:
            block, k = layout.blocks[owner], of_block[owner]
            k = k if block.stacked is None else block.along(leaf, k)
            scaled[i] = scaled_leaf(clip, leaf, k)
        return scaled, one_where_unscaled(layout, coefficients)


def _stored(coefficients: Batched, num_leaves: int) -> Batched:
    """Return the coefficients, which XLA on CPU would recompute for each leaf.

    It would compute those of slices again for each element. A vector of coefficients is
    stored when its entries are looked up, and an eager call stores each number.
    """
    (first, *others) = coefficients.values or [None]
    if num_leaves >= MANY and isinstance(first, Tracer) and not others:
        return coefficients.map(_xla.materialized)
    return coefficients.map(lambda k: _xla.materialized_once(k) if k.ndim else k)


SCALE: Scale = Scale()


def scaled_leaf(clip: Clip, leaf: Leaf, coefficient: jax.Array) -> LeafLike:
    """Return a leaf times its coefficient."""
    x = _leaves.as_jax(leaf.array)
    coefficient = _placement.beside(coefficient, x)
    how = {"strict": clip.strict, "zeroes_nonfinite": clip.nonfinite == "zero"}
    if leaf.matrix is None:
        return scaled_or_zeroed(x, coefficient, x, **how)
    like = leaf.like
    if not coefficient.ndim and not clip.strict:
        data = scaled_or_zeroed(like, coefficient, like, **how)
        return _leaf.with_data(leaf.value, data)
    # Slices and strict rounding need the sums of duplicates.
    out = _leaf.in_range(scaled_or_zeroed(x, coefficient, like, **how), x)
    return _leaf.wrapped(jnp.all(coefficient == 1), leaf.value, leaf.matrix, out)


def coefficients_of(clip: Clip, norms: Batched, thresholds: Batched) -> Batched:
    """Return the coefficient of each norm."""
    return norms.map(lambda *pair: respond(clip, *pair), thresholds)


def one_where_unscaled(layout: Layout, coefficients: Batched) -> Batched:
    """Return the coefficients, 1 in blocks that `clip_mask` leaves unscaled."""
    scaled = {block for *_, block in layout.scaled}
    if len(scaled) == len(layout.blocks):
        return coefficients
    entries = enumerate(coefficients.entries())
    return coefficients.with_entries(
        [k if i in scaled else jnp.ones_like(k) for i, k in entries]
    )


def respond(clip: Clip, norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return the coefficient of one block, by its response and its policy."""
    if clip.nonfinite != "zero":
        return _outside_band(clip, norm, threshold)
    is_finite = jnp.isfinite(norm)
    # The norm is replaced first, since an intermediate NaN would trip jax.debug_nans.
    finite_norm = jnp.where(is_finite, norm, jnp.zeros_like(norm))
    coefficient = _outside_band(clip, finite_norm, threshold)
    # A NaN threshold stays NaN, since it does not come from a gradient. A user's inf
    # changes nothing. A rule's inf never meets such a norm, since it is replaced there
    # in `_thresholds/_learning`.
    is_zeroed = ~is_finite & jnp.isfinite(threshold)
    return jnp.where(is_zeroed, jnp.zeros_like(coefficient), coefficient)


def _outside_band(clip: Clip, norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return the coefficient; in strict clipping, one that keeps the band clear."""
    if not clip.strict:
        return _coefficient(clip.response, norm, threshold, clip.eps)
    band = _BAND[norm.dtype.name]
    upper, lower = threshold * (1 - band), threshold * (1 - 2 * band)
    outer = _coefficient(clip.response, norm, upper, clip.eps)
    inner = _coefficient(clip.response, norm, lower, clip.eps)
    # Below the band the coefficient is 1; inside and above it, the norm is scaled to
    # the lower edge.
    return jnp.where((outer == 1) & ~jnp.isnan(inner), outer, inner)


def _coefficient(
    response: BaseResponse, norm: jax.Array, threshold: jax.Array, eps: Number
) -> jax.Array:
    """Return the coefficient; NaN at a non-finite norm unless the threshold is inf."""
    is_eager = not any(isinstance(x, Tracer) for x in (norm, threshold))
    inner = getattr(response, "response", response)  # Of a detached response.
    if (is_eager or norm.ndim) and not isinstance(inner, UserResponse):
        # An eager call then takes one dispatch, not twenty, and the slices of leaves
        # are traced once per shape: a fifth of AGC's program for 291 leaves. Numbers
        # are operands, so that other numbers use the same program.
        static, numbers = _without_numbers(response)
        operand = None if _is_zero(eps) else as_array(eps)
        return _compiled(static, numbers, norm, threshold, operand)
    return _uncompiled(response, norm, threshold, eps)


def _without_numbers(response: Any) -> tuple[BaseResponse, dict[str, Any]]:
    """Return a response with 1 in place of each number, and the numbers by field."""
    values = {x.name: getattr(response, x.name) for x in dataclasses.fields(response)}
    numbers: dict[str, Any] = {
        name: as_array(x) for name, x in values.items() if _validate.is_number(x)
    }
    nested = {
        name: _without_numbers(x)
        for name, x in values.items()
        if isinstance(x, BaseResponse)
    }
    blank = dict.fromkeys(numbers, 1.0) | {name: x for name, (x, _) in nested.items()}
    if not blank:
        return response, {}
    numbers |= {name: x for name, (_, x) in nested.items()}
    return dataclasses.replace(response, **blank), numbers


def _with_numbers(response: Any, numbers: dict[str, Any]) -> BaseResponse:
    """Return the response that `_without_numbers` has taken apart."""
    values = {
        name: _with_numbers(getattr(response, name), value)
        if isinstance(value, dict)
        else value
        for name, value in numbers.items()
    }
    return dataclasses.replace(response, **values) if values else response


def _is_zero(eps: Number) -> bool:
    return isinstance(eps, (int, float)) and eps == 0


def _uncompiled(
    response: BaseResponse, norm: jax.Array, threshold: jax.Array, eps: Number | None
) -> jax.Array:
    one = jnp.ones_like(norm)
    is_positive = norm > 0
    is_off = threshold == jnp.inf
    # The alarm is 0, or NaN for a non-finite norm or threshold, so neither is silent.
    # It is computed, since a NaN constant would trip jax.debug_nans on finite input.
    # Its derivative is stopped: the derivative of norm - norm is g - g, and its
    # rounding would swallow a smaller true derivative.
    finite_threshold = select(is_off, one, threshold)
    alarm = lax.stop_gradient((norm - norm) * finite_threshold)
    # Responses never receive a norm of 0, so none divides by it.
    divisor = select(is_positive, norm, one)
    if eps is not None and not _is_zero(eps):
        added = as_array(eps).astype(norm.dtype)
        # A traced `eps` is not checked, and a negative one would disable clipping.
        divisor = divisor + select(added < 0, jnp.zeros_like(added), added)
    coefficient = jnp.asarray(response.coefficient(divisor, threshold), norm.dtype)
    # A block whose norm counts as 0 is unchanged, except at a threshold of 0, where its
    # possibly tiny elements become zero.
    of_zero = one if response.signed else jnp.sign(threshold)
    coefficient = select(is_positive, coefficient, of_zero) + alarm
    return select(is_off, one, coefficient)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(
    static: BaseResponse,
    numbers: dict[str, Any],
    norm: jax.Array,
    threshold: jax.Array,
    eps: jax.Array | None,
) -> jax.Array:
    return _uncompiled(_with_numbers(static, numbers), norm, threshold, eps)


# Compiled, so leaves of one type are traced once: 2,000 leaves take 1 s, not 6.6.
@functools.partial(jax.jit, static_argnames=("strict", "zeroes_nonfinite"))
def scaled_or_zeroed(
    x: jax.Array,
    coefficient: jax.Array,
    like: jax.Array,
    *,
    strict: bool,
    zeroes_nonfinite: bool,
) -> jax.Array:
    """Return `x` scaled, in the dtype of `like`."""
    # XLA on CPU would widen the leaf for the norm and keep the copy.
    x = _xla.read_again(x)
    if zeroes_nonfinite:
        # The select comes before the product: inf * 0 would trip jax.debug_nans.
        x = jnp.where(coefficient == 0, jnp.zeros_like(x), x)
    return scale(x, coefficient, like, towards_zero=strict)


def scale(
    x: jax.Array,
    coefficient: jax.Array,
    like: jax.Array,
    *,
    towards_zero: bool = False,
) -> jax.Array:
    """Return `x` times the coefficient in the dtype of `like`; `x` where that is 1."""
    # The product is rounded once, in the cast.
    widened = _leaves.widen(x)
    if towards_zero and coefficient.dtype == jnp.float64:
        # The strict band of a float64 coefficient does not cover a float32 product.
        widened = _leaves.widen(x, jnp.float64)
    scaled = _times(widened, coefficient)
    is_one = coefficient == 1
    if x.dtype == like.dtype and not towards_zero:
        # The select comes before the cast: XLA on CPU selects bfloat16 in float32, so
        # it would cast twice and take a tenth longer.
        return cast(_unclipped_or_scaled(widened, scaled, is_one), like)
    unclipped = x
    if x.dtype != like.dtype:
        unclipped = cast(x, like, towards_zero=towards_zero)
    clipped = cast(scaled, like, towards_zero=towards_zero)
    return _unclipped_or_scaled(unclipped, clipped, is_one)


# JAX's own derivative would compute inf * 0 where an element is not finite.
@jax.custom_jvp
def _times(x: jax.Array, coefficient: jax.Array) -> jax.Array:
    """Return the product; its slope in the coefficient skips non-finite elements."""
    return x * coefficient.astype(x.dtype)


@_times.defjvp
def _times_jvp(primals: _Pair, tangents: _Pair) -> _Pair:
    (x, coefficient), (dx, dcoefficient) = primals, tangents
    finite = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
    slope = finite * dcoefficient.astype(x.dtype)
    return _times(x, coefficient), dx * coefficient.astype(x.dtype) + slope


# JAX would differentiate the selected `x` and return 1 even at a threshold, where the
# coefficient is 1 and has a kink.
@jax.custom_jvp
def _unclipped_or_scaled(
    x: jax.Array, scaled: jax.Array, is_one: jax.Array
) -> jax.Array:
    """Return `x` where the coefficient is 1, with the derivative of `scaled`."""
    return select(is_one, x, scaled)


@_unclipped_or_scaled.defjvp
def _unclipped_or_scaled_jvp(primals: _Triple, tangents: _Triple) -> _Pair:
    return _unclipped_or_scaled(*primals), tangents[1]


def without_subnormals(x: jax.Array, where: jax.Array) -> jax.Array:
    """Return `x` with 0 for subnormal numbers where `where` is set.

    A CPU that flushes subnormal numbers compares them as zeros.
    """
    if jnp.iscomplexobj(x):
        parts = (without_subnormals(part, where) for part in (jnp.real(x), jnp.imag(x)))
        return lax.complex(*parts)
    wide = _leaves.widen(x)
    tiny = jnp.asarray(jnp.finfo(wide.dtype).tiny, wide.dtype)
    return jnp.where(where & (jnp.abs(wide) < tiny), jnp.zeros_like(x), x)


def cast(wide: jax.Array, like: jax.Array, *, towards_zero: bool = False) -> jax.Array:
    """Return `wide` in the dtype of `like`, rounded to nearest or towards zero."""
    return _truncated(wide, like) if towards_zero else _leaves.narrow(wide, like)


# The steps through integers have no derivative, so rounding gets the derivative 1.
@jax.custom_jvp
def _truncated(wide: jax.Array, like: jax.Array) -> jax.Array:
    """Return `wide` in the dtype of `like`, no part of it larger in magnitude.

    A finite number above the largest of the dtype becomes the largest.
    """
    if jnp.iscomplexobj(wide):
        part = jnp.real(like)
        return lax.complex(
            _truncated(jnp.real(wide), part), _truncated(jnp.imag(wide), part)
        )
    info, of_wide = jnp.finfo(like.dtype), jnp.finfo(wide.dtype)
    # Subnormals of the wide dtype may have been rounded up already, so they become 0.
    wide = without_subnormals(wide, jnp.array(True))
    if like.dtype == wide.dtype:
        return _leaves.narrow(wide, like)
    # Formats are sign and magnitude, so the last digits can be cleared.
    digits = 2 ** (of_wide.nmant - info.nmant) - 1
    whole = jnp.uint64 if of_wide.bits == 64 else jnp.uint32
    pattern = lax.bitcast_convert_type(wide, whole) & ~jnp.asarray(digits, whole)
    short = lax.bitcast_convert_type(pattern, wide.dtype)
    short = with_subnormals(wide, short, like, jnp.trunc)
    largest = float(info.max)
    short = jnp.where(jnp.isfinite(wide), jnp.clip(short, -largest, largest), wide)
    return _leaves.narrow(short, like)


@_truncated.defjvp
def _truncated_jvp(primals: _Pair, tangents: _Pair) -> _Pair:
    wide, like = primals
    return _truncated(wide, like), tangents[0].astype(like.dtype)
