"""Check arguments, and build the errors: the requirement, the value, the fix.

Only concrete numbers are checked; traced values pass, since they are unknown.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._types import PyTree

_LARGEST = float(np.finfo(np.float64).max)

# The fix for a tensor, by the library of its class.
_TO_JAX = {
    "keras": "Pass its .value, on the JAX backend of Keras.",
    "tensorflow": "Convert it: jnp.asarray(tf.convert_to_tensor(value).numpy()).",
    "torch": "Convert it: jnp.from_dlpack(value.detach()).",
}


def must_be(subject: str, wanted: str, value: Any, advice: str = "") -> str:
    """Return the text of an error: the requirement, the value passed, and the fix.

    `subject` is the name of an argument, or words that describe another value.
    """
    # Some classes have the type ABCMeta, which means nothing to users.
    kind = "type" if isinstance(value, type) else type(value).__name__
    got = f"{shown(value)} ({kind})"
    if is_foreign(value):
        advice = _TO_JAX[_library_of(value)]
    return f"{quoted(subject)} must be {wanted}, got {got}. {advice}".rstrip()


def quoted(subject: str) -> str:
    """Return a name in backquotes; other words are returned unchanged."""
    return f"`{subject}`" if subject.isidentifier() else subject


def shown(value: Any) -> str:
    """Return the `repr` of a value, truncated."""
    if is_beyond_floats(value):
        return "an int beyond the largest float"  # Python may raise when it prints it.
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def static(name: str, value: Any) -> str:
    """Return the fix for an argument that became an array, or no text."""
    if not hasattr(value, "dtype"):
        return ""
    return f"With optax.inject_hyperparams, pass static_args=('{name}',)."


def require(
    subject: str,
    value: Any,
    is_right: bool,
    wanted: str,
    advice: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raise an error that describes `value` unless it is right."""
    if not is_right:
        raise error(must_be(subject, wanted, value, advice))


def kind(subject: str, value: Any, kinds: Any, wanted: str, advice: str = "") -> None:
    """Raise unless `value` is an instance of one of `kinds`."""
    require(subject, value, isinstance(value, kinds), wanted, advice, TypeError)


def outside_jit(subject: str, value: Any, advice: str = "") -> None:
    """Raise if `value` is traced."""
    require(
        subject,
        value,
        not isinstance(value, Tracer),
        "concrete, outside jax.jit",
        advice,
        TypeError,
    )


def threshold_given(name: str, threshold: Any) -> None:
    """Raise if a whole threshold is None or a Suggestion."""
    wanted = "a number or another threshold (inf clips nothing)"
    # Compared by name, since this package may not import `_monitor`.
    is_whole = type(threshold).__name__ == "Suggestion"
    advice = "Pass its max_norm: suggestion.max_norm."
    require(name, threshold, not is_whole, wanted, advice, TypeError)
    advice = "None means unclipped only inside a tree of thresholds."
    require(name, threshold, threshold is not None, wanted, advice, TypeError)


def params_given(params: PyTree, why: str, more: str = "") -> None:
    """Raise if `update` lacks the parameters; `more` are further arguments of it."""
    require(
        "params",
        params,
        params is not None,
        f"the parameters, {why}",
        f"Pass them: tx.update(updates, state, params{more}).",
    )


