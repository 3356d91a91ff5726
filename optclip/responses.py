"""WHAT HAPPENS at a threshold: a coefficient for each norm.

A response is any object with `coefficient(norm, threshold)`, or a plain function of
that signature. Both arguments are float32 or float64 arrays of one shape, `norm`
finite and above 0, `threshold` at least 0 and possibly inf; the result multiplies the
updates. Exactly 1 leaves them untouched, to the bit: return it below the threshold. A
zero norm is not asked about; zeros stay zeros. A norm more than 2**60 times the
threshold (2**500 in float64) is shown as that many, and the norm that this would leave
is the one that is left: so c / n, or a square of it, cannot vanish.

Example:
  A capper of one's own, which lets the square root of the excess through:

  >>> import jax.numpy as jnp
  >>> import optclip
  >>> def root_capper(norm, threshold):
  ...     return jnp.where(norm > threshold, jnp.sqrt(threshold / norm), 1.0)
  >>> tx = optclip.clip_by_global_norm(1.0, response=root_capper)
  >>> updates = jnp.array([0.0, 16.0])
  >>> print(tx.update(updates, tx.init(updates))[0])
  [0. 4.]
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optclip import _validate
from optclip._arithmetic import ratio


class Response(Protocol):
    """What a clip does with a norm and a threshold."""

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Hard:
    r"""Scale down to the threshold, :math:`\min(1, c / n)`: the clip of the field.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import responses
      >>> print(responses.hard.coefficient(jnp.float32(4.0), jnp.float32(1.0)))
      0.25
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        # Where neither holds a NaN threshold goes on into the quotient: loud.
        inside = norm <= threshold
        one = jnp.ones_like(norm)
        return jnp.where(inside, one, ratio(threshold, jnp.where(inside, one, norm)))

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """`x` clipped to the bounds, to the bit; `lower` where `lower > upper`."""
        upper = jnp.where(upper < lower, lower, upper)
        clipped = jnp.where(x < lower, lower, jnp.where(x > upper, upper, x))
        # In order now, unless one is NaN: that must be seen.
        return jnp.where(lower <= upper, clipped, jnp.maximum(lower, upper))


@dataclasses.dataclass(frozen=True)
class Smooth:
    r"""Scale without a kink, :math:`(1 + (n/c)^s)^{-1/s}`: the norm left is below c.

    At `sharpness` 2 it is :math:`c / \sqrt{c^2 + n^2}`, at 1 the updates become
    :math:`g / (1 + n/c)`; towards infinity it is `Hard`. Everything is scaled a
    little, small norms least: by :math:`1 - (n/c)^s / s`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import responses
      >>> print(responses.smooth.coefficient(jnp.float32(3.0), jnp.float32(4.0)))
      0.8
    """

    sharpness: float = 2.0

    def __post_init__(self) -> None:
        _validate.plain("sharpness", self.sharpness, above=True)

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        s = self.sharpness
        inside = norm <= threshold
        one, zero = jnp.ones_like(norm), jnp.zeros_like(norm)
        # Powers of a ratio of at most 1 cannot overflow; 0/0 is kept out of both sides.
        live = inside & (norm > 0)
        below = jnp.where(live, ratio(norm, jnp.where(live, threshold, one)), zero)
        above = jnp.where(inside, one, ratio(threshold, jnp.where(inside, one, norm)))
        small = jnp.where(live, (1 + _power(below, s)) ** (-1 / s), one)
        return jnp.where(inside, small, above * (1 + _power(above, s)) ** (-1 / s))


def _power(x: jax.Array, s: Any) -> jax.Array:
    """`x**s`, with a finite derivative at 0 for s below 1 too."""
    live = x > 0
    return jnp.where(live, jnp.where(live, x, jnp.ones_like(x)) ** s, jnp.zeros_like(x))


