"""A rule that learns from gradients while their moments are clipped."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._types import PyTree
from . import _learning
from ._rule import RuleOfRule, Seen, Threshold
from ._rule_results import checked_update
from ._threshold_argument import one_rule


@dataclasses.dataclass(frozen=True)
class OfGradients(RuleOfRule):
    """See `of_gradients`."""

    is_stateless: ClassVar[bool] = False
    learns_from_zeros: ClassVar[bool] = True

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        if "gradients" not in seen.extra:
            advice = (
                "Wrap the transformation with optclip.clip_after(inner, clip), or pass"
                " them: update(updates, state, params, gradients=...)."
            )
            wanted = "the gradients, from which this threshold learns"
            raise ValueError(_validate.must_be("gradients", wanted, None, advice))
        norm = seen.measure(seen.extra["gradients"])
        finite = _batching.each(jnp.isfinite, norm)

        def is_valid(n: jax.Array, is_finite: jax.Array) -> jax.Array:
            return jnp.where(is_finite, n, jnp.zeros_like(n))

        norm = _batching.each(is_valid, norm, finite)
        teaching = _learning.teaches(self.rule, norm, finite)
        seen_gradients = seen._replace(norm=norm, finite=finite)
        threshold, new = checked_update("threshold", self.rule, seen_gradients, memory)
        # The memory is chosen here too, since the engine only reads the norms of the
        # updates, which may be finite when the gradients' norms are not.
        return threshold, _learning.learned(teaching, new, memory)


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
