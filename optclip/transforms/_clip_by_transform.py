"""`clip_by`: any threshold, scope, norm and response as an optax transformation.

Every `clip_by_*` is one call of `clip_by`, which adds rules, state and a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from optclip._arrays._types import PyTree
from optclip._clip import apply, clip_of
from optclip.norms._interface import NormLike, as_norm
from optclip.responses._interface import resolve
from optclip.scopes._interface import ScopeLike, as_scope
from optclip.transforms._engine import Engine, Step
from optclip.transforms._lift import lifted
from optclip.transforms._positions import checks_positions
from optclip.transforms._rules import rules_of
from optclip.typing import (
    AxisName,
    ClipState,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    ThresholdTree,
)


@checks_positions()
def clip_by(
    threshold: ThresholdTree,
    *,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Any clip there is: measure, threshold, respond, apply, record.

    .. math:: u \leftarrow u \cdot \mathrm{response}(\|u\|_{over}, threshold)

    Args:
      threshold: where to clip. A number or array of at least 0, traced or not (0 clips
        to zero, inf measures and touches nothing); an optax schedule (what it returns
        counts as traced: below 0 is 0, NaN stays NaN); a rule with
        `init(norm)` and `update(seen, memory)`; for leaf and group scope a prefix tree
        of these, None for unclipped; for single elements also
        `thresholds.bounds(...)`.
      over: what shares a norm: `"tree"`, `"leaf"`, `"element"`, `axes(...)`,
        `units(...)`, `groups(...)`, or a scope of your own.
      norm: `"l2"`, `"l1"`, `"inf"`, `"rms"`, `"average"`, any order p above 0, or an
        `optclip.norms.Norm`.
      response: what happens at the threshold: a name such as `"hard"`, `"smooth"` or
        `"drop"` (`help(optclip.responses)` has them all), an object with
        `coefficient(norm, threshold)`, or a function of those two. It is asked inside
        the threshold too, and returns 1 there to touch nothing.
      eps: a number of at least 0 that is added to the norm before the response sees it;
        PyTorch's formula has 1e-6.
      strict: the true norm of the output is never above the threshold: clips inside a
        band of 1.3e-4 below it, then rounds towards zero in the dtype of each leaf. The
        threshold of a norm counts as 0 below 2**-36, in float64 below 2**-450. The norm
        is that of what is measured; a response of your own keeps to what it asks for,
        not to the threshold.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that
        returns one for the updates, such as `optclip.by_path(...)`; None is all leaves.
      norm_mask: for experts: which of these leaves enter the norm; given in the same
        ways.
      clip_mask: for experts: which of these leaves are scaled; given in the same ways.
      axis_name: mapped axes that leaves are split over, which a norm spans: a name, a
        tuple of names (`()` for none), a `PartitionSpec`, a prefix tree of these or a
        function tree -> tree; None reads them off the type of each leaf, which
        `jax.shard_map` keeps.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it by leaf for leaf, axis and element scope, and for the tree the norm of
        each leaf beside its own. False keeps nothing.
      name: what `optclip.metrics` calls this clip.

    Returns:
      A transformation; its state is a `ClipState` of fixed structure. With
      `record=False` and a threshold that is fixed it is `optax.EmptyState()`, as that
      of optax's clips, so that one restores a checkpoint of the other.

    Raises:
      ValueError: an argument is out of range; or, at `init` and `update`, a tree of
        thresholds, masks, labels or axis names does not match the updates; a
        threshold varies over devices that share a norm; a leaf is unreduced
        over a mesh axis.

    Example:
      Adaptive soft clipping of each layer's units, by hand:

      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.axes(0), response="smooth")
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0].round(2))
      [[0.59 0.  ]
       [0.78 0.71]]
    """
    clip = clip_of(
        as_scope(over), as_norm(norm), resolve(response), eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, norm_mask=norm_mask, clip_mask=clip_mask,
        axis_name=axis_name,
    )  # fmt: skip
    engine = Engine(clip, rules_of(threshold, clip), record, name)
    return clipping(engine, engine.decide)


def clipping(
    engine: Engine, decide: Callable[..., Step]
) -> optax.GradientTransformationExtraArgs:
    """Build the transformation of an engine.

    Args:
      engine: the engine.
      decide: its method `decide`, or that method with some of its options.
    """

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        step = decide(updates, state, params, extra_args)
        clipped, coefficients = apply(step.decision)
        new = engine.recorded(step, coefficients) if engine.record else None
        return clipped, engine.after(state, step, new)

    return lifted(engine, engine.init, update_fn)
