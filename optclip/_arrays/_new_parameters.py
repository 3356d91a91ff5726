"""Parameters after an update, and the update that leads to given parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from . import _leaves


def applied(param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the new parameter before it is rounded to the dtype of `param`."""
    dtypes = (_leaves.real_dtype(x.dtype) for x in (param, update))
    real = jnp.promote_types(*dtypes)
    return _leaves.widen(param, real) + _leaves.widen(update, real)


def update_to(new: jax.Array, param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the difference from `param` to `new`, in the dtype of `update`.

    `new` is rounded to the dtype of `param` first: applying the difference then leads
    to this rounded number, unless it is much smaller than `param`.
    """
    rounded = _rounded(new, param)
    return _leaves.narrow(rounded - param.astype(rounded.dtype), update)


def _rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` rounded to the precision of `like`, in its own dtype."""
    if x.dtype == like.dtype:
        return x
    if jnp.iscomplexobj(x):
        part = jnp.real(like)
        return lax.complex(_rounded(jnp.real(x), part), _rounded(jnp.imag(x), part))
    # XLA may remove a cast to a narrow dtype and back, but never this operation.
    info = jnp.finfo(like.dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
