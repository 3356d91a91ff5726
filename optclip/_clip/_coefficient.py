"""From norms and thresholds to the coefficients that leaves are multiplied by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from optclip._arrays._batching import Batched
from optclip._arrays._numerics import select
from optclip._arrays._types import Number
from optclip._clip._clip import Clip
from optclip.responses import Detached, Response
from optclip.responses._interface import is_ours

# Half the width of the band that strict clipping keeps clear, 1,024 roundings of 2**-24
# of the norm. A sum loses at most, in such roundings:
#   186  in a leaf: XLA on CPU adds fewer than 4,096 elements in a tree of sums of 32,
#        31 roundings a level, and six levels hold 2**30 elements; more elements it adds
#        in library kernels, where no probed path had more than 46 additions,
#     5  in merging 32 small leaves by pairs,
#   252  in rows of 64 leaves, two levels of 63 for the merged and two for the large,
#     5  in the square, the root, the quotient and the product.
# A norm of order p loses 1 / p of that: 224 for p = 2, 448 for p = 1, 896 for p = 0.5;
# smaller p are not covered. For p = 2 squares flushed to zero add 512, see below.
# Meshes of CPUs and axes that are not adjacent are added in other orders: not covered.
_BAND = {"float32": 2.0**-14, "float64": 2.0**-40}


def coefficients_of(clip: Clip, norms: Batched, thresholds: Batched) -> Batched:
    """Return the coefficient of each norm."""
    if is_ours(clip.response):
        return norms.map(lambda *pair: respond(clip, *pair), thresholds)
    # A user's response may expect scalars, so it gets one norm at a time.
    pairs = zip(norms.entries(), thresholds.entries(), strict=True)
    return norms.with_entries([respond(clip, *pair) for pair in pairs])


def respond(clip: Clip, norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return the coefficient of one block, by its response and its policy."""
    if clip.nonfinite != "zero":
        return _banded(clip, norm, threshold)
    bad = ~jnp.isfinite(norm)
    # The norm is replaced first, since a NaN on the way would trip jax.debug_nans.
    known = jnp.where(bad, jnp.zeros_like(norm), norm)
    coefficient = _banded(clip, known, threshold)
    # A NaN threshold stays NaN, since it does not come from a gradient.
    is_zeroed = bad & jnp.isfinite(threshold)
    return jnp.where(is_zeroed, jnp.zeros_like(coefficient), coefficient)


def _banded(clip: Clip, norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return the coefficient; in strict clipping, one that keeps the band clear."""
    if not clip.strict:
        return coefficient_of(clip.response, norm, threshold, clip.eps)
    band = _BAND[norm.dtype.name]
    upper, lower = threshold * (1 - band), threshold * (1 - 2 * band)
    outer = coefficient_of(clip.response, norm, upper, clip.eps)
    inner = coefficient_of(clip.response, norm, lower, clip.eps)
    # Below the band nothing is done; in it and above, the norm is scaled to its lower
    # edge.
    return jnp.where((outer == 1) & ~jnp.isnan(inner), outer, inner)


def coefficient_of(
    response: Response, norm: jax.Array, threshold: jax.Array, eps: Number
) -> jax.Array:
    """What to multiply by: 1 for a threshold of inf, NaN if a norm is not finite."""
    is_eager = not any(isinstance(x, Tracer) for x in (norm, threshold))
    if is_eager and is_ours(response) and _is_hashable((response, eps)):
        # One dispatch, not twenty.
        return _compiled(response, norm, threshold, eps)
    return _coefficient_of(response, norm, threshold, eps)


def _is_hashable(value: object) -> bool:
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