@dataclasses.dataclass(frozen=True)
class Normalize:
    r"""Scale always, up or down, to the threshold: :math:`c / n`. Zeros stay zeros.

    The coefficient is at most the largest float: 3.4e38 in float32. A threshold that
    the dtype of a leaf has no numbers for overflows there.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import responses
      >>> print(responses.normalize.coefficient(jnp.float32(0.5), jnp.float32(1.0)))
      2.0
    """

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        still = (norm == 0) | jnp.isinf(threshold)
        one = jnp.ones_like(norm)
        wanted = ratio(threshold, jnp.where(still, one, norm))
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        return jnp.where(still, one, jnp.minimum(wanted, largest))

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """The bound on the side of each element, zeros kept."""
        return jnp.where(x < 0, lower, jnp.where(x > 0, upper, x))


@dataclasses.dataclass(frozen=True)
class Detached:
    """A response whose coefficient is a constant to `jax.grad`. Use `detached(...)`."""

    response: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "response", resolve(self.response))

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(self.response.coefficient(norm, threshold))


@dataclasses.dataclass(frozen=True)
class _Own:
    """A user's own `(norm, threshold) -> coefficient`, its results checked."""

    function: Callable[[jax.Array, jax.Array], Any]

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        return _number_like(norm, self.function(norm, threshold))


@dataclasses.dataclass(frozen=True)
class _OwnOfElements(_Own):
    """One that also says what becomes of a single element."""

    of_element: Callable[[jax.Array, jax.Array, jax.Array], Any]

    def element(self, x: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        return _number_like(x, self.of_element(x, lower, upper))


def _number_like(asked: jax.Array, found: Any) -> jax.Array:
    """What a response returned for `asked`, in its dtype and shape."""
    if not _validate.is_number(found):
        raise TypeError(
            f"response returned {found!r} ({type(found).__name__}). Return a real"
            f" number, or an array of them of the shape {asked.shape} it was asked"
            " about."
        )
    shape = jnp.shape(found)
    if not _validate.fits(shape, asked.shape):
        raise ValueError(
            f"response returned an array of shape {shape}. Return a real number, or an"
            f" array of the shape {asked.shape} it was asked about."
        )
    return jnp.broadcast_to(jnp.asarray(found).astype(asked.dtype), asked.shape)


__all__ = [
    "Detached",
    "Hard",
    "Normalize",
    "Response",
    "Smooth",
    "detached",
    "hard",
    "normalize",
    "smooth",
]

hard: Hard = Hard()
smooth: Smooth = Smooth()
normalize: Normalize = Normalize()

_BY_NAME: dict[str, Response] = {"hard": hard, "smooth": smooth, "normalize": normalize}


def detached(response: Any = "hard") -> Detached:
    r"""A response that clips as ever, but takes the clip out of a meta-gradient.

    What the updates are multiplied by is a constant to JAX: the derivative of the
    clipped updates is :math:`k\,\mathrm{d}u`, without :math:`u\,\mathrm{d}k`, and
    none goes to the threshold. Single elements are multiplied too, not moved, so with
    `ELEMENT` scope a bound is met to rounding, and bounds on two sides are refused.

    Args:
      response: what `response=` takes: a name, an object, or a function.

    Returns:
      A response.

    Raises:
      TypeError: `response` is none.
      ValueError: no response has that name.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(
      ...     1.0, response=optclip.responses.detached("hard")
      ... )
      >>> updates = jnp.array([3.0, 4.0])
      >>> clip = lambda u: tx.update(u, tx.init(u))[0]
      >>> print(clip(updates), jax.jacobian(clip)(updates).diagonal())
      [0.6 0.8] [0.2 0.2]
    """
    return Detached(response)


def resolve(response: Any) -> Response:
    """The response that a `response=` argument means."""
    message = (
        f"response={response!r} is not known. Give one of {sorted(_BY_NAME)}, an object"
        " with coefficient(norm, threshold), or a function of those two; under"
        " optax.inject_hyperparams name it in static_args=('response',)."
    )
    if isinstance(response, str):
        if response not in _BY_NAME:
            raise ValueError(message)
        return _BY_NAME[response]
    if isinstance(response, (Hard, Smooth, Normalize, Detached)):
        return response
    function = getattr(response, "coefficient", response)
    if not callable(function) or isinstance(response, type):
        raise TypeError(message)
    if hasattr(response, "element"):
        return _OwnOfElements(function, response.element)
    return _Own(function)
