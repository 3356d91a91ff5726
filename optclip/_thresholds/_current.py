"""The norm of this step as the threshold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from .._arrays._types import PyTree
from ._rule import Seen


@dataclasses.dataclass(frozen=True)
class Current:
    """See `current`."""

    takes_vector: ClassVar[bool] = True
    is_stateless: ClassVar[bool] = True

    def init(self, norm: PyTree) -> tuple[()]:
        del norm
        return ()

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        return seen.norm, memory


def current() -> Current:
    """Clip to this step's own norm, or to a statistic of this step's norms.

    Alone it clips nothing. Scaled, or as the rule of `of`, the threshold follows each
    step, without a memory.

    Example:
      Clip each leaf's elements to the 0.75-quantile of their absolute values:

      >>> import jax.numpy as jnp, optclip
      >>> from optclip import thresholds
      >>> tx = optclip.clip_by_value(thresholds.of(0.75, thresholds.current()))
      >>> updates = jnp.array([-9.0, 1.0, 2.0, -3.0, 4.0])
      >>> print(tx.update(updates, tx.init(updates))[0])
      [-4.  1.  2. -3.  4.]

    Returns:
      A rule without memory.

    See Also:
      `of`, `scaled`.
    """
    return Current()
