"""Represent a clipping operation as plain data, and the decision of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

from optclip._arrays import _axis_names, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName, Mask, Number, PyTree
from optclip._clip import _nonfinite
from optclip._clip._layout import Layout
from optclip.norms._interface import Measurement
from optclip.responses import Response
from optclip.responses._interface import at_step
from optclip.scopes._interface import Scope

if TYPE_CHECKING:
    from optclip._clip._action import Action


@dataclasses.dataclass(frozen=True)
class Clip:
    """Hold a clipping operation without its threshold."""

    scope: Scope
    norm: Measurement
    response: Response
    action: Action
    eps: Number = 0.0
    strict: bool = False
    nonfinite: str = "propagate"
    mask: Mask | None = None
    norm_mask: Mask | None = None
    clip_mask: Mask | None = None
    axis_name: AxisName | None = None

    def __post_init__(self) -> None:
        _validate.choice("nonfinite", self.nonfinite, _nonfinite.POLICIES)
        _validate.flag("strict", self.strict)
        _validate.plain("eps", self.eps)
        _axis_names.check(self.axis_name)

    def at(self, step: jax.Array) -> Clip:
        """Return the operation with its response as a schedule sets it for a step."""
        response = at_step(self.response, step)
        if response is self.response:
            return self
        return dataclasses.replace(self, response=response)

    def at_init(self) -> Clip:
        """Return the operation without declared mapped axes, unless types specify them.

        `init` may run outside the `shard_map` in which `update` runs.
        """
        if _axis_names.is_typed_here():
            return self
        return dataclasses.replace(self, axis_name=())


class Thresholds(NamedTuple):
    """Hold the thresholds of one run.

    Attributes:
      by_argument: One value per block under the name of the argument that set it, in a
        list or stacked like the norms; two lists, `"lower"` and `"upper"`, if elements
        have two bounds.
      rule_memory: The memory of the rules after the run.
    """

    by_argument: dict[str, list[Number] | Batched]
    rule_memory: Sequence[PyTree] = ()


class Decision(NamedTuple):
    """Hold the norms and thresholds of one run.

    Attributes:
      clip: The operation, with its response as it is in this step.
      layout: The leaves and the blocks.
      norms: One entry per block: a scalar, or an array with one norm per slice.
      thresholds: One entry per block, as the action fits them.
      rule_memory: The memory of the rules after the run.
      norm_memory: One array per block, from which the next measurement starts.
      work: Intermediate results of the measurement for the action.
    """

    clip: Clip
    layout: Layout
    norms: Batched
    thresholds: Batched
    rule_memory: Sequence[PyTree]
    norm_memory: Sequence[jax.Array]
    work: Sequence[object]
