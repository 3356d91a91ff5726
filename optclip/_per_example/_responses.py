"""Define responses for per-example gradients, which bound each norm by C."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._responses import (
    BY_NAME,
    BaseResponse,
    Hard,
    ResponseLike,
    as_response,
    is_same_always,
)

ExampleResponse = ResponseLike | Literal["auto_s", "unit"]

# The largest norm of 2**40 elements whose squares are flushed to zero. It is added to
# the measured norm, so that a response above 1 cannot enlarge such elements beyond C.
_FLUSHED = {"float32": 2.0**-43, "float64": 2.0**-480}


@dataclasses.dataclass(frozen=True)
class AutoS(BaseResponse):
    """Scale every gradient by `c / (n + gamma)`, as in AUTO-S."""

    gamma: float = 0.01

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        whole = threshold / (norm + self.gamma)
        return jnp.where(jnp.isinf(threshold), jnp.ones_like(norm), whole)


@dataclasses.dataclass(frozen=True)
class _Capped(BaseResponse):
    """Limit a response to `c / n`."""

    response: BaseResponse

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        uncapped = jnp.asarray(self.response.coefficient(norm, threshold), norm.dtype)
        least = jnp.asarray(_FLUSHED[norm.dtype.name], norm.dtype)
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        most = jnp.minimum(threshold / (norm + least), largest)
        return jnp.clip(uncapped, -most, most)


# Exclude "proportional", which compares norms. "unit" divides after the sum.
_BY_NAME = {name: how for name, how in BY_NAME.items() if not how.compares_norms}
_BY_NAME |= {"auto_s": AutoS(), "unit": Hard()}


def response_of(response: Any) -> BaseResponse:
    """Return the validated response of a `response` argument, limited to `c / n`."""
    how = as_response(response, _BY_NAME)
    if not is_same_always(how):
        wanted = "a response without schedules"
        advice = "Per-example clipping counts no steps; pass the value of the schedule."
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    if how.compares_norms:
        wanted = "a response that depends on a single norm"
        advice = "Pass 'hard'."
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    return how if type(how) is Hard else _Capped(how)
