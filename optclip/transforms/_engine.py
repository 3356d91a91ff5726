"""A clip in a step: its norms, what its rules answer, and what is recorded of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _leaves, _placement, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._by_path import PerNorm
from optclip._arrays._numerics import counted
from optclip._arrays._types import Leaf, PyTree, Record, TreeDef
from optclip._clip._clip import Clip
from optclip._clip._elements import ElementClip, Limits
from optclip._clip._layout import Layout
from optclip.norms import _measure
from optclip.responses._resolve import is_same_always
from optclip.scopes._scope import TREE
from optclip.thresholds import Bounds, Seen, _memory, _resolve
from optclip.thresholds._fixed import Constant
from optclip.transforms import _leaf_record, _norm_memory, _outline, _record, _state
from optclip.transforms._leaf_record import LeafNorms
from optclip.typing import ClipRecord, ClipState, ThresholdTree


class Decision(NamedTuple):
    """What a step is measured to be, and where it is to be clipped.

    `clip` is the one of this step, if its response has a schedule; `bad` says which
    blocks hold a non-finite entry, `memories` what the rules now remember, `leaf_norms`
    the norm of each leaf of a tree with one norm, if these are recorded.
    """

    clip: Clip[Any, Any]
    layout: Layout
    measured: Batched
    bad: Batched
    limits: Any
    memories: list[PyTree]
    leaf_norms: LeafNorms | None


@dataclasses.dataclass(frozen=True)
class Engine:
    """A clip with the rules of its threshold, and what it records of itself."""

    clip: Clip[Any, Any]
    rules: dict[str, PyTree]
    record: Record
    name: str

    def __post_init__(self) -> None:
        _state.check(self.record, self.name)

    @property
    def is_stateless(self) -> bool:
        """Whether nothing is kept from step to step, as in optax's own clips."""
        rules = jax.tree.leaves(self.rules, is_leaf=_resolve.is_rule)
        is_fixed = all(isinstance(rule, Constant) for rule in rules)
        is_fixed &= not _norm_memory.remembers(self.clip)
        return not self.record and is_fixed and is_same_always(self.clip.response)

    @property
    def num_memories(self) -> int:
        """How many things are remembered: one for each rule, and that of the norm."""
        return len(self.rules) + _norm_memory.remembers(self.clip)

    @property
    def has_leaf_norms(self) -> bool:
        """Whether norms of leaves are recorded that the clip itself has no use for."""
        return self.record == "leaves" and self.clip.scope is TREE

    def init(self, params: PyTree) -> ClipState:
        if _outline.is_placeholder(params):
            treedef = jax.tree.structure(0)
            rules = self.rules.values()
            memory: list[Any] = [
                _outline.memory(self.clip.scope, r, params) for r in rules
            ]
            if _norm_memory.remembers(self.clip):
                # A prefix, as all that is kept by path.
                memory.append(jnp.zeros(()))
        else:
            treedef, shapes = _norm_shapes(self.clip, params)
            norms = [_placement.zeros(shape, params) for shape in shapes]
            zeros = jax.tree.unflatten(treedef, norms)
            is_like_params = _outline.is_like_params(self.clip.scope)
            memory = [
                _memory.init(key, rule, zeros, is_like_params=is_like_params)
                for key, rule in self.rules.items()
            ]
            if _norm_memory.remembers(self.clip):
                memory.append(self._blank_vectors(params))
        blank = _state.blank(treedef, self.clip.scope, self.record)
        if self.has_leaf_norms:
            blank = blank._replace(clip_leaf_norm=self._blank_leaf_norms(params))
        step = jnp.zeros((), jnp.int32)
        return ClipState(step, memory, {self.name: blank} if self.record else {})

    def _blank_leaf_norms(self, params: PyTree) -> LeafNorms:
        if _outline.is_placeholder(params):
            # A prefix, as all that is kept by path.
            return jnp.zeros((), jnp.float32)
        treedef, _ = _norm_shapes(_leaf_record.by_leaf(self.clip), params)
        return _leaf_record.blank(treedef)

    def _blank_vectors(self, params: PyTree) -> PerNorm:
        treedef, shapes = _norm_shapes(self.clip, params, _norm_memory.starts)
        zeros = [_placement.zeros(shape, params) for shape in shapes]
        return _norm_memory.blank(treedef, zeros)

    def decide(
        self,
        updates: PyTree,
        state: ClipState,
        params: PyTree,
        extra: dict[str, Any],
        *,
        in_common: bool = False,
    ) -> Decision:
        """The norms and thresholds of a step; `in_common` if all devices must agree."""
        layout = self.clip.layout(updates)
        _state.check_state(
            state, self.num_memories, layout.treedef,
            self.name, self.clip.scope, self.record,
        )  # fmt: skip
        if in_common or jax.tree.leaves(state.clip_memory):
            self.clip.check_spans(layout)
        now = self.clip.at(state.clip_step)
        memories, vectors = list(state.clip_memory), []
        if _norm_memory.remembers(now):
            measured, found = _norm_memory.measure(now, layout, memories.pop())
            leaf_norms, vectors = None, [found]
        elif self.has_leaf_norms:
            measured, leaf_norms = _leaf_record.measure(now, layout, updates)
        else:
            measured, leaf_norms = now.measure(layout), None
        if self.record:
            _state.check_leaf_norms(state.clip_record[self.name], leaf_norms)
        bad = now.bad(layout, measured)
        step = Decision(now, layout, measured, bad, None, [], leaf_norms)
        values = {}
        for (key, rule), memory in zip(self.rules.items(), memories, strict=True):
            if isinstance(rule, Constant):
                values[key] = [rule.value] * len(layout.blocks)
            elif _memory.is_fixed(rule):
                norm = layout.tree(measured.entries())
                found = _memory.fixed(key, rule, norm, state.clip_step)
                values[key] = layout.entries(found)
            else:
                seen = _seen(step, state.clip_step, updates, params, extra)
                flags = layout.tree(step.bad.entries())
                found, memory = _memory.update(
                    key, rule, seen, memory, flags,
                    is_like_params=_outline.is_like_params(self.clip.scope),
                )  # fmt: skip
                values[key] = layout.entries(found)
            step.memories.append(memory)
        step.memories.extend(vectors)
        return step._replace(limits=_limits(now, values, measured))

    def recorded(self, step: Decision, coefficients: Any) -> ClipRecord:
        """What a step alone brings to the record."""
        declared = step.measured.with_entries(
            [_measure.declared_across(b) for b in step.layout.blocks]
        )
        limits, found = step.clip.recorded(step.measured, step.limits, coefficients)
        new = _record.of_step(
            step.layout.treedef,
            self.clip.scope,
            self.record,
            [step.measured, limits, found, step.bad, declared],
            learns=bool(jax.tree.leaves(step.memories[: len(self.rules)])),
        )
        return new._replace(clip_leaf_norm=step.leaf_norms)

    def after(
        self, state: ClipState, step: Decision, new: ClipRecord | None
    ) -> ClipState:
        """The state after a step."""
        count = counted(state.clip_step)
        if new is None:
            return ClipState(count, step.memories, {})
        record = _record.advanced(state.clip_record[self.name], new)
        return ClipState(count, step.memories, {self.name: record})


