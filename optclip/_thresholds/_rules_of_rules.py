"""Rules that apply another rule, to other norms or at another scale, and bounds."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _batching, _collectives, _packed_state, _validate
from .._arrays._numerics import as_array, as_like
from .._arrays._types import Number, NumberOrSchedule, PyTree
from . import _ranks
from ._learning import checked_update, learned, or_zero, teaches
from ._rule import RuleOfRule, Seen, Threshold, ThresholdTree, takes_vector
from ._threshold_argument import as_rules, one_rule

Statistic = str | float
_NAMES = ("max", "mean", "median")


@dataclasses.dataclass(frozen=True)
class Of(RuleOfRule):
    """See `of`."""

    takes_vector: ClassVar[bool] = False
    learns_from_zeros: ClassVar[bool] = True
    couples_norms: ClassVar[bool] = True

    reduce: Statistic

    def init(self, norm: PyTree) -> PyTree:
        return self.rule.init(jax.tree.map(lambda x: jnp.zeros((), x.dtype), norm))

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        norm = self._of_leaves(seen.norm)
        is_vector = takes_vector(self.rule) and jax.tree.structure(norm).num_leaves > 1

        def packed(tree: PyTree) -> PyTree:
            """Return a tree of numbers as one vector, if the rule takes vectors."""
            if not is_vector:
                return tree
            return _packed_state.packed(tree, norm, is_like_params=False)

        def unpacked(tree: PyTree) -> PyTree:
            return _packed_state.unpacked(tree, norm) if is_vector else tree

        inner = seen._replace(
            norm=packed(norm),
            finite=packed(jax.tree.map(_all, seen.finite)),
            keep=lambda t: packed(self._of_leaves(seen.keep(unpacked(t)))),
            measure=lambda tree: packed(self._of_leaves(seen.measure(tree))),
        )
        old = packed(memory)
        threshold, new = checked_update("threshold", self.rule, inner, old)
        # The memory is chosen here too, since a leaf with one norm that is not finite
        # has no statistic, and its other norms would teach.
        teaching = teaches(self.rule, inner.norm, inner.finite)
        return unpacked(threshold), unpacked(learned(teaching, new, old))

    def _of_leaves(self, norms: PyTree) -> PyTree:
        return jax.tree.map(functools.partial(_statistic, self.reduce), norms)


def _all(flags: jax.Array) -> jax.Array:
    """Return whether all flags of a leaf are set, on all devices."""
    if not flags.ndim:
        return flags
    return _collectives.largest_anywhere((~flags).astype(jnp.float32)) <= 0


def _statistic(reduce: Statistic, norm: jax.Array) -> jax.Array:
    """Return a statistic of norms of at least 0: a name, or the level of a quantile."""
    if not norm.ndim:
        return norm
    if not norm.size:
        return jnp.zeros((), norm.dtype)
    if reduce == "max":
        return jnp.maximum(_collectives.largest_anywhere(norm), 0)
    if reduce == "mean":
        # Each norm is divided first, since the sum of many may overflow.
        return _total(norm / _count(norm))
    return _quantile(norm, 0.5 if reduce == "median" else float(reduce))


def _count(norm: jax.Array) -> int:
    """Return the number of norms on all devices."""
    return norm.size * _axis_names.axes_size(_axis_names.split_axes(norm))


def _total(x: jax.Array) -> jax.Array:
    return _collectives.reduced_over(lax.psum, jnp.sum(x, dtype=x.dtype))


def _quantile(norm: jax.Array, q: float) -> jax.Array:
    """Return the quantile, interpolated linearly, as in `numpy.quantile`."""
    place = q * (_count(norm) - 1)
    rank = math.floor(place)
    low, high = _ranks.neighbors(norm, rank, _total, _least)
    # Infinite only if there is no next norm, where the fraction is 0.
    step = jnp.where(jnp.isfinite(high), high - low, jnp.zeros_like(low))
    return low + step * (place - rank)


def _least(x: jax.Array) -> jax.Array:
    return _collectives.reduced_over(lax.pmin, jnp.min(x))


def of(reduce: Statistic, rule: Threshold) -> Of:
    """Apply a rule to one statistic over all norms of each leaf.

    Where a scope has several norms per leaf, such as singular values, slices or
    elements, other rules learn each of them separately. This one learns the statistic,
    and the threshold applies to all norms of the leaf.

    Example:
      Limit singular values to the running median of the largest one:

      >>> import jax.numpy as jnp, optclip
      >>> largest = optclip.thresholds.of("max", optclip.thresholds.quantile(0.5))
      >>> tx = optclip.clip_by_singular_value(largest)
      >>> state = tx.init(jnp.zeros((2, 2)))
      >>> for value in (2.0, 2.0, 8.0):
      ...     clipped, state = tx.update(jnp.diag(jnp.array([value, 1.0])), state)
      ...     print(clipped.diagonal().round(3))
      [2. 1.]
      [2. 1.]
      [2. 1.]

    Args:
      reduce: `"max"`, `"mean"`, `"median"`, or the level of a quantile from 0 to 1,
        interpolated linearly.
      rule: The rule, number or optax schedule; `current()` is the statistic itself.

    Returns:
      A rule whose memory is that of `rule` for one norm per leaf. A leaf split over
      devices has one statistic.

    Edge cases:
      - Stacked leaf: the statistic covers the norms of all its matrices.
      - Norm that is NaN or inf: counts as 0, and its leaf does not teach.
      - One norm per leaf, or for the tree: the same as `rule`.
    """
    if isinstance(reduce, str):
        _validate.choice("reduce", reduce, _NAMES)
    else:
        _validate.fraction("reduce", reduce)
    return Of(one_rule("rule", rule), reduce)


@dataclasses.dataclass(frozen=True)
class OfGradients(RuleOfRule):
    """See `of_gradients`."""

    learns_from_zeros: ClassVar[bool] = True
    is_stateless: ClassVar[bool] = False

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        advice = (
            "Wrap the transformation with optclip.clip_after(inner, clip), or pass"
            " them: update(updates, state, params, gradients=...)."
        )
        _validate.require(
            "gradients",
            None,
            "gradients" in seen.extra,
            "the gradients, from which this threshold learns",
            advice,
        )
        norm = seen.measure(seen.extra["gradients"])
        finite = _batching.each(jnp.isfinite, norm)
        norm = _batching.each(or_zero, finite, norm)
        teaching = teaches(self.rule, norm, finite)
        seen_gradients = seen._replace(norm=norm, finite=finite)
        threshold, new = checked_update("threshold", self.rule, seen_gradients, memory)
        # The memory is chosen here too, since the engine only reads the norms of the
        # updates, which may be finite when the gradients' norms are not.
        return threshold, learned(teaching, new, memory)


def of_gradients(rule: Threshold) -> OfGradients:
    """Apply a rule to the norms of the gradients instead of the updates.

    For use in `optclip.clip_after(inner, clip)`, where `inner` computes updates, such
    as a momentum, from the gradients.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> rule = optclip.thresholds.of_gradients(optclip.thresholds.moment(decay=0.5))
      >>> tx = optclip.clip_after(optax.trace(decay=0.9), optclip.clip_by_value(rule))
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (2.0, 2.0, 2.0):
      ...     clipped, state = tx.update(jnp.array([size]), state)
      ...     print(clipped)
      [1.]
      [1.5]
      [1.75]

    Args:
      rule: Rule to apply. Its `seen.keep` still returns the clipped updates' norms.

    Returns:
      A rule with the same memory. A non-finite gradient never enters it, and a zero one
      only if `rule` learns from zeros.

    Raises:
      ValueError: In `update`: `gradients` is not passed.
    """
    return OfGradients(one_rule("rule", rule))


@dataclasses.dataclass(frozen=True)
class Scaled(RuleOfRule):
    """See `scaled`."""

    factor: NumberOrSchedule
    low: NumberOrSchedule | None
    high: NumberOrSchedule | None

    is_stateless: ClassVar[Any] = property(
        lambda self: (
            getattr(self.rule, "is_stateless", False)
            and not any(map(callable, (self.factor, self.low, self.high)))
        )
    )

    def __post_init__(self) -> None:
        _validate.plain_or_schedule("factor", self.factor)
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and not callable(bound):
                _validate.number(name, bound, negative=True)
        low, high = (_validate.concrete(x) for x in (self.low, self.high))
        known = [x for x in (low, high) if x is not None and x.dtype != object]
        if len(known) == 2 and not known[0] <= known[1]:
            raise ValueError(
                f"`low` must be at most `high`, got low={low} and high={high}. Swap"
                " them."
            )

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        scale = functools.partial(self._scaled, seen.step)
        # A rule that learns from clipped norms must see the norms that are clipped: at
        # its own threshold, `ema` would shrink its average in each step.
        inner = seen._replace(keep=lambda t: seen.keep(jax.tree.map(scale, t)))
        threshold, new = checked_update("threshold", self.rule, inner, memory)
        return jax.tree.map(scale, threshold), new

    def _scaled(self, step: jax.Array, threshold: Number) -> jax.Array:
        out = as_array(threshold)

        def at_step(value: NumberOrSchedule) -> jax.Array:
            return as_like(value(step) if callable(value) else value, out)

        # Infinite thresholds clip nothing, and 0 * inf would be NaN.
        out = jnp.where(jnp.isinf(out), out, at_step(self.factor) * out)
        # A maximum and a minimum keep NaN.
        if self.low is not None:
            out = jnp.maximum(out, at_step(self.low))
        return out if self.high is None else jnp.minimum(out, at_step(self.high))


def scaled(
    rule: Threshold,
    factor: NumberOrSchedule = 1.0,
    *,
    low: NumberOrSchedule | None = None,
    high: NumberOrSchedule | None = None,
) -> Scaled:
    """Multiply the threshold of a rule by a factor, and bound it.

    The threshold is `min(max(factor * threshold, low), high)`.

    Example:
      Clip to twice the median of the last norms, at least to 1 and at most to 5:

      >>> import jax.numpy as jnp, optclip
      >>> median = optclip.thresholds.quantile(0.5, window=100)
      >>> rule = optclip.thresholds.scaled(median, 2.0, low=1.0, high=5.0)
      >>> tx = optclip.clip_by_global_norm(rule)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (0.1, 1.5, 2.0, 50.0, 50.0, 50.0):
      ...     clipped, state = tx.update(jnp.array([norm]), state)
      ...     print(clipped)
      [0.1]
      [1.5]
      [2.]
      [3.5]
      [4.]
      [5.]

    Args:
      rule: The rule, number or optax schedule.
      factor: A number of at least 0, or an optax schedule of it.
      low: Smallest threshold: a number of any sign, or an optax schedule. Default:
        None, no bound.
      high: Largest threshold, in the same forms, also in warm-ups. Default: None.

    Returns:
      A rule with the memory of `rule`. It learns from norms clipped at the scaled
      threshold; rules that clip norms in another way, such as `zscore`, learn as alone.

    Edge cases:
      - Threshold inf, as in a warm-up: stays inf, unless `high` is given.
      - Negative threshold of a loss: a factor above 1 lowers it. Use `low` and `high`.

    Raises:
      ValueError: `low` is above `high`.
    """
    return Scaled(one_rule("rule", rule, negative=True), factor, low, high)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Hold the rules of a lower and an upper bound of elements, each of any sign."""

    lower: PyTree
    upper: PyTree


def bounds(lower: ThresholdTree | None, upper: ThresholdTree | None) -> Bounds:
    """Convert a lower and an upper bound to rules; None means no bound."""
    rules = Bounds(
        as_rules("lower", lower, negative=True, none=-math.inf),
        as_rules("upper", upper, negative=True),
    )
    _validate.ordered(lower, upper)
    return rules
