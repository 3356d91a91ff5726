"""Apply the rules of a threshold argument in each step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optclip._arrays import _prefix, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import PyTree, TreeDef
from optclip._clip import MOVE, Clip, Layout, Thresholds, clipped_norms, layout_of
from optclip.responses._interface import compares_norms
from optclip.scopes._interface import EachElement, EachLeaf, Groups, Tree
from optclip.thresholds import Bounds
from optclip.thresholds._interface import (
    Constant,
    Context,
    Named,
    RelativeToParams,
    as_rules,
    fixed_thresholds,
    init_memory,
    is_fixed,
    is_rule,
    learned_thresholds,
)
from optclip.transforms._positions import pure_call
from optclip.typing import ThresholdTree

# The scopes whose norms are single numbers, and the elements that share one.
_SHARING = {Tree: "the tree", EachLeaf: "each leaf", Groups: "each group"}


@dataclasses.dataclass(frozen=True)
class Rules:
    """Hold one rule, or a tree of them, for each argument that sets a threshold."""

    by_argument: dict[str, PyTree]

    @property
    def are_stateless(self) -> bool:
        """Whether no threshold depends on the step count or on a memory."""
        rules = jax.tree.leaves(self.by_argument, is_leaf=is_rule)
        return all(isinstance(rule, (Constant, RelativeToParams)) for rule in rules)

    @property
    def no_memory(self) -> list[PyTree]:
        """The memories of rules that are stateless."""
        rules = self.by_argument.values()
        return [[()] * len(jax.tree.leaves(rule, is_leaf=is_rule)) for rule in rules]

    def init(
        self,
        treedef: TreeDef,
        norms: list[Any],
        zeros: Callable[[Any], jax.Array],
        *,
        is_like_params: bool,
    ) -> list[PyTree]:
        """Return the memory of each rule, see `thresholds._memory.init_memory`."""
        return [
            init_memory(
                name, rule, treedef, norms, zeros, is_like_params=is_like_params
            )
            for name, rule in self.by_argument.items()
        ]

    def thresholds(
        self,
        clip: Clip,
        layout: Layout,
        norms: Batched,
        memories: list[PyTree],
        step: jax.Array,
        updates: PyTree,
        params: PyTree,
        extra: dict[str, Any],
    ) -> Thresholds:
        """Return the thresholds of one step, and the memory of the rules after it.

        Args:
          clip: The clipping operation, with its response as it is in this step.
          layout: The updates laid out.
          norms: As measured.
          memories: The memory of each rule.
          step: The number of steps before this one.
          updates: As passed to `update`.
          params: As passed to `update`.
          extra: The extra arguments of `update`.
        """
        values: dict[str, list[Any] | Batched] = {}
        new_memories = []
        rules = zip(self.by_argument.items(), memories, strict=True)
        for (name, rule), memory in rules:
            if isinstance(rule, Constant):
                values[name] = [rule.value] * len(layout.blocks)
                new_memories.append(memory)
                continue
            if is_fixed(rule):
                norm = layout.tree(norms.entries())
                thresholds = fixed_thresholds(name, rule, norm, step)
                values[name] = layout.entries(thresholds)
            else:
                keep = functools.partial(clipped_norms, clip, name)
                measure = functools.partial(_norms_of, clip)
                context = Context(keep, measure, params, step, extra, updates)
                values[name], memory = learned_thresholds(
                    name, rule, layout.treedef, norms, memory, context,
                    is_like_params=isinstance(clip.scope, EachElement),
                )  # fmt: skip
            new_memories.append(memory)
        return Thresholds(values, new_memories)


def rules_of(threshold: ThresholdTree, clip: Clip) -> Rules:
    """Return the rules of a threshold by the names of its arguments."""
    if isinstance(threshold, Named):
        return Rules({threshold.name: _rules_over(threshold, clip)})
    if not isinstance(threshold, Bounds):
        return Rules({"threshold": _rules_over(Named("threshold", threshold), clip)})
    if clip.action is not MOVE or compares_norms(clip.response):
        raise ValueError(
            "thresholds.bounds(...) applies to single elements. Pass over='element' and"
            " response='hard', 'drop' or 'normalize' without eps, or pass one"
            " threshold."
        )
    return Rules({"lower": threshold.lower, "upper": threshold.upper})


def _norms_of(
    clip: Clip, tree: PyTree, *, guarded: bool = True
) -> tuple[TreeDef, Batched]:
    # The tree has its own layout, since parameters may have leaves that updates lack.
    layout = layout_of(clip, tree)
    return layout.treedef, clip.norm.measure(layout.blocks, guarded=guarded).norms


def _rules_over(threshold: Named, clip: Clip) -> PyTree:
    _check_is_no_gradient(threshold, clip)
    rules = as_rules(threshold.name, threshold.value)
    if isinstance(clip.scope, Tree):
        # Raises for a tree of thresholds, since there is one norm.
        _prefix.map_prefix(threshold.name, lambda *_: None, rules, 0, is_leaf=is_rule)
    return rules


def _check_is_no_gradient(threshold: Named, clip: Clip) -> None:
    """Raise if arrays cannot be thresholds of this scope, and may be gradients."""
    name, value = threshold.name, threshold.value
    leaves = jax.tree.leaves(value, is_leaf=is_rule)
    arrays = [x for x in leaves if hasattr(x, "dtype") and np.ndim(x)]
    call = pure_call(threshold.function, "...")
    advice = f"To clip gradients directly, call {call}."
    sharing = _SHARING.get(type(clip.scope))
    if arrays and sharing is not None:
        wanted = f"one number, optax schedule or rule for {sharing}"
        raise TypeError(_validate.must_be(name, wanted, value, advice))
    for array in arrays:
        # A traced array passes, since its values are not known.
        known = _validate.concrete(array) if _validate.is_number(array) else None
        if known is not None and not np.all(known >= 0):
            wanted = "at least 0"
            raise ValueError(_validate.must_be(name, wanted, array, advice))
