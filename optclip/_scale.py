"""APPLY: one multiplication in float32 or wider, one cast back.

Where the coefficient is exactly 1 the leaf is selected, not multiplied: it stays as
it was to the bit, subnormals included.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optclip import _leaves
from optclip._arithmetic import ratio
from optclip.norms import Measured
from optclip.responses import Response

# How many times the threshold a norm may be before the coefficient is split in two:
# beyond it c / n could vanish, and a response that squares the ratio overflow.
_FAR = {"float32": 2.0**60, "float64": 2.0**500}


class Factor(NamedTuple):
    """A coefficient as `near * far`, so that a tiny one does not vanish.

    `far` is 1 unless the norm is more than 2**60 times the threshold.
    """

    near: jax.Array
    far: jax.Array

    @property
    def coefficient(self) -> jax.Array:
        return self.near * self.far


def respond(
    response: Response, measured: Measured, threshold: jax.Array, eps: Any
) -> Factor:
    """The coefficient for a norm, 1 for a threshold of inf, NaN if it is not finite."""
    root, unit = measured
    largest = jnp.asarray(jnp.finfo(root.dtype).max, root.dtype)
    tiny = jnp.asarray(jnp.finfo(root.dtype).tiny, root.dtype)
    finite = jnp.isfinite(root)
    off = jnp.isinf(threshold)
    # 0, or NaN to be loud; a NaN constant would trip jax.debug_nans on healthy input.
    alarm = (root - root) + 0 * jnp.where(off, jnp.zeros_like(threshold), threshold)
    # Its derivative is g - g, which would swallow the smaller true one.
    alarm = jax.lax.stop_gradient(alarm)
    root = jnp.where(finite, root, jnp.zeros_like(root))
    seen = jnp.minimum(root * unit, largest)
    cap = jnp.maximum(threshold, tiny) * _FAR[root.dtype.name]
    near_norm = jnp.minimum(seen, cap)
    is_far = (near_norm < seen) | (root * unit > largest)
    ones = jnp.ones_like(root)
    # The norm the response sees over the true one: both halves are normal numbers.
    # Times the inverse of the unit: XLA turns a / b / c into a / (b * c), here inf.
    in_units = near_norm * jnp.where(unit == 1, ones, 1 / unit)
    far = jnp.where(is_far, ratio(in_units, jnp.where(is_far, root, ones)), ones)
    # Zeros stay zeros, whatever a response makes of 0 / 0.
    still = near_norm == 0
    shown = jnp.where(still, ones, near_norm) + jnp.asarray(eps).astype(root.dtype)
    near = jnp.where(still, ones, response.coefficient(shown, threshold))
    near = jnp.where(off, ones, near + alarm)
    return Factor(near, jnp.where(off, ones, far))


def scale(x: jax.Array, factor: Factor, *, towards_zero: bool = False) -> jax.Array:
    """`x` times the factor, in the dtype of `x`; `x` itself where the factor is 1."""
    near, far = factor
    wide = _leaves.widen(x)
    # The select keeps XLA from multiplying the two halves first, which may give 0.
    wide = jnp.where(far == 1, wide, wide * far.astype(wide.dtype))
    out = cast(wide * near.astype(wide.dtype), x, towards_zero=towards_zero)
    return jnp.where((near == 1) & (far == 1), x, out)


def cast(wide: jax.Array, like: jax.Array, *, towards_zero: bool = False) -> jax.Array:
    """`wide` in the dtype of `like`, rounded to nearest or towards zero."""
    return _truncated(wide, like) if towards_zero else _leaves.narrow(wide, like)


def _truncated(wide: jax.Array, like: jax.Array) -> jax.Array:
    """`wide` in the dtype of `like`, no part of it larger in magnitude than it was."""
    if jnp.iscomplexobj(wide):
        part = jnp.real(like)
        return jax.lax.complex(
            _truncated(jnp.real(wide), part), _truncated(jnp.imag(wide), part)
        )
    tiny = jnp.asarray(jnp.finfo(wide.dtype).tiny, wide.dtype)
    # Subnormals of the wide dtype may have been rounded up already.
    wide = jnp.where(jnp.abs(wide) < tiny, jnp.zeros_like(wide), wide)
    out = wide.astype(like.dtype)
    grew = jnp.abs(out.astype(wide.dtype)) > jnp.abs(wide)
    return _leaves.narrow(jnp.where(grew, _one_step_down(out), out), like)


def _one_step_down(x: jax.Array) -> jax.Array:
    """The next number of the dtype towards zero; formats are sign and magnitude."""
    bits = jnp.finfo(x.dtype).bits
    if bits < 8:
        # No integers of that width to count in: there are few numbers, so halve.
        return (x.astype(jnp.float32) * 0.5).astype(x.dtype)
    whole = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[bits]
    pattern = jax.lax.bitcast_convert_type(x, whole)
    lower = jax.lax.bitcast_convert_type(pattern - jnp.asarray(1, whole), x.dtype)
    magnitude = pattern & jnp.asarray(2 ** (bits - 1) - 1, whole)
    return jnp.where(magnitude <= 1, jnp.zeros_like(x), lower)
