"""The engine: any threshold, scope, norm and response as an optax transformation.

Every `clip_by_*` is one call of `clip_by`, which adds rules, state and a record.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optclip import norms, scopes
from optclip._arrays import _leaves, _placement
from optclip._arrays._batching import Batched
from optclip._arrays._numerics import counted, select
from optclip._arrays._types import PyTree
from optclip._clip._clip import Clip, ScalingClip
from optclip._clip._elements import ElementClip, Limits
from optclip._clip._layout import Layout
from optclip.norms import _measure
from optclip.responses import Response
from optclip.responses._resolve import resolve
from optclip.scopes._scope import Element
from optclip.thresholds import Bounds, Seen, _memory, _resolve
from optclip.transforms import _state
from optclip.transforms._state import ClipRecord, ClipState
from optclip.typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    ThresholdTree,
)


def clip_by(
    threshold: ThresholdTree,
    *,
    over: scopes.Scope = scopes.TREE,
    norm: norms.Norm = norms.L2,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
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
        of these, None for unclipped; for `ELEMENT` also `thresholds.bounds(...)`.
      over: what shares a norm: `TREE`, `LEAF`, `ELEMENT`, `axes(...)`, `groups(...)`,
        or a scope of your own.
      norm: `norms.L2`, `L1`, `INF`, `RMS`, `AVERAGE` or `Norm(p)`.
      response: what happens at the threshold: a name such as `"hard"`, `"smooth"` or
        `"drop"` (`help(optclip.responses)` has them all), an object with
        `coefficient(norm, threshold)`, or a function of those two. It is asked inside
        the threshold too, and returns 1 there to touch nothing.
      eps: a scalar, added to the norm before the response sees it; 1e-6 in PyTorch.
      strict: the true norm of the output is never above the threshold: clips inside a
        band of 1.3e-4 below it, then rounds towards zero in the dtype of each leaf. The
        threshold of a norm counts as 0 below 2**-36, in float64 below 2**-450. The norm
        is that of what is measured; a response of your own keeps to what it asks for,
        not to the threshold.
      nonfinite: `"propagate"`, `"zero"`, `"drop"` or `"raise"`: see
        `optclip.functional`.
      norm_mask: which leaves enter the norm: a tree of bools, a prefix of one, or a
        function tree -> tree.
      clip_mask: which leaves are scaled; likewise.
      axis_name: mapped axes that leaves are split over, which a norm spans: a name, a
        tuple of names (`()` for none), a `PartitionSpec`, a prefix tree of these or a
        function tree -> tree; None reads them off the type of each leaf, which
        `jax.shard_map` keeps.
      record: whether the state keeps what happened; `"leaves"` keeps it by leaf for
        leaf, axis and element scope; the tree has one norm only.
      name: what `optclip.metrics` calls this clip.

    Returns:
      A transformation; its state is a `ClipState` of fixed structure.

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
        over, norm, resolve(response), eps, strict, nonfinite,
        norm_mask, clip_mask, axis_name,
    )  # fmt: skip
    engine = Engine(clip, _rules(threshold, clip), record, name)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[Any, ClipState]:
        step = engine.decide(updates, state, params, extra_args)
        clipped, coefficients = step.clip.apply(step.layout, step.measured, step.limits)
        new = engine.recorded(step, coefficients) if record else None
        return clipped, engine.after(state, step, new)

    return optax.GradientTransformationExtraArgs(engine.init, update_fn)


class Decision(NamedTuple):
    """What a step is measured to be, and where it is to be clipped.

    `clip` is the one of this step, if its response has a schedule; `bad` says which
    blocks hold a non-finite entry, `memories` what the rules now remember.
    """

    clip: Clip
    layout: Layout
    measured: Batched
    bad: Batched
    limits: Any
    memories: list[Any]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A clip with the rules of its threshold, and what it records of itself."""

    clip: Clip
    rules: dict[str, Any]
    record: Record
    name: str

    def __post_init__(self) -> None:
        _state.check(self.record, self.name, self.clip.scope)

    def init(self, params: PyTree) -> ClipState:
        treedef, shapes = _norm_shapes(self.clip, params)
        norms = [_placement.zeros(shape, params) for shape in shapes]
        zeros = jax.tree.unflatten(treedef, norms)
        memory = [_memory.init(key, rule, zeros) for key, rule in self.rules.items()]
        blank = _state.blank(treedef, self.clip.scope, self.record)
        step = jnp.zeros((), jnp.int32)
        return ClipState(step, memory, {self.name: blank} if self.record else {})

    def decide(
        self,
        updates: PyTree,
        state: Any,
        params: PyTree,
        extra: dict[str, Any],
        *,
        in_common: bool = False,
    ) -> Decision:
        """The norms and thresholds of a step; `in_common` if all devices must agree."""
        layout = self.clip.layout(updates)
        scope, num_rules = self.clip.scope, len(self.rules)
        _state.check_state(
            state, num_rules, layout.treedef, self.name, scope, self.record
        )
        if in_common or jax.tree.leaves(state.clip_memory):
            self.clip.check_spans(layout)
        now = self.clip.at(state.clip_step)
        measured = now.measure(layout)
        bad = now.bad(layout, measured)
        norm, step = layout.tree(measured.entries()), state.clip_step
        values, memories = {}, []
        for (key, rule), memory in zip(
            self.rules.items(), state.clip_memory, strict=True
        ):
            if _memory.is_fixed(rule):
                found = _memory.fixed(key, rule, norm, step)
            else:
                measure = functools.partial(_norm_tree, now)
                seen = Seen(norm, None, now.keep, measure, params, step, extra, updates)
                flags = layout.tree(bad.entries())
                found, memory = _memory.update(key, rule, seen, memory, flags)
            values[key] = layout.entries(found)
            memories.append(memory)
        limits = _limits(now, values, measured)
        return Decision(now, layout, measured, bad, limits, memories)

    def recorded(self, step: Decision, coefficients: Any) -> ClipRecord:
        """What a step alone brings to the record."""
        scope = self.clip.scope
        itemized = scope.itemized or self.record == "leaves"
        steps = _steps(step, coefficients, itemized=itemized)
        return _state.of_step(step.layout.treedef, scope, self.record, steps)

    def after(
        self, state: ClipState, step: Decision, new: ClipRecord | None
    ) -> ClipState:
        """The state after a step."""
        count = counted(state.clip_step)
        if new is None:
            return ClipState(count, step.memories, {})
        record = _state.advanced(state.clip_record[self.name], new)
        return ClipState(count, step.memories, {self.name: record})


