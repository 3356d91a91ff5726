"""Checks of arguments, and the words of all errors: what must be, what was given.

Only concrete numbers are looked at; a traced value passes, because nothing can be
known of it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays._types import PyTree

_LARGEST = float(np.finfo(np.float64).max)
# Steps are counted in int32.
_LARGEST_COUNT = 2**31 - 1


def must_be(subject: str, wanted: str, value: Any, advice: str = "") -> str:
    """The text of an error: what is accepted, what was given and what to do.

    `subject` is the name of an argument, or words for what is not just that.
    """
    given = f"{shown(value)} ({type(value).__name__})"
    return f"{quoted(subject)} must be {wanted}, got {given}. {advice}".rstrip()


def quoted(subject: str) -> str:
    """A name in backquotes; other words as they are."""
    return f"`{subject}`" if subject.isidentifier() else subject


def shown(value: Any) -> str:
    """The `repr` of a value, cut short."""
    if is_beyond_floats(value):
        return "an int beyond the largest float"  # Python may refuse to print it.
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def static(name: str) -> str:
    """What to do with an argument that must not become an array."""
    return f"Under optax.inject_hyperparams name it in static_args=('{name}',)."


def kind(subject: str, value: Any, kinds: Any, wanted: str, advice: str = "") -> None:
    """Raise unless `value` is an instance of one of `kinds`."""
    if not isinstance(value, kinds):
        raise TypeError(must_be(subject, wanted, value, advice))


def not_none(name: str, threshold: Any) -> None:
    """Raise if a whole threshold is None."""
    if threshold is None:
        wanted = "a number or another threshold (inf clips nothing)"
        advice = "None stands for unclipped only inside a tree of thresholds."
        raise TypeError(must_be(name, wanted, None, advice))


def params_given(params: PyTree, who: str) -> None:
    """Raise if `update` lacks the parameters that `who` takes a fraction of."""
    if params is None:
        wanted = f"the parameters, of which {who} allows a fraction"
        advice = "Give them: tx.update(updates, state, params)."
        raise ValueError(must_be("params", wanted, None, advice))


def concrete(value: Any) -> np.ndarray | None:
    """`value` as NumPy, or None if it is traced."""
    try:
        return np.asarray(value)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def is_beyond_floats(value: Any) -> bool:
    """Whether `value` is an int that no float can stand for."""
    return isinstance(value, int) and abs(value) > _LARGEST


def forgets(name: str, decay: Any) -> None:
    """Raise if an average that begins at 0 would stay there."""
    if concrete(decay) == 1:
        advice = "At 1 the average would stay at 0, where it begins, and clip all to 0."
        raise ValueError(must_be(name, "below 1", decay, advice))


def is_number(value: Any) -> bool:
    """Whether `value` is a real number or an array of them, traced ones included.

    A bool is not: True for a threshold is a slip, not a 1.
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


def number(
    name: str,
    value: Any,
    *,
    negative: bool = False,
    advice: str = "0 clips to zero, inf clips nothing.",
) -> None:
    """Raise unless `value` is real, not NaN and, short of `negative`, not below 0."""
    if not is_number(value):
        raise TypeError(must_be(name, "a real number or an array of them", value))
    if is_beyond_floats(value):
        raise ValueError(must_be(name, "in the range of floats, or inf", value))
    known = concrete(value)
    least = -np.inf if negative else 0
    # NaN is not above anything.
    if known is not None and not np.all(known.astype(np.float64) >= least):
        wanted = "a number and not NaN" if negative else "0 or more and not NaN"
        raise ValueError(must_be(name, wanted, value, "" if negative else advice))


def plain(name: str, value: Any, *, above: bool = False, most: float = np.inf) -> None:
    """Raise unless `value` is one finite real number of 0 or more, or `above` 0."""
    wanted = f"one finite number {'above 0' if above else 'of 0 or more'}"
    wanted = wanted if most == np.inf else f"one number from 0 to {most}"
    if not is_number(value) or np.shape(value):
        raise TypeError(must_be(name, wanted, value))
    known = concrete(value)
    if known is None:
        return
    out_of_range = is_beyond_floats(value) or not np.isfinite(known)
    if out_of_range or known < 0 or known > most or (above and known == 0):
        raise ValueError(must_be(name, wanted, value))


def fraction(name: str, value: Any) -> None:
    """Raise unless `value` is one real number from 0 to 1."""
    plain(name, value, most=1)


def length(name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless `value` is an int of `least` or more: a shape, so never traced."""
    wanted = f"an int from {least} to 2**31 - 1"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(must_be(name, wanted, value, static(name)))
    if not least <= value <= _LARGEST_COUNT:
        raise ValueError(must_be(name, wanted, value))


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `wanted` without growing it."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in pairs)


def broadcasts(
    name: str,
    shape: tuple[int, ...],
    wanted: tuple[int, ...],
    of: str = "what it bounds",
    advice: str = "Give a number, or an array that does.",
) -> None:
    """Raise unless a threshold of `shape` fits what it bounds."""
    if not fits(shape, wanted):
        raise ValueError(
            f"{quoted(name)} of shape {shape} does not broadcast to {of}, of shape"
            f" {wanted}, without growing it. {advice}"
        )


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    wanted = f"one of {', '.join(map(repr, accepted))}"
    kind(name, value, str, wanted)
    if value not in accepted:
        raise ValueError(must_be(name, wanted, value))


def options(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for a further argument that is none of those known."""
    known = sorted(known)
    for name, value in given.items():
        if name not in known:
            wrong = f"{name}={shown(value)}"
            raise TypeError(f"The options must be some of {known}, got {wrong}.")


def flag(name: str, value: Any) -> None:
    kind(name, value, (bool, np.bool_), "True or False")


def is_two_sided(limit: Any, lower: Any, upper: Any) -> bool:
    """Whether `lower` and `upper` are given, not `limit`; raise if both or neither."""
    is_two = lower is not None or upper is not None
    if is_two == (limit is not None):
        raise TypeError(
            "Either `limit` or `lower` and `upper` must be given, got"
            f" {'both' if is_two else 'neither'}: limit={limit!r}, lower={lower!r},"
            f" upper={upper!r}. Give limit alone for symmetric bounds, or lower= and"
            " upper= (either may be left out)."
        )
    return is_two


def ordered(lower: Any, upper: Any) -> None:
    """Raise if two concrete numbers are in the wrong order; arrays may cross."""
    for low, high in _pairs(lower, upper):
        ends = [_scalar(low), _scalar(high)]
        if None not in ends and ends[0] > ends[1]:
            raise ValueError(
                f"`lower` must be at most `upper`, got lower={low} and upper={high}."
                " Swap them; only arrays with axes may cross, and then the result is"
                " `lower`."
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
