"""Adapt a threshold to a quantile of per-example norms, optionally with noise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import _collectives, _placement, _validate
from .._arrays._numerics import as_array, as_like, promotable
from .._arrays._types import Number, PyTree
from ._bound import Relation, check_normal
from ._clip_then_sum import ExampleInfo


class QuantileState(NamedTuple):
    """Hold the threshold of the next step, and the fraction it was computed from.

    Example:
      >>> import optclip
      >>> rule = optclip.per_example.QuantileThreshold(quantile=0.9, init_value=2.0)
      >>> state = rule.init()
      >>> print(state.threshold, state.fraction)
      2.0 0.9

    Args:
      threshold: Threshold C, a float32 scalar, for
        `clipped_grad(loss, state.threshold)`; a dict of these by label for groups.
      fraction: Fraction of examples with norm at most C in the last step, with noise;
        like `threshold`.
    """

    threshold: PyTree
    fraction: PyTree


@dataclasses.dataclass(frozen=True)
class QuantileThreshold:
    """Adapt the threshold C so that a given fraction of examples stays below it.

    After each step `C *= exp(-learning_rate * (b - quantile))`, limited to `min_value`
    and `max_value`, where
    `b = 1/2 + (count_noise * N(0, 1) + sum((norms <= C) - 1/2)) / m` estimates the
    fraction of m examples with norm at most C. With `count_noise` the threshold is
    differentially private and spends a part of the budget; see `noise_multiplier`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.per_example.QuantileThreshold(init_value=1.0)
      >>> grads = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> state = rule.init()
      >>> for _ in range(3):
      ...     _, info = optclip.per_example.clipped_sum(grads, state.threshold)
      ...     state = rule.update(state, info)
      >>> print(state.threshold, state.fraction)
      1.0 0.5

    Args:
      quantile: Target fraction of examples with norm at most C. Default: 0.5.
      learning_rate: Adaptation rate, above 0. Default: 0.2, which changes C by about
        10% per step at most, for the median without noise.
      init_value: Threshold of the first step, above 0. A dict by label gives each group
        its own threshold, for `over=optclip.groups(...)`. Default: 0.1.
      count_noise: Standard deviation of the noise on the count; the paper uses a
        twentieth of the batch size. Each group's count has its own noise. Default: 0.
      expected_batch_size: Number m, required with `count_noise`. Default: None, the
        actual number, which is sensitive.
      min_value: Lower limit of C, a normal float32. Default: 1e-10.
      max_value: Upper limit of C, a float32 of at least `min_value`. Default: 1e10.

    Raises:
      ValueError: `max_value < min_value`, or `init_value` is outside the limits.

    Guarantees:
      NaN and inf norms count as above the threshold; padding is not counted. A batch
      without counted examples leaves the threshold unchanged, unless
      `expected_batch_size` is set: b is then 1/2 plus noise.

      The limits read no data, so they cost no privacy. A state whose threshold is 0,
      inf or otherwise outside them recovers: the next step starts at the nearer limit.

    References:
      Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with
      Adaptive Clipping", 2019, arXiv:1905.03871.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    init_value: float | dict[str, float] = 0.1
    count_noise: float = 0.0
    expected_batch_size: float | None = None
    min_value: float = 1e-10
    max_value: float = 1e10

    def __post_init__(self) -> None:
        _validate.fraction("quantile", self.quantile)
        check_normal("count_noise", self.count_noise)
        for name in ("learning_rate", "min_value", "max_value"):
            check_normal(name, getattr(self, name), above=True)
        least, most = self.min_value, self.max_value
        wanted = f"at least `min_value`, {least}"
        _validate.require("max_value", most, not _is_above(least, most), wanted)
        values = self._init_values
        wanted = "a number above 0, or a dict of these by label"
        _validate.require("init_value", self.init_value, bool(values), wanted)
        wanted = f"from `min_value` to `max_value`, {least} to {most}"
        for value in values:
            _validate.plain("init_value", value, above=True)
            is_between = not (_is_above(least, value) or _is_above(value, most))
            _validate.require("init_value", value, is_between, wanted)
        size = self.expected_batch_size
        if size is not None:
            check_normal("expected_batch_size", size, above=True)
        is_enough = size is not None or not self.count_noise
        wanted = "the expected number of examples with `count_noise`"
        advice = "The actual number is sensitive, so it cannot be used."
        _validate.require("expected_batch_size", size, is_enough, wanted, advice)

    @property
    def _init_values(self) -> list[Any]:
        init = self.init_value
        return [*init.values()] if isinstance(init, dict) else [init]

    def init(self) -> QuantileState:
        """Return the state before the first step."""
        values = self.init_value, jax.tree.map(lambda _: self.quantile, self.init_value)
        return QuantileState(
            *jax.tree.map(lambda x: as_array(x).astype("float32"), values)
        )

    def update(
        self,
        state: QuantileState,
        info: ExampleInfo,
        key: jax.Array | None = None,
    ) -> QuantileState:
        """Return the state after a step.

        Args:
          state: State before the step.
          info: `ExampleInfo` of the step, clipped with `state.threshold` and
            `over="tree"`, or over groups with the labels of `init_value`.
          key: PRNG key of this step, required with `count_noise`. Default: None.

        Returns:
          The new state.
        """
        self._check_info(info)
        _validate.require(
            "key",
            key,
            (key is not None) == bool(self.count_noise),
            "a PRNG key with `count_noise`, and None without",
        )
        thresholds, treedef = jax.tree.flatten(state.threshold)
        keys: Any = [key] * len(thresholds)
        if key is not None and len(thresholds) > 1:
            keys = jax.random.split(key, len(thresholds))
        groups = zip(thresholds, treedef.flatten_up_to(info.norms), keys, strict=True)
        pairs = [
            self._after(threshold, norms, info.padding, one_key)
            for threshold, norms, one_key in groups
        ]
        new = QuantileState(*map(treedef.unflatten, zip(*pairs, strict=True)))
        # Hyperparameters of float64 must not change the dtypes of the state.
        return jax.tree.map(lambda x, old: x.astype(jnp.result_type(old)), new, state)

    def _check_info(self, info: Any) -> None:
        wanted = "an ExampleInfo with one norm per example, from over='tree'"
        if isinstance(self.init_value, dict):
            labels = sorted(self.init_value)
            wanted = f"an ExampleInfo over groups, with the labels {labels}"
        norms = getattr(info, "norms", None)
        has_groups = jax.tree.structure(norms) == jax.tree.structure(self.init_value)
        are_rows = all(getattr(x, "ndim", 0) == 1 for x in jax.tree.leaves(norms))
        is_right = isinstance(info, ExampleInfo) and has_groups and are_rows
        _validate.require("info", info, is_right, wanted, error=TypeError)

    def _after(
        self,
        threshold: jax.Array,
        norms: jax.Array,
        padding: jax.Array,
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the threshold and the fraction of one group after a step."""
        live = _placement.varying_as(~padding, norms)
        below = live & (norms <= threshold)
        half = 0.5 * live.astype(jnp.float32)
        total = jnp.sum(below.astype(jnp.float32) - half)
        total, number = (
            _collectives.reduced_over(lax.psum, x) for x in (total, 2 * jnp.sum(half))
        )
        if key is not None:
            total = total + promotable(self.count_noise) * jax.random.normal(
                key, dtype=jnp.float32
            )
        if self.expected_batch_size is not None:
            number = as_like(self.expected_batch_size, number)
        is_empty = number == 0
        fraction = total / jnp.where(is_empty, jnp.ones_like(number), number) + 0.5
        fraction = jnp.where(is_empty, as_like(self.quantile, fraction), fraction)
        rate, wanted = map(promotable, (self.learning_rate, self.quantile))
        step = jnp.exp(-rate * (fraction - wanted))
        # 0 and inf keep their value when multiplied, so the old threshold is limited
        # too.
        return self._limited(self._limited(jnp.asarray(threshold)) * step), fraction

    def _limited(self, threshold: jax.Array) -> jax.Array:
        least, most = (
            as_like(limit, threshold) for limit in (self.min_value, self.max_value)
        )
        return jnp.clip(threshold, least, most)

    def noise_multiplier(
        self, total: Number, relation: Relation = "add_or_remove"
    ) -> float:
        """Compute the noise multiplier to use for the gradients.

        Noise on count and gradients then costs as much as `total` on the gradients
        alone. The result is `(total**-2 - k * (2 * count_noise)**-2) ** -0.5` for
        `"add_or_remove"`, with k groups or k = 1, and without the factor 2 for other
        relations.

        Args:
          total: Noise multiplier for count and gradients together, above 0.
          relation: How neighboring batches differ: `"add_or_remove"` (default),
            `"zero_out"` or `"replace_one"`.

        Returns:
          The standard deviation of the gradient noise divided by the sensitivity, a
          float.

        Raises:
          ValueError: `count_noise` is so small that the count alone exceeds the budget.
        """
        _validate.plain("total", total, above=True)
        _validate.choice(
            "relation", relation, ("add_or_remove", "zero_out", "replace_one")
        )
        # One example changes the count of each group by this much.
        moves = 0.5 if relation == "add_or_remove" else 1.0
        moves *= math.sqrt(len(self._init_values))
        z, noise = float(np.asarray(total)), float(self.count_noise)
        _validate.require(
            "count_noise",
            noise,
            noise > moves * z,
            f"above {moves} times the noise multiplier, {moves * z}",
            "Less noise spends the whole budget on the count.",
        )
        return 1 / math.sqrt(z**-2 - (noise / moves) ** -2)


def _is_above(value: Number, limit: Number) -> bool:
    """Return whether a number is above another, as far as both are known."""
    known, most = _validate.concrete(value), _validate.concrete(limit)
    return known is not None and most is not None and bool(known > most)