def clip_of(scope: Any, norm: Any, response: Response, *rest: Any) -> Clip:
    """The clip of its kind: of elements where the response can move them."""
    moves = isinstance(scope, Element) and hasattr(response, "element")
    return (ElementClip if moves else ScalingClip)(scope, norm, response, *rest)


def _rules(threshold: Any, clip: Clip) -> dict[str, Any]:
    if isinstance(threshold, _resolve.Named):
        name, given = threshold.name, threshold.value
        return {name: _resolve.as_rules(name, given)}
    if not isinstance(threshold, Bounds):
        return {"threshold": _resolve.as_rules("threshold", threshold)}
    if not isinstance(clip, ElementClip):
        raise ValueError(
            "Two bounds are for single elements. Give over="element" and"
            " response='hard' with thresholds.bounds(...), or one threshold."
        )
    return {"lower": threshold.lower, "upper": threshold.upper}


def _norm_shapes(clip: Clip, params: PyTree) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The structure of the norms of trees like `params`, nothing computed."""
    local = clip.at_init()
    flat = _leaves.flatten(params)
    live = flat.clippable()
    treedefs = []

    def measure(arrays: list[Any]) -> list[jax.Array]:
        given = iter(arrays)
        leaves = [
            next(given) if is_live else x
            for is_live, x in zip(live, flat.leaves, strict=True)
        ]
        layout = local.layout(flat.rebuild(leaves))
        treedefs.append(layout.treedef)
        return local.measure(layout).entries()

    arrays = [x for is_live, x in zip(live, flat.leaves, strict=True) if is_live]
    shapes = jax.eval_shape(measure, arrays)
    return treedefs[-1], shapes


def _norm_tree(clip: Clip, tree: PyTree, *, guarded: bool = True) -> Any:
    # A tree of its own structure: parameters may have leaves that updates have not.
    layout = clip.layout(tree)
    return layout.tree(clip.measure(layout, guarded=guarded).entries())


def _limits(clip: Clip, values: dict[str, list[Any]], measured: Batched) -> Any:
    if len(values) == 2:
        return [Limits(lo, hi) for lo, hi in zip(*values.values(), strict=True)]
    ((name, found),) = values.items()
    return clip.fit(name, found, measured)


def _steps(step: Decision, coefficients: Any, *, itemized: bool) -> Batched:
    measured = step.measured
    declared = measured.with_entries(
        [_measure.declared_across(b) for b in step.layout.blocks]
    )
    learns = bool(jax.tree.leaves(step.memories))
    limits, found = step.clip.recorded(measured, step.limits, coefficients)

    def one(norm: Any, limit: Any, k: jax.Array, bad: jax.Array, where: Any) -> Any:
        if learns:
            # A rule's threshold of a leaf of zeros is 0 too, and nothing is clipped.
            k = select((norm == 0) & (k == k), jnp.ones_like(k), k)
        past = (k != 1) & (k == k) & (norm > 0) & (norm < jnp.inf)
        return _state.Step(norm, limit, k, past, bad, where)

    columns = [measured, limits, found, step.bad, declared]
    if not itemized:
        columns = _state.joined(columns)
    return columns[0].map(one, *columns[1:])
