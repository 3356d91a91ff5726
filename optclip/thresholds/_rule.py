"""What a rule is; the plain ones; and what is taken for one."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from optclip._arrays import _validate
from optclip._arrays._types import Number, NumberOrSchedule, PyTree


class Seen(NamedTuple):
    """What a rule may look at; what it does not use costs nothing under jit.

    Attributes:
      norm: the norms of the scope, finite: `()` for the tree; a tree or dict of them
        for leaves and groups; with 1 at reduced axes; the modulus for elements. A
        non-finite norm reads 0, and so does one below 2**-60.
      finite: likewise bools: which of them were finite.
      keep: takes a threshold, returns the norms that the response would leave.
      measure: takes a tree like the updates, returns its norms over the same scope;
        with `guarded=False` inf where the sum of its squares is, at half the cost.
      params: as given to `update`, or None.
      step: int32, the number of updates before this one.
      extra: the extra keyword arguments of `update`, such as `value`.
      updates: what is clipped, as given to `update`.
    """

    norm: Any
    finite: Any
    keep: Callable[..., Any]
    measure: Callable[..., Any]
    params: PyTree
    step: jax.Array
    extra: dict[str, Any]
    updates: PyTree


@runtime_checkable
class Rule(Protocol):
    """How a threshold comes about.

    Example:
      A threshold of twice the mean of all norms so far, 1 on the first step:

      >>> import dataclasses, jax, jax.numpy as jnp, optclip
      >>> @dataclasses.dataclass(frozen=True)
      ... class TwiceTheMean:
      ...     def init(self, norm):  # An array; by leaf or group a tree of them.
      ...         return jax.tree.map(jnp.zeros_like, norm)
      ...     def update(self, seen, memory):
      ...         known, count = seen.step > 0, seen.step + 1
      ...         threshold = jax.tree.map(lambda m: jnp.where(known, 2 * m, 1), memory)
      ...         mean = lambda m, n: m + (n - m) / count
      ...         return threshold, jax.tree.map(mean, memory, seen.norm)
      >>> tx = optclip.clip_by_global_norm(TwiceTheMean())
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 2.0, 20.0):
      ...     clipped, state = tx.update(size * jnp.array([3.0, 4.0]), state)
      ...     print(clipped)
      [0.6 0.8]
      [6. 8.]
      [ 9. 12.]
    """

    def init(self, norm: Any, /) -> Any:
        """The memory before the first step, from norms of which only shapes count."""
        ...

    def update(self, seen: Seen, memory: PyTree, /) -> tuple[Any, Any]:
        """The threshold, shaped as the norms or broadcast to them, and new memory.

        The engine takes the new memory only if all norms that this rule saw are finite.
        """
        ...


Threshold = NumberOrSchedule | Rule
ThresholdTree = Threshold | PyTree


@dataclasses.dataclass(frozen=True)
class Constant:
    """The threshold that never changes; numbers and arrays mean this."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> Any:
        # Arrays are not compared: they may be traced.
        value = self.value
        return float(value) if isinstance(value, numbers.Real) else (id(value),)

    def init(self, norm: Any) -> Any:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[Any, Any]:
        return self.at(seen.step), memory

    def at(self, step: jax.Array) -> Any:
        del step
        return self.value


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The threshold that an optax schedule gives for the step; callables mean this."""

    function: Callable[[jax.Array], Any]

    def init(self, norm: Any) -> Any:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[Any, Any]:
        return self.at(seen.step), memory

    def at(self, step: jax.Array) -> Any:
        return self.function(step)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Two thresholds for elements, one on each side: see `bounds`."""

    lower: Any = None
    upper: Any = None

    def __post_init__(self) -> None:
        lower = as_rules("lower", self.lower, negative=True, none=-math.inf)
        upper = as_rules("upper", self.upper, negative=True)
        _validate.ordered(self.lower, self.upper)
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)


@dataclasses.dataclass(frozen=True)
class Named:
    """A threshold and the argument that it was given as, for errors to name."""

    name: str
    value: Any


