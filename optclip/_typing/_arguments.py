"""Types of arguments, which annotations of user code name, and of options."""

from __future__ import annotations

from typing import Literal, TypedDict

from .. import _norms, _responses, _scopes, _thresholds
from .._arrays import _types

PyTree = _types.PyTree
"""Any JAX pytree, such as dicts, lists, tuples, modules or a single leaf."""

Number = _types.Number
"""A real number of Python or NumPy, or an array, traced or not; not a bool."""

NumberOrSchedule = _types.NumberOrSchedule
"""A number, or an optax schedule (a function of the step)."""

Threshold = _thresholds.Threshold
"""A threshold, which is a number, an optax schedule or a `Rule`."""

ThresholdTree = _thresholds.ThresholdTree
"""A threshold, or a prefix tree of thresholds with None for unclipped."""

Nonfinite = _types.Nonfinite
"""The policy `"propagate"`, `"zero"` or `"raise"` for NaN and inf."""

Record = _types.Record
"""True, False or `"leaves"`, which also records the norm of each leaf."""

Relative = _types.Relative
"""The unit of a cotangent threshold, computed from all norms of a leaf."""

NormLike = _norms.NormLike
"""A norm's name, its order p, or a `Norm`."""

ScopeLike = _scopes.ScopeLike
"""The scope of a norm, which is `"tree"`, `"leaf"`, `"element"` or a `Scope`."""

ResponseLike = _responses.ResponseLike
"""A response's name, a `Response`, or a function of norm and threshold."""

Mask = _types.Mask
"""A tree of bools, a prefix of one, or a function of the updates."""

Labels = _types.Labels
"""A tree of strings, a prefix of one, or a function of the updates."""

AxisName = _types.AxisName
"""A mesh axis, a tuple of them, a `PartitionSpec`, a tree of these, or a function."""

History = _types.History
"""The output of `optclip.metrics` as a list of dicts, a dict of arrays, or a file."""


class MomentClipOptions(TypedDict, total=False):
    """Describe `ClipOptions` without `eps`, for recipes that have their own `eps`."""

    over: ScopeLike
    norm: NormLike
    response: ResponseLike
    strict: bool
    nonfinite: Nonfinite
    mask: Mask | None
    axis_name: AxisName | None
    record: Record
    name: str


class ClipOptions(MomentClipOptions, total=False):
    """Describe the options of `clip_by` that recipes pass on.

    A recipe sets some of them itself and raises TypeError if such an option is passed.
    `norm_mask` and `clip_mask` are options of `clip_by` alone.
    """

    eps: Number


class SkipOptions(TypedDict, total=False):
    """Describe the options of `skip` that recipes pass on."""

    max_loss: Threshold | None
    over: ScopeLike
    norm: NormLike
    max_consecutive: int | None
    learn_skipped: bool
    mask: Mask | None
    axis_name: AxisName | None
    record: Literal[True, "leaves"]
    name: str
