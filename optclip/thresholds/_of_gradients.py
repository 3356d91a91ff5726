"""A rule that learns from the gradients, where what is clipped is made of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from optclip._arrays import _batching, _validate
from optclip._arrays._types import PyTree
from optclip.thresholds import _running
from optclip.thresholds._rule import Rule, Seen, Threshold, takes_vector
from optclip.thresholds._threshold_argument import one_rule


@dataclasses.dataclass(frozen=True)
class OfGradients:
    """See `of_gradients`."""

    rule: Rule

    @property
    def takes_vector(self) -> bool:
        return takes_vector(self.rule)

    def init(self, norm: PyTree) -> PyTree:
        return self.rule.init(norm)

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        if "gradients" not in seen.extra:
            advice = (
                "Wrap the clip as optclip.clip_after(inner, clip), or give them:"
                " update(updates, state, params, gradients=...)."
            )
            wanted = "the gradients, which this threshold learns from"
            raise ValueError(_validate.must_be("gradients", wanted, None, advice))
        norm = seen.measure(seen.extra["gradients"])
        finite = _batching.each(jnp.isfinite, norm)

        def is_valid(n: jax.Array, is_finite: jax.Array) -> jax.Array:
            return jnp.where(is_finite, n, jnp.zeros_like(n))

        norm = _batching.each(is_valid, norm, finite)
        seen_gradients = seen._replace(norm=norm, finite=finite)
        threshold, new = self.rule.update(seen_gradients, memory)
        # Here, since the engine checks the norms of the updates alone, which may be
        # finite where those of the gradients are not.
        return threshold, _running.taken_if(finite, new, memory)


def of_gradients(rule: Threshold) -> OfGradients:
    """The threshold of another rule, which is shown the norms of the gradients.

    For a clip of what an optimizer made of them, such as a momentum, in
    `optclip.clip_after(inner, clip)`.

    Args:
      rule: any rule; what it is shown to `keep` is still what the clip leaves.

    Returns:
      A rule with the same memory, which a NaN or inf in the gradients never enters.

    Raises:
      TypeError: `rule` is not a threshold.
      ValueError: at `update`, `gradients` is missing.

    ================== ==============================================================
    edge               threshold
    ================== ==============================================================
    first steps        as of `rule`, its warm-up too
    this step's norm   that of the gradients, as `rule` has it
    zero norm          as of `rule`, for gradients of zero
    NaN or inf norm    as of a norm of 0; it never enters the memory
    ================== ==============================================================

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
    """
    return OfGradients(one_rule("rule", rule))
