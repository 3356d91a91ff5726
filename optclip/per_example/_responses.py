"""What happens to the gradient of one example: responses that keep it within C."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from optclip._arrays import _validate
from optclip.responses import Hard, Response
from optclip.responses._interface import (
    BY_NAME,
    ResponseLike,
    compares,
    is_same_always,
    resolve,
)

ExampleResponse = ResponseLike | Literal["auto_s", "unit"]

# What a norm lacks at most of 2**40 elements whose squares are flushed to zero: a
# response that enlarges would make something of it.
_FLUSHED = {"float32": 2.0**-43, "float64": 2.0**-480}


@dataclasses.dataclass(frozen=True)
class AutoS:
    """A coefficient of c / (n + gamma): always scaled, and little where n is small."""

    gamma: float = 0.01

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        whole = threshold / (norm + self.gamma)
        return jnp.where(jnp.isinf(threshold), jnp.ones_like(norm), whole)


@dataclasses.dataclass(frozen=True)
class _Capped:
    """A response of which nothing above c / n is let through."""

    response: Response

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        uncapped = jnp.asarray(self.response.coefficient(norm, threshold), norm.dtype)
        least = jnp.asarray(_FLUSHED[norm.dtype.name], norm.dtype)
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        most = jnp.minimum(threshold / (norm + least), largest)
        return jnp.clip(uncapped, -most, most)


# "proportional" compares norms; "unit" divides when all are added up.
_BY_NAME = {name: how for name, how in BY_NAME.items() if not compares(how)}
_BY_NAME |= {"auto_s": AutoS(), "unit": Hard()}


def response_of(response: Any) -> Response:
    """The response that a `response=` argument means, checked and cut at c / n."""
    how = resolve(response, _BY_NAME)
    if not is_same_always(how):
        wanted = "without a schedule in it"
        advice = "There is no step here: give the value of the schedule."
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    if compares(how):
        wanted = "one that looks at one norm at a time"
        advice = "Give 'hard'."
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    return how if type(how) is Hard else _Capped(how)
