"""Checks of arguments: what was given, what is accepted, what to do.

Only concrete numbers are looked at; a traced value passes, because nothing can be
known of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = float(np.finfo(np.float64).max)
# Steps are counted in int32.
_LARGEST_COUNT = 2**31 - 1


def concrete(value: Any) -> np.ndarray | None:
    """`value` as NumPy, or None if it is traced."""
    try:
        return np.asarray(value)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def forgets(name: str, decay: Any) -> None:
    """Raise if an average that begins at 0 would stay there."""
    if concrete(decay) == 1:
        raise ValueError(
            f"{name}=1 would keep an average of 0 that begins there, and clip all to"
            f" zero. Give a {name} below 1."
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a real number or an array of them, traced ones included.

    A bool is none: True for a threshold is a slip, not a 1.
    """
    if isinstance(value, (bool, np.bool_)):
        return False
    if isinstance(value, (int, float)):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return bool(
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
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
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(
            f"{name} is an int above the largest float. Give less, or float('inf')."
        )
    if np.any(np.isnan(known.astype(np.float64))):
        raise ValueError(f"{name}={value} is NaN. Give a number.")
    if not negative and np.any(known < 0):
        raise ValueError(
            f"{name}={value} is negative. Give 0 or more; 0 clips to zero, inf clips"
            " nothing."
        )


def plain(name: str, value: Any, *, above: bool = False) -> None:
    """Raise unless `value` is one finite real number of 0 or more, or `above` 0."""
    wanted = "a finite number above 0" if above else "a finite number of 0 or more"
    given = f"{name}={value!r} ({type(value).__name__})"
    if not is_number(value) or np.shape(value):
        raise TypeError(f"{given} is not accepted. Give {wanted}, as a scalar.")
    known = concrete(value)
    if known is None:
        return
    too_large = isinstance(value, int) and abs(value) > _LARGEST
    if too_large or not np.isfinite(known) or known < 0 or (above and known == 0):
        raise ValueError(f"{given} is out of range. Give {wanted}.")


def fraction(name: str, value: Any) -> None:
    """Raise unless `value` is one real number from 0 to 1."""
    plain(name, value)
    known = concrete(value)
    if known is not None and known > 1:
        raise ValueError(f"{name}={value!r} is above 1. Give a number from 0 to 1.")


def length(name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless `value` is an int of `least` or more: a shape, so never traced."""
    given = f"{name}={value!r} ({type(value).__name__})"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{given} is no int. Give an int of {least} or more; under"
            f" optax.inject_hyperparams name it in static_args=('{name}',)."
        )
    if value < least:
        raise ValueError(f"{given} is below {least}. Give an int of {least} or more.")
    if value > _LARGEST_COUNT:
        raise ValueError(
            f"{name} is an int above the largest int32, {_LARGEST_COUNT}. Give that or"
            " less."
        )


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `wanted` without growing it."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in pairs)


def broadcasts(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise unless a threshold of `shape` fits what it bounds."""
    if not fits(shape, wanted):
        raise ValueError(
            f"{name} has shape {shape}, which does not broadcast to the shape"
            f" {wanted} of what it bounds. Give a number, or an array of that shape."
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
    for low, high in _pairs(lower, upper):
        ends = [_scalar(low), _scalar(high)]
        if None not in ends and ends[0] > ends[1]:
            raise ValueError(
                f"lower={low} is above upper={high}. Swap them; only arrays with axes"
                " may cross, and then the result is lower."
            )


def _pairs(lower: Any, upper: Any) -> list[tuple[Any, Any]]:
    """Bounds that meet in a leaf; none if only the leaves would show that."""
    (lows, low_def), (highs, high_def) = (
        jax.tree.flatten(bound, is_leaf=lambda x: x is None) for bound in (lower, upper)
    )
    if low_def == high_def:
        return list(zip(lows, highs, strict=True))
    if len(lows) == 1:
        return [(lows[0], high) for high in highs]
    return [(low, highs[0]) for low in lows] if len(highs) == 1 else []


def _scalar(value: Any) -> Any:
    """A concrete number, or None."""
    known = concrete(value) if is_number(value) and not np.shape(value) else None
    return None if known is None else known.item()