def concrete(value: Any) -> np.ndarray | None:
    """Return `value` as a NumPy array, or None if it is traced."""
    try:
        return np.asarray(value)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def is_foreign(value: Any) -> bool:
    """Return whether `value` is a tensor of another library."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_array and _library_of(value) in _TO_JAX


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def is_beyond_floats(value: Any) -> bool:
    """Return whether `value` is an int too large for a float."""
    return isinstance(value, int) and abs(value) > _LARGEST


def forgets(name: str, decay: Any) -> None:
    """Raise if an average that starts at 0 would stay there."""
    require(
        name,
        decay,
        concrete(decay) != 1,
        "below 1",
        "At 1 the average would stay at 0, which clips everything to zero.",
    )


def is_number(value: Any) -> bool:
    """Return whether `value` is a real number or an array, traced ones included.

    A bool is rejected, since True as a threshold is a mistake, not a 1.
    """
    if isinstance(value, (bool, np.bool_)):
        return False
    if isinstance(value, (int, float)):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape") or is_foreign(value):
        return False
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


def number(
    name: str,
    value: Any,
    *,
    negative: bool = False,
    advice: str = "0 clips to zero, inf clips nothing.",
    rule_advice: str = "",
) -> Any:
    """Return `value`; raise if it is NaN or, unless `negative`, below 0.

    `rule_advice` is the fix for a rule or schedule.
    """
    if not is_number(value):
        is_rule = callable(value) or hasattr(value, "update")
        wanted = "a real number or an array of real numbers"
        raise TypeError(must_be(name, wanted, value, rule_advice if is_rule else ""))
    wanted = "within the range of a float, or inf"
    require(name, value, not is_beyond_floats(value), wanted)
    known = concrete(value)
    least = -np.inf if negative else 0
    # The comparison is false for NaN.
    if known is not None and not np.all(known.astype(np.float64) >= least):
        wanted = "a number other than NaN" if negative else "at least 0"
        raise ValueError(must_be(name, wanted, value, "" if negative else advice))
    return value


def plain(name: str, value: Any, *, above: bool = False, most: float = np.inf) -> Any:
    """Return `value`; raise unless it is finite, and at least or `above` 0."""
    wanted = f"a finite number {'above 0' if above else 'of at least 0'}"
    wanted = wanted if most == np.inf else f"a number from 0 to {most}"
    if not is_number(value) or np.shape(value):
        advice = ""
        if isinstance(value, tuple) and hasattr(value, "update"):
            advice = "Clipping goes before it: optax.chain(clipping, optimizer)."
        elif callable(value) and not isinstance(value, type):
            advice = (
                "For a schedule, build the transformation inside"
                " optax.inject_hyperparams, which evaluates it in each step."
            )
        raise TypeError(must_be(name, wanted, value, advice))
    known = concrete(value)
    if known is None:
        return value
    # A Python int of more than 64 bits is an object.
    out_of_range = is_beyond_floats(value) or not np.isfinite(known.astype(np.float64))
    if out_of_range or known < 0 or known > most or (above and known == 0):
        raise ValueError(must_be(name, wanted, value))
    return value


def plain_or_schedule(name: str, value: Any, *, above: bool = False) -> None:
    """Raise unless `value` is a schedule, or a finite number at least or `above` 0."""
    if not callable(value):
        plain(name, value, above=above)


def passed_norm(name: str, value: Any, wanted: str, advice: str = "") -> None:
    """Raise unless `value` can be a norm: one number of at least 0, inf or NaN."""
    is_one = is_number(value) and not np.shape(value)
    require(name, value, is_one, wanted, advice, TypeError)
    known = concrete(value)
    require(name, value, known is None or not known < 0, wanted, advice)


def fraction(name: str, value: Any) -> Any:
    """Return `value`; raise unless it is one real number from 0 to 1."""
    return plain(name, value, most=1)


def length(name: str, value: Any, *, least: int = 1) -> int:
    """Return a Python or NumPy int of at least `least`: a shape, so never traced."""
    wanted = f"an int from {least} to 2**31 - 1"
    number = whole(name, value, wanted, static(name, value))
    # int32 counts the steps.
    require(name, value, least <= number < 2**31, wanted)
    return number


def whole(name: str, value: Any, wanted: str, advice: str = "") -> int:
    """Return a Python or NumPy int as a Python int; raise for other values."""
    number = as_int(value)
    if number is None:
        raise TypeError(must_be(name, wanted, value, advice))
    return number


def as_int(value: Any) -> int | None:
    """Return an int of Python or NumPy as a Python int, None for other values.

    Arithmetic with a narrow NumPy int wraps, and neither compares as a static value.
    """
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return int(value) if is_int else None


def as_ints(values: Any) -> tuple[int, ...] | None:
    """Return an int or a tuple of ints as a tuple, None for other values."""
    entries = values if isinstance(values, tuple) else (values,)
    ints = [as_int(value) for value in entries]
    known = tuple(i for i in ints if i is not None)
    return known if len(known) == len(ints) else None


def as_float(value: Any) -> float | None:
    """Return a number of Python or NumPy as a float, None for arrays and others."""
    is_static = isinstance(value, (int, float, np.generic)) and is_number(value)
    return float(value) if is_static and not is_beyond_floats(value) else None


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether an array of `shape` broadcasts to `wanted` without growing it."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in pairs)


def broadcasts(
    name: str,
    shape: tuple[int, ...],
    wanted: tuple[int, ...],
    of: str = "the norms",
    advice: str = "Pass a number, or an array that broadcasts.",
) -> None:
    """Raise unless a threshold of `shape` broadcasts to the norms or elements."""
    if not fits(shape, wanted):
        raise ValueError(
            f"{quoted(name)} of shape {shape} does not broadcast to {of} of shape"
            f" {wanted}. {advice}"
        )


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    """Return `value`; raise unless it is accepted."""
    wanted = f"one of {', '.join(map(repr, accepted))}"
    kind(name, value, str, wanted)
    require(name, value, value in accepted, wanted)
    return value


def flag(name: str, value: Any) -> Any:
    """Return `value`; raise unless it is a bool."""
    kind(name, value, (bool, np.bool_), "True or False")
    return value


def is_two_sided(limit: Any, lower: Any, upper: Any) -> bool:
    """Return whether `lower` or `upper` is passed, not `limit`; raise otherwise."""
    is_two = lower is not None or upper is not None
    if is_two == (limit is not None):
        raise TypeError(
            "Either `limit` or `lower` and `upper` must be passed, got"
            f" {'both' if is_two else 'neither'}: limit={limit!r}, lower={lower!r},"
            f" upper={upper!r}. Pass only limit for symmetric bounds, or lower=, upper="
            " or both."
        )
    return is_two


def ordered(lower: Any, upper: Any) -> None:
    """Raise if two concrete numbers are in the wrong order; arrays may cross."""
    for low, high in _pairs(lower, upper):
        ends = [_scalar(low), _scalar(high)]
        if None not in ends and ends[0] > ends[1]:
            raise ValueError(
                f"`lower` must be at most `upper`, got lower={low} and upper={high}."
                " Swap them. (Arrays with axes may cross; the result is then `lower`.)"
            )


def _pairs(lower: Any, upper: Any) -> list[tuple[Any, Any]]:
    """Return the bounds that meet in a leaf; none if only the leaves determine that."""
    (lows, low_def), (highs, high_def) = (
        jax.tree.flatten(bound, is_leaf=lambda x: x is None) for bound in (lower, upper)
    )
    if low_def == high_def:
        return list(zip(lows, highs, strict=True))
    if len(lows) == 1:
        return [(lows[0], high) for high in highs]
    return [(low, highs[0]) for low in lows] if len(highs) == 1 else []


def _scalar(value: Any) -> Any:
    """Return a concrete number, or None."""
    known = concrete(value) if is_number(value) and not np.shape(value) else None
    return None if known is None else known.item()
