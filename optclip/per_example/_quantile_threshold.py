"""A threshold that follows a quantile of the norms of examples, privately or not."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optclip._arrays import _collectives, _placement, _validate
from optclip._arrays._types import Number
from optclip.per_example._example_clip import Relation
from optclip.per_example._info import ExampleInfo


class QuantileState(NamedTuple):
    """The threshold for the next step, and what it was made of.

    Args:
      threshold: C, for `clipped_grad(loss, state.threshold)`: a float32 scalar.
      fraction: which part of the examples had a norm of at most C, with its noise.

    Example:
      >>> import optclip
      >>> rule = optclip.per_example.QuantileThreshold(quantile=0.9, init_value=2.0)
      >>> state = rule.init()
      >>> print(state.threshold, state.fraction)
      2.0 0.9
    """

    threshold: jax.Array
    fraction: jax.Array


@dataclasses.dataclass(frozen=True)
class QuantileThreshold:
    r"""A threshold that a given part of the examples stays below.

    .. math:: C \leftarrow C e^{-\eta (b - \gamma)}, \quad
       b = \frac{1}{2} + \frac{1}{m} (N(0, \sigma_b^2) + \sum_i
       (1[\|g_i\| \le C] - \frac{1}{2}))

    Without noise it is for robust training. With noise it is private: the count of a
    step then costs a part of the budget, which `noise_multiplier` takes off.

    Args:
      quantile: gamma, the part of the examples that is to be below it, from 0 to 1.
      learning_rate: eta, how fast the threshold moves, above 0; at 0.2 by at most a
        tenth a step for the median.
      init_value: C of the first step, a number above 0.
      count_noise: sigma_b, the standard deviation of the noise on the count, 0 for
        none; the paper takes a twentieth of the batch.
      expected_batch_size: m, the expected number of examples in a batch, which privacy
        asks for; None is the actual number.

    Raises:
      TypeError, ValueError: an argument is not of its kind, or there is noise and no
        expected batch size.

    ================== ==============================================================
    edge               what happens
    ================== ==============================================================
    NaN or inf norm    counts as above the threshold
    padding            is not counted
    no example         the threshold stays as it is; with noise it moves by the noise
    ================== ==============================================================

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

    Source: Andrew, Thakkar, McMahan, Ramaswamy, *Differentially Private Learning with
    Adaptive Clipping*, 2019, arXiv:1905.03871.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    init_value: float = 0.1
    count_noise: float = 0.0
    expected_batch_size: float | None = None

    def __post_init__(self) -> None:
        _validate.fraction("quantile", self.quantile)
        _validate.plain("learning_rate", self.learning_rate, above=True)
        _validate.plain("init_value", self.init_value, above=True)
        _validate.plain("count_noise", self.count_noise)
        size = self.expected_batch_size
        if size is not None:
            _validate.plain("expected_batch_size", size, above=True)
        elif self.count_noise:
            wanted = "the expected number of examples where there is `count_noise`"
            advice = "The actual number is private too."
            raise ValueError(
                _validate.must_be("expected_batch_size", wanted, size, advice)
            )

    def init(self) -> QuantileState:
        """The state before the first step."""
        threshold = jnp.asarray(self.init_value, jnp.float32)
        return QuantileState(threshold, jnp.asarray(self.quantile, jnp.float32))

    def update(
        self,
        state: QuantileState,
        info: ExampleInfo,
        key: jax.Array | None = None,
    ) -> QuantileState:
        """The state after a step.

        Args:
          state: the state before the step, whose threshold was clipped by.
          info: what a clip over the whole tree returned.
          key: a PRNG key of this step where there is `count_noise`, else None.

        Returns:
          The new state.

        Raises:
          TypeError: the norms are not one for each example.
          ValueError: there is noise and no key, or a key and no noise.
        """
        wanted = "what a clip with over='tree' returns, with one norm an example"
        if not isinstance(info, ExampleInfo) or getattr(info.norms, "ndim", 0) != 1:
            raise TypeError(_validate.must_be("info", wanted, info))
        if (key is None) == bool(self.count_noise):
            wanted = "a PRNG key of this step with `count_noise`, and None without"
            raise ValueError(_validate.must_be("key", wanted, key))
        live = _placement.varying_as(~info.padding, info.norms)
        below = live & (info.norms <= state.threshold)
        half = 0.5 * live.astype(jnp.float32)
        total = jnp.sum(below.astype(jnp.float32) - half)
        total, number = (
            _collectives.spanning(lax.psum, x) for x in (total, 2 * jnp.sum(half))
        )
        if key is not None:
            total = total + self.count_noise * jax.random.normal(key, dtype=jnp.float32)
        if self.expected_batch_size is not None:
            number = jnp.asarray(self.expected_batch_size, jnp.float32)
        is_empty = number == 0
        fraction = total / jnp.where(is_empty, jnp.ones_like(number), number) + 0.5
        fraction = jnp.where(is_empty, jnp.full_like(fraction, self.quantile), fraction)
        step = jnp.exp(-self.learning_rate * (fraction - self.quantile))
        return QuantileState(state.threshold * step, fraction)

    def noise_multiplier(
        self, total: Number, relation: Relation = "add_or_remove"
    ) -> float:
        r"""The noise multiplier for the gradients, beside the noise on the count.

        .. math:: z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}

        Args:
          total: z, the noise multiplier that the budget is accounted with for both, a
            number above 0.

          relation: what neighbouring batches are. By `"add_or_remove"` a count moves by
            1/2; by `"zero_out"` and `"replace_one"` by 1, and the formula has no 2.

        Returns:
          The multiplier of the sensitivity for the noise on the gradients.

        Raises:
          ValueError: the noise on the count is too small for it.
        """
        _validate.plain("total", total, above=True)
        relations = ("add_or_remove", "zero_out", "replace_one")
        _validate.choice("relation", relation, relations)
        moves = 0.5 if relation == "add_or_remove" else 1.0
        z, noise = float(np.asarray(total)), float(self.count_noise)
        if noise <= moves * z:
            wanted = f"above {moves} times the noise multiplier, {moves * z}"
            advice = "The count alone would spend the whole budget."
            raise ValueError(_validate.must_be("count_noise", wanted, noise, advice))
        return 1 / math.sqrt(z**-2 - (noise / moves) ** -2)
