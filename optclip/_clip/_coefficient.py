"""Compute the coefficients that leaves are multiplied by, from norms and thresholds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from optclip._arrays._batching import Batched
from optclip._arrays._numerics import as_array, select
from optclip._arrays._types import Number
from optclip._clip._clip import Clip
from optclip._clip._layout import Layout
from optclip.responses import Detached, Response
from optclip.responses._interface import is_builtin

# Half the width of the band that strict clipping keeps clear, 1,024 roundings of 2**-24
# of the norm. In such roundings, the error of a sum is at most:
#   186  in a leaf: XLA on CPU adds fewer than 4,096 elements in a tree of sums of 32,
#        31 roundings per level, and six levels hold 2**30 elements; it adds more
#        elements in library kernels, where no probed path had more than 46 additions,
#     5  in merging 32 small leaves by pairs,
#   252  in rows of 64 leaves, two levels of 63 for the merged and two for the large,
#     5  in the square, the root, the quotient and the product.
# The error of a norm of order p is 1 / p of that: 224 for p = 2, 448 for p = 1, 896 for
# p = 0.5. For p = 2 squares flushed to zero add 512, see `_action`. Smaller p are not
# covered, nor are CPU meshes and axes that are not adjacent, which add in other orders.
_BAND = {"float32": 2.0**-14, "float64": 2.0**-40}


def coefficients_of(clip: Clip, norms: Batched, thresholds: Batched) -> Batched:
    """Return the coefficient of each norm."""
    if is_builtin(clip.response):
        return norms.map(lambda *pair: respond(clip, *pair), thresholds)
    # A user's response may expect scalars, so it gets one norm at a time.
    pairs = zip(norms.entries(), thresholds.entries(), strict=True)
    return norms.with_entries([respond(clip, *pair) for pair in pairs])


def one_where_unscaled(layout: Layout, coefficients: Batched) -> Batched:
    """Return the coefficients, 1 in blocks that `clip_mask` leaves unscaled."""
    scaled = {block for *_, block in layout.scaled()}
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
    # changes nothing. A rule's inf never meets such a norm, since `thresholds/_memory`
    # replaces it there.
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
    response: Response, norm: jax.Array, threshold: jax.Array, eps: Number
) -> jax.Array:
    """Return the coefficient; NaN at a non-finite norm unless the threshold is inf."""
    is_eager = not any(isinstance(x, Tracer) for x in (norm, threshold))
    if is_eager and is_builtin(response) and _is_hashable((response, eps)):
        # An eager call then takes one dispatch, not twenty.
        return _compiled(response, norm, threshold, eps)
    return _uncompiled(response, norm, threshold, eps)


def _is_hashable(value: object) -> bool:
    """Return whether a value can be a static argument: it contains no array."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _uncompiled(
    response: Response, norm: jax.Array, threshold: jax.Array, eps: Number
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
    if not (isinstance(eps, (int, float)) and eps == 0):
        added = as_array(eps).astype(norm.dtype)
        # A traced `eps` is not checked, and a negative one would disable clipping.
        divisor = divisor + select(added < 0, jnp.zeros_like(added), added)
    coefficient = jnp.asarray(response.coefficient(divisor, threshold), norm.dtype)
    # A block whose norm counts as 0 is unchanged, except at a threshold of 0, where its
    # possibly tiny elements become zero.
    coefficient = select(is_positive, coefficient, jnp.sign(threshold)) + alarm
    coefficient = select(is_off, one, coefficient)
    if isinstance(response, Detached):
        return lax.stop_gradient(coefficient)
    return coefficient


_compiled = jax.jit(_uncompiled, static_argnums=(0, 3))
