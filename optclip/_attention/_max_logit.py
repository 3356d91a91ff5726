"""Compute the largest attention logit of each head, in blocks of queries."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import _axis_names, _collectives, _leaves, _validate
from .._arrays._numerics import promotable
from .._arrays._types import AxisName, Number

# With a causal mask, the queries of a span are multiplied only by the keys before its
# end. Four spans compute 5/8 of all products; more would lengthen the program for less.
_SPANS = 4


def max_attention_logit(
    query: jax.Array,
    key: jax.Array,
    *,
    scale: Number | None = None,
    mask: jax.Array | Literal["causal"] | None = None,
    axis_name: AxisName | None = None,
    block_size: int = 128,
) -> jax.Array:
    """Compute the largest scaled attention logit of each head.

    The result is `max(scale * q @ k)` over the batch, queries and attended keys. The
    full logits are never stored.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import max_attention_logit
      >>> query, key = 3 * jnp.ones((2, 5, 4, 16)), jnp.ones((2, 5, 2, 16))
      >>> print(max_attention_logit(query, key, mask="causal"))
      [12. 12. 12. 12.]

    Args:
      query: Queries after rotary embedding, `(..., T, H, D)`. On a mesh with Explicit
        axes, only the batch and the heads may be split.
      key: Keys, `(..., S, G, D)`. G divides H; query heads that share a key are
        adjacent.
      scale: Factor of the product, the same as in the model. Default: `1 / sqrt(D)`.
      mask: Keys that each query attends to: bools that broadcast to `(..., H, T, S)`,
        or `"causal"`. Default: None, all.
      axis_name: Mapped axis or axes over which the maximum is also taken. Default:
        None.
      block_size: Largest number of queries per block; smaller uses less memory.

    Returns:
      An array `(H,)`, float32, or float64 for float64 inputs. It is NaN for NaN inputs,
      and -inf for a head whose queries attend to nothing. Its derivative is zero.
    """
    block_size = _validate.length("block_size", block_size)
    _check(query, key)
    if scale is not None:
        _validate.number("scale", scale, negative=True)
        _validate.broadcasts("scale", jnp.shape(scale), (), "one product")
    if axis_name is not None:
        _axis_names.check(axis_name, by_leaf=False)
    # The logits are constant to derivatives, so that measuring them in a loss does not
    # change its gradient.
    query, key = lax.stop_gradient((jnp.asarray(query), jnp.asarray(key)))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else promotable(scale)
    attended, is_causal = _mask(mask, query, key), isinstance(mask, str)
    logits = _by_head(
        query, key, lax.stop_gradient(factor), attended, block_size, is_causal
    )
    if axis_name is None:
        return logits
    axes = _axis_names.split_axes(logits, axis_name)
    return _collectives.reduced_over(_collectives.over_devices, logits, axes)


def _check(query: jax.Array, key: jax.Array) -> None:
    for name, x, letters in (("query", query, "T, H, D"), ("key", key, "S, G, D")):
        wanted = f"a floating-point array of shape (..., {letters})"
        is_real = _validate.is_number(x) and _leaves.is_floating(x)
        _validate.require(name, x, is_real, wanted, error=TypeError)
        if jnp.ndim(x) < 3 or not jnp.shape(x)[-1]:
            raise ValueError(
                f"`{name}` must be {wanted}, got the shape {jnp.shape(x)}. Split the"
                " features into heads first."
            )
    (*batch, length, heads, width), (*other, _, groups, depth) = query.shape, key.shape
    if not isinstance(length, int) or not isinstance(width, int):
        raise ValueError(
            "The length and the features of `query` must be static under jax.export,"
            f" got the shape {query.shape}. Export them with static sizes; batch axes"
            " and the length of `key` may be symbolic."
        )
    if batch != other or width != depth:
        raise ValueError(
            "`key` must have the batch axes and the features of `query`, got the shapes"
            f" {key.shape} and {query.shape}. Pass (..., length, heads, features)."
        )
    if not groups or heads % groups:
        raise ValueError(
            "The number of heads of `key` must divide the number of heads of `query`,"
            f" got {groups} and {heads}. Pass (..., length, heads, features)."
        )


def _mask(mask: object, query: jax.Array, key: jax.Array) -> jax.Array | None:
    """Return the mask with all of its axes, of size 1 where it broadcasts, or None."""
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return None
    wanted = "bools that broadcast to (..., H, T, S), 'causal', or None"
    advice = (
        "For a mask of 0 and 1 pass mask > 0; for one added to the logits, mask > -1."
    )
    is_bool = getattr(mask, "dtype", None) == jnp.bool_
    _validate.require("mask", mask, is_bool, wanted, advice, TypeError)
    attended = jnp.asarray(mask)
    full = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    if not _validate.fits(attended.shape, full):
        raise ValueError(
            f"`mask` must be {wanted}, here {full}, got the shape {attended.shape}."
            " Add an axis of size 1 for the heads, queries or keys that share a mask."
        )
    return attended.reshape((1,) * (len(full) - attended.ndim) + attended.shape)


# The function is jitted because an eager call would compile the loop over blocks each
# time it runs.
@functools.partial(jax.jit, static_argnums=(4, 5))
def _by_head(
    query: jax.Array,
    key: jax.Array,
    scale: Number,
    mask: jax.Array | None,
    block_size: int,
    is_causal: bool,
) -> jax.Array:
    *batch, length, heads, width = query.shape
    groups = key.shape[-2]
    is_double = any(_leaves.real_dtype(x.dtype) == jnp.float64 for x in (query, key))
    dtype = jnp.float64 if is_double else jnp.float32
    grouped = query.reshape(*batch, length, groups, heads // groups, width)
    spans = _SPANS if is_causal else 1
    block = min(block_size, -(-length // spans))
    is_narrow = all(map(_leaves.is_narrow, (query, key)))
    precision = None if is_narrow else lax.Precision.HIGHEST

    def largest(seen: jax.Array, start: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(grouped, start, block, -4)
        logits = jnp.einsum(
            "...tgrd,...sgd->...grts", part, seen,
            precision=precision, preferred_element_type=dtype,
        ) * jnp.asarray(scale, dtype)  # fmt: skip
        attended = mask
        if is_causal:
            last = start + jnp.arange(block)[:, None]
            attended = (jnp.arange(seen.shape[-3])[None, :] <= last)[None]
        elif mask is not None and mask.shape[-2] > 1:
            attended = lax.dynamic_slice_in_dim(mask, start, block, -2)
        if attended is not None:
            *lead, mask_heads, rows, columns = attended.shape
            ways = (groups, heads // groups) if mask_heads > 1 else (1, 1)
            attended = attended.reshape(*lead, *ways, rows, columns)
            # Masked pairs are -inf, so they are never the maximum.
            logits = jnp.where(attended, logits, -jnp.inf)
        axes = (*range(len(batch)), -2, -1)
        # On Explicit axes a reshape cannot also remove axes of length 1.
        peaks = _collectives.largest(logits, axes, -math.inf)
        return jnp.squeeze(peaks, axes).reshape(heads)

    # The last block starts earlier if it would extend past the length.
    starts = np.minimum(np.arange(0, length, max(block, 1)), length - block)
    maxima = []
    for span in np.array_split(starts, min(spans, max(len(starts), 1))):
        end = key.shape[-3] if spans == 1 else int(span.max(initial=0)) + block
        one = functools.partial(largest, key[..., :end, :, :])
        maxima.append(lax.map(one, jnp.asarray(span)))
    return _collectives.largest(jnp.concatenate(maxima), (0,), -math.inf).reshape(heads)