def rules_of(threshold: ThresholdTree, clip: Clip[Any, Any]) -> dict[str, PyTree]:
    """The rules of a threshold by the names of its arguments."""
    if isinstance(threshold, _resolve.Named):
        name, given = threshold.name, threshold.value
        return {name: _of_scope(name, given, clip)}
    if not isinstance(threshold, Bounds):
        return {"threshold": _of_scope("threshold", threshold, clip)}
    if not isinstance(clip, ElementClip):
        raise ValueError(
            "Two bounds are for single elements. Give over='element' and"
            " response='hard' with thresholds.bounds(...), or one threshold."
        )
    return {"lower": threshold.lower, "upper": threshold.upper}


def _of_scope(name: str, threshold: ThresholdTree, clip: Clip[Any, Any]) -> PyTree:
    rules = _resolve.as_rules(name, threshold)
    is_tree = clip.scope is TREE and not _resolve.is_rule(threshold)
    if is_tree and any(map(np.ndim, jax.tree.leaves(threshold))):
        wanted = "one number, optax schedule or rule, since the tree has one norm"
        advice = (
            "To clip gradients at once call optclip.functional.clip_by_global_norm("
            "grads, max_norm)."
        )
        raise TypeError(_validate.must_be(name, wanted, threshold, advice))
    return rules


def _norms(clip: Clip[Any, Any], layout: Layout) -> list[jax.Array]:
    return clip.measure(layout).entries()


def _norm_shapes(
    clip: Clip[Any, Any],
    params: PyTree,
    measure: Callable[[Clip[Any, Any], Layout], list[jax.Array]] = _norms,
) -> tuple[TreeDef, list[jax.ShapeDtypeStruct]]:
    """The structure of the norms of trees like `params`, nothing computed."""
    local = clip.at_init()
    flat = _leaves.flatten(params)
    live = flat.clippable()
    treedefs = []

    def found(arrays: list[Leaf]) -> list[jax.Array]:
        given = iter(arrays)
        leaves = [
            next(given) if is_live else x
            for is_live, x in zip(live, flat.leaves, strict=True)
        ]
        layout = local.layout(flat.rebuild(leaves))
        treedefs.append(layout.treedef)
        return measure(local, layout)

    arrays = [x for is_live, x in zip(live, flat.leaves, strict=True) if is_live]
    shapes = jax.eval_shape(found, arrays)
    return treedefs[-1], shapes


def _seen(
    step: Decision,
    count: jax.Array,
    updates: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> Seen:
    """What a rule is shown of a step."""
    norm = step.layout.tree(step.measured.entries())
    measure = functools.partial(_norm_tree, step.clip)
    return Seen(norm, None, step.clip.keep, measure, params, count, extra, updates)


def _norm_tree(clip: Clip[Any, Any], tree: PyTree, *, guarded: bool = True) -> PyTree:
    # A tree of its own structure: parameters may have leaves that updates have not.
    layout = clip.layout(tree)
    return layout.tree(clip.measure(layout, guarded=guarded).entries())


def _limits(
    clip: Clip[Any, Any], values: dict[str, list[Any]], measured: Batched
) -> Any:
    if len(values) == 2:
        return [Limits(lo, hi) for lo, hi in zip(*values.values(), strict=True)]
    ((name, found),) = values.items()
    return clip.fit(name, found, measured)
