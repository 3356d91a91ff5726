"""Checks of arguments: what was given, what is accepted, what to do.

Only concrete numbers are looked at; a traced value passes, because nothing can be
known of it.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def concrete(value: Any) -> np.ndarray | None:
    """`value` as NumPy, or None if it is traced."""
    try:
        return np.asarray(value)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def is_number(value: Any) -> bool:
    """Whether `value` is a real number or an array of them, traced ones included."""
    if isinstance(value, numbers.Real):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return bool(
        jnp.issubdtype(dtype, jnp.floating)
        or jnp.issubdtype(dtype, jnp.integer)
        or dtype == np.bool_
    )


def number(name: str, value: Any, *, negative: bool = False) -> None:
    """Raise unless `value` is real, not NaN and, short of `negative`, not below 0."""
    if not is_number(value):
        raise TypeError(
            f"{name}={value!r} ({type(value).__name__}) is not accepted. Give a real"
            " number or an array of them."
        )
    known = concrete(value)
    if known is None:
        return
    if np.any(np.isnan(known.astype(np.float64))):
        raise ValueError(f"{name}={value} is NaN. Give a number.")
    if not negative and np.any(known < 0):
        raise ValueError(
            f"{name}={value} is negative. Give 0 or more"
            + ("." if name == "eps" else "; 0 clips to zero, inf clips nothing.")
        )


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(
            f"{name}={value!r} ({type(value).__name__}) is not accepted. Give one of"
            f" {accepted}."
        )
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is not known. Give one of {accepted}.")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{name}={value!r} ({type(value).__name__}) is not accepted. Give True or"
            " False."
        )


def ordered(lower: Any, upper: Any) -> None:
    """Raise if two concrete numbers are in the wrong order; arrays may cross."""
    if (
        isinstance(lower, numbers.Real)
        and isinstance(upper, numbers.Real)
        and lower > upper
    ):
        raise ValueError(
            f"lower={lower} is above upper={upper}. Swap them; only arrays may cross,"
            " and then the result is lower."
        )
