"""Resolve a `response=` argument: a name, an object, or a function."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _numerics, _validate
from .._arrays._types import Number
from ._responses import (
    BaseResponse,
    Drop,
    Hard,
    Normalize,
    Proportional,
    Response,
    Smooth,
    Tanh,
)

ResponseName = Literal[
    "hard", "smooth", "normalize", "drop", "softsign", "tanh", "proportional"
]
ResponseLike = ResponseName | Response | Callable[[jax.Array, jax.Array], Number]
"""A response's name, a `Response`, or a function of norm and threshold."""


@dataclasses.dataclass(frozen=True)
class Detached(BaseResponse):
    """Hold the coefficients of a response constant in derivatives. Use `detached(...)`.

    Args:
      response: A response: a name, object or function.
    """

    response: Any  # A `response=` argument; a `Response` after initialization.

    def __post_init__(self) -> None:
        object.__setattr__(self, "response", as_response(self.response))
        for trait in ("compares_norms", "signed"):
            object.__setattr__(self, trait, getattr(self.response, trait))

    def at(self, step: jax.Array | np.ndarray) -> Detached:
        """Return the response at a step, with the values of its schedules."""
        inner = self.response.at(step)
        return self if inner is self.response else Detached(inner)

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> Number:
        return jax.lax.stop_gradient(self.response.coefficient(norm, threshold))


@dataclasses.dataclass(frozen=True)
class UserResponse(BaseResponse):
    """Check the results of a user's function `(norm, threshold) -> coefficient`."""

    function: Callable[[jax.Array, jax.Array], Any]
    signed: bool = dataclasses.field(default=False, kw_only=True)

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        try:
            result = self.function(norm, threshold)
        except jax.errors.ConcretizationTypeError as error:
            # Four or more norms are mapped by `jax.vmap`, also outside of jit.
            raise TypeError(
                "`response` must not branch on values, since norms and thresholds are"
                " traced. Use jnp.where(norm > threshold, ..., 1.0)."
            ) from error
        return _number_like(norm, result)


@dataclasses.dataclass(frozen=True)
class _UserElementResponse(UserResponse):
    """Check the results of a user's response that also has a method for elements."""

    of_element: Callable[[jax.Array, jax.Array, jax.Array], Any]

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        return _number_like(x, self.of_element(x, lower, upper))


def _number_like(like: jax.Array, result: Any) -> jax.Array:
    """Return the result of a response in the dtype and shape of `like`."""
    subject = "The result of `response`"
    wanted = f"a real number, or an array that broadcasts to the shape {like.shape}"
    _validate.require(
        subject, result, _validate.is_number(result), wanted, error=TypeError
    )
    shape = jnp.shape(result)
    _validate.require(
        subject,
        result,
        _validate.fits(shape, like.shape),
        wanted,
        f"Its shape is {shape}.",
    )
    return _numerics.broadcast_like(jnp.asarray(result).astype(like.dtype), like)


BY_NAME: Mapping[str, BaseResponse] = {
    "hard": Hard(),
    "smooth": Smooth(),
    "normalize": Normalize(),
    "drop": Drop(),
    "softsign": Smooth(1.0),
    "tanh": Tanh(),
    "proportional": Proportional(),
}


def detached(response: ResponseLike = "hard") -> Detached:
    """Hold the coefficients of a response constant in derivatives.

    The clipped updates are the same. In derivatives through the clipping, such as
    meta-gradients, a coefficient k is constant: the derivative of `k * u` is `k * du`,
    and with respect to the threshold it is 0. Elements are multiplied by k instead of
    set to the bound, so they meet it up to rounding. Separate `lower` and `upper`
    bounds are not supported.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(
      ...     1.0, response=optclip.responses.detached("hard")
      ... )
      >>> updates = jnp.array([3.0, 4.0])
      >>> clip = lambda u: tx.update(u, tx.init(u))[0]
      >>> print(clip(updates), jax.jacobian(clip)(updates).diagonal())
      [0.6 0.8] [0.2 0.2]

    Args:
      response: A response: a name, object or function. Default: `"hard"`.

    Returns:
      A response.
    """
    return Detached(response)


def as_response(
    response: Any, by_name: Mapping[str, BaseResponse] = BY_NAME
) -> BaseResponse:
    """Return the response of a `response=` argument."""
    if isinstance(response, str):
        if response not in by_name:
            raise ValueError(_must_be_response(response, by_name))
        return by_name[response]
    if isinstance(response, BaseResponse):
        return response
    function = getattr(response, "coefficient", response)
    if not callable(function) or isinstance(response, type):
        advice = _validate.static("response", response)
        raise TypeError(_must_be_response(response, by_name, advice))
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # Some functions in C have no signature.
        pass
    except TypeError as error:
        advice = f"It cannot take (norm, threshold): {error}."
        raise TypeError(_must_be_response(response, by_name, advice)) from error
    signed = bool(getattr(response, "signed", False))
    element = getattr(response, "element", None)
    if element is not None:
        return _UserElementResponse(function, element, signed=signed)
    return UserResponse(function, signed=signed)


def signs(response: BaseResponse) -> dict[str, Any]:
    """Return the options of `_validate.number` for the thresholds of a response."""
    if response.signed:
        return {"negative": True}
    if not isinstance(getattr(response, "response", response), UserResponse):
        return {}
    return {"advice": "If it is a parameter of `response`, define its `signed = True`."}


def without_schedules(
    response: Any, who: str, by_name: Mapping[str, BaseResponse] = BY_NAME
) -> BaseResponse:
    """Return the response of an argument of `who`; raise if it contains a schedule."""
    how = as_response(response, by_name)
    _validate.require(
        "response",
        response,
        is_same_always(how),
        "a response without schedules",
        f"{who}; pass the value of the schedule.",
    )
    return how


def _must_be_response(
    response: Any, by_name: Mapping[str, BaseResponse], advice: str = ""
) -> str:
    wanted = (
        f"one of {sorted(by_name)}, an object with coefficient(norm, threshold), or a"
        " function of these two"
    )
    return _validate.must_be("response", wanted, response, advice)


def is_same_always(response: BaseResponse) -> bool:
    """Return whether a response contains no schedule."""
    # A NumPy step, since a JAX array would initialize the devices before users can
    # configure them.
    return response.at(np.zeros((), np.int32)) is response