def bounds(
    lower: ThresholdTree | None = None, upper: ThresholdTree | None = None
) -> Bounds:
    """Two bounds for elements, in place of a symmetric threshold.

    Args:
      lower: a number, an array that broadcasts to each leaf, an optax schedule, a rule,
        or a prefix tree of these; None is no bound. May be negative.
      upper: likewise.

    Returns:
      A threshold for `clip_by(..., over=ELEMENT)`.

    Raises:
      TypeError: a bound is not a number or an array of numbers.
      ValueError: a bound is NaN; or both are concrete numbers and `lower > upper`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> bounds = optclip.thresholds.bounds(-1.0, 2.0)
      >>> tx = optclip.clip_by(bounds, over=optclip.ELEMENT)
      >>> updates = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-1.   0.5  2. ]
    """
    return Bounds(lower, upper)


def constant(value: Number) -> Constant:
    """A fixed threshold, the rule that a plain number stands for.

    Args:
      value: a number or array of at least 0, traced or not; 0 clips to zero, inf
        measures and touches nothing.

    Raises:
      TypeError: `value` is not a real number or an array of them; a bool is not.
      ValueError: a concrete value is negative or NaN.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    any step or norm   `value`: there is no warm-up and no memory
    NaN or inf norm    the same; the clip's `nonfinite` says what is done
    ================== ==============================================================

    Example:
      >>> from optclip import thresholds
      >>> thresholds.constant(1.0)
      Constant(value=1.0)
    """
    _validate.number("value", value)
    return Constant(value)


def schedule(function: Callable[[jax.Array], Any]) -> Schedule:
    """A threshold by an optax schedule, the rule that a plain callable stands for.

    Args:
      function: takes the step, an int32 scalar from 0 up, returns the threshold.

    Raises:
      TypeError: `function` is not a function.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    first step         `function(0)`
    zero norm          as for any other
    NaN or inf norm    as for any other; the step counts
    ================== ==============================================================

    Example:
      >>> import optax
      >>> from optclip import thresholds
      >>> warm = thresholds.schedule(optax.linear_schedule(10.0, 1.0, 100))
      >>> print(warm.function(50))
      5.5
    """
    wanted = "an optax schedule, which is a function of the step"
    _validate.kind(
        "function", function, Callable, wanted, "A number is a threshold by itself."
    )
    return Schedule(function)


def like(value: Any, norm: jax.Array) -> jax.Array:
    """A hyperparameter, traced or not, in the dtype of the norms it goes with."""
    return jnp.asarray(value).astype(norm.dtype)


_WANTED = (
    "a number, an array, an optax schedule, a rule with init(norm) and update(seen,"
    " memory), or for leaf and group scope a tree of these"
)


def is_rule(value: Any) -> bool:
    """Whether `value` is a rule; an optimizer, which has the same methods, is none."""
    return isinstance(value, Rule) and not (
        isinstance(value, type) or _is_transformation(value)
    )


def as_rules(
    name: str, threshold: Any, *, negative: bool = False, none: float = math.inf
) -> Any:
    """A threshold argument, or each leaf of a tree of them, as rules."""
    if not negative:
        _validate.not_none(name, threshold)

    def as_rule(value: Any) -> Rule:
        if is_rule(value):
            return value
        if value is None:
            return Constant(none)
        if callable(value) and not isinstance(value, type):
            return Schedule(value)
        if not _validate.is_number(value):
            raise TypeError(_validate.must_be(name, _WANTED, value, _advice(value)))
        _validate.number(name, value, negative=negative)
        return Constant(value)

    return jax.tree.map(as_rule, threshold, is_leaf=_is_threshold)


def _advice(value: Any) -> str:
    """What to do with something that is close to a rule."""
    if _is_transformation(value):
        return (
            "A transformation is a whole clip, not where to clip. Give a rule, such as"
            " optclip.thresholds.zscore() in place of optclip.recipes.zclip()."
        )
    if isinstance(value, type) and hasattr(value, "update"):
        return f"Give an instance of the class, {value.__name__}(...)."
    return ""


def one_rule(name: str, threshold: Any) -> Rule:
    """A threshold argument that may be no tree of them, as a rule."""
    rule = as_rules(name, threshold)
    if not isinstance(rule, Rule):
        wanted = "one number, optax schedule or rule, such as"
        wanted = f"{wanted} optclip.thresholds.quantile(0.1)"
        raise TypeError(_validate.must_be(name, wanted, threshold))
    return rule


def _is_threshold(value: Any) -> bool:
    # An optimizer is a tuple of functions, which would pass for schedules.
    return value is None or _is_transformation(value) or is_rule(value)


def _is_transformation(value: Any) -> bool:
    # By name, for optax is not imported below `transforms`.
    return any(c.__name__ == "GradientTransformation" for c in type(value).__mro__)
