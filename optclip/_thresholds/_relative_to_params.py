"""A fraction of the parameters' norm as the threshold: adaptive gradient clipping."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._arrays import _batching, _validate
from .._arrays._numerics import as_like
from .._arrays._types import Number, PyTree
from ._rule import Seen


@dataclasses.dataclass(frozen=True)
class RelativeToParams:
    """See `relative_to_params`."""

    takes_vector: ClassVar[bool] = True
    is_stateless: ClassVar[bool] = True

    ratio: Number
    min_norm: Number

    def init(self, norm: PyTree) -> tuple[()]:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        _validate.params_given(seen.params, "thresholds.relative_to_params")

        def fraction(norm: jax.Array) -> jax.Array:
            ratio, least = (as_like(x, norm) for x in (self.ratio, self.min_norm))
            return ratio * jnp.maximum(norm, least)

        return _batching.each(fraction, seen.measure(seen.params)), memory


def relative_to_params(
    ratio: Number = 0.01, min_norm: Number = 1e-3
) -> RelativeToParams:
    """Clip to a fraction of the parameters' norm.

    The threshold is `ratio * max(norm(params), min_norm)`, over the same scope.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> rule = optclip.thresholds.relative_to_params(0.1)
      >>> tx = optclip.clip_by(rule, over=optclip.axes(0))
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 0.0]])
      >>> grads = jnp.array([[0.6, 0.0], [0.8, 1e-5]])
      >>> print(tx.update(grads, tx.init(kernel), kernel)[0])
      [[3.e-01 0.e+00]
       [4.e-01 1.e-05]]

    Args:
      ratio: Maximum norm of the updates as a fraction of the parameters' norm.
      min_norm: Lower bound on the parameters' norm, so that zero parameters can train.

    Returns:
      A rule without memory; `update` requires `params`. NaN parameters make the updates
      NaN; parameters of infinite norm clip nothing.

    See Also:
      `recipes.agc`.

    References:
      Brock et al., 2021, arXiv:2102.06171, equation 3.
    """
    return RelativeToParams(
        _validate.plain("ratio", ratio), _validate.plain("min_norm", min_norm)
    )
