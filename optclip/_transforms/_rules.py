"""Apply the rules of a threshold argument in each step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves, _placement, _prefix, _validate
from .._arrays._batching import Batched
from .._arrays._call_errors import pure_call
from .._arrays._packed_state import PerNorm
from .._arrays._types import PyTree, TreeDef
from .._clip import (
    MOVE,
    SCALE,
    ByArgument,
    Clip,
    Layout,
    check_axes_known,
    coefficients_of,
    layout_of,
)
from .._responses import signs
from .._scopes import EachElement, EachLeaf, Groups, Tree
from .._thresholds import (
    Bounds,
    Constant,
    Named,
    Rule,
    Seen,
    as_named,
    as_rules,
    at_step,
    init_memory,
    is_fixed,
    is_rule,
    learned_thresholds,
)
from .._typing import ThresholdTree

# The scopes whose norms are single numbers, and the elements that share one.
_SHARING = {Tree: "the tree", EachLeaf: "each leaf", Groups: "each group"}


@dataclasses.dataclass(frozen=True)
class Rules:
    """Hold one rule, or a tree of them, for each argument that sets a threshold.

    `includes_norm` is passed on to them, see `Seen`.
    """

    by_argument: dict[str, PyTree]
    includes_norm: bool = True

    @property
    def are_stateless(self) -> bool:
        """Whether no threshold depends on the step count or on a memory."""
        return all(getattr(rule, "is_stateless", False) for rule in self.each)

    @property
    def learning(self) -> list[Rule]:
        """The rules that may have a memory."""
        return [
            rule
            for rule in self.each
            if not (getattr(rule, "is_stateless", False) or is_fixed(rule))
        ]

    @functools.cached_property
    def each(self) -> list[Rule]:
        """The rules, in the order of their arguments."""
        # Stored, since each update reads it.
        return jax.tree.leaves(self.by_argument, is_leaf=is_rule)

    def init(
        self,
        treedef: TreeDef,
        norms: list[Any],
        zeros: Callable[[Any], jax.Array],
        *,
        is_like_params: bool,
    ) -> list[PyTree]:
        """Return the memory of each rule, see `init_memory`."""
        return [
            init_memory(
                name, rule, treedef, norms, zeros, is_like_params=is_like_params
            )
            for name, rule in self.by_argument.items()
        ]

    def thresholds(
        self,
        layout: Layout,
        norms: Batched,
        *,
        clip: Clip,
        memories: list[PyTree],
        step: jax.Array,
        updates: PyTree,
        params: PyTree,
        extra: dict[str, Any],
    ) -> tuple[ByArgument, list[PyTree]]:
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
        updates, params = _placement.on_device((updates, params))
        values: ByArgument = {}
        new_memories = []
        rules = zip(self.by_argument.items(), memories, strict=True)
        for (name, rule), memory in rules:
            if isinstance(rule, Constant):
                values[name] = layout.fill(name, rule.value)
            elif is_fixed(rule):
                values[name] = layout.fill(name, at_step(name, rule, step))
            else:
                leaves = jax.tree.leaves(rule, is_leaf=is_rule)
                if any(getattr(each, "couples_norms", False) for each in leaves):
                    check_axes_known(layout)
                keep = functools.partial(_clipped_norms, clip, name)
                measure = functools.partial(_norms_of, clip, layout, updates, params)
                seen = Seen(
                    None, None, keep, measure, params, step, extra, updates,
                    self.includes_norm,
                )  # fmt: skip
                # Norms of elements are as large as the leaves, and stay with these.
                is_like_params = isinstance(clip.scope, EachElement)
                if is_like_params and jax.tree.leaves(memory):
                    _check_together(name, layout)
                here = norms if is_like_params else norms.together()
                limits, memory = learned_thresholds(
                    name, rule, layout.treedef, here, memory, seen,
                    is_like_params=is_like_params,
                )  # fmt: skip
                if here is not norms and isinstance(limits, Batched):
                    limits = limits.entries()
                values[name] = limits
            new_memories.append(memory)
        return values, new_memories


def rules_of(threshold: ThresholdTree, clip: Clip) -> Rules:
    """Return the rules of a threshold by the names of its arguments."""
    if not isinstance(threshold, Bounds):
        named = as_named(threshold)
        return Rules({named.name: _rules_over(named, clip)})
    if clip.action is not MOVE or clip.response.compares_norms:
        raise ValueError(
            f"`response` with lower= and upper= must be 'hard', 'drop', 'normalize' or"
            f" define element(x, lower, upper), got {clip.response!r}. Pass one of"
            " these, or limit=."
        )
    return Rules({"lower": threshold.lower, "upper": threshold.upper})


def _clipped_norms(clip: Clip, name: str, norms: PyTree, thresholds: PyTree) -> PyTree:
    """Return the norms after clipping to thresholds, for `keep` of a threshold rule.

    Both trees have the same structure, and both are a `PerNorm` if the rule takes
    vectors.
    """
    leaves, treedef = jax.tree.flatten(norms)
    batched, limits = Batched(leaves), treedef.flatten_up_to(thresholds)
    if is_vector := isinstance(norms, PerNorm):
        batched, limits = map(
            Batched.of_vector, (*leaves, *jax.tree.leaves(thresholds))
        )
    # A clipped norm is the norm times its coefficient, for elements that move too.
    of_norms = SCALE.fit(clip, {name: limits}, batched)
    clipped = batched.map(jnp.multiply, coefficients_of(clip, batched, of_norms))
    entries = clipped.values if is_vector else clipped.entries(as_slices=True)
    return treedef.unflatten(entries)


def _norms_of(
    clip: Clip,
    like: Layout,
    updates: PyTree,
    params: PyTree,
    tree: PyTree,
) -> tuple[TreeDef, Batched]:
    """Return the norms of a tree like the updates, whose layout is `like`."""
    if tree is params:
        _validate.params_given(params, "which the rule measures")
        _check_leaves(like, params)
    # The tree has its own layout, since parameters may have leaves that updates lack.
    try:
        layout = layout_of(clip, tree)
    except ValueError:
        if tree is params:
            _check_structure(updates, params)
        raise
    # The norm of the tree would include leaves that the updates lack.
    names, known = ({*_leaves.names_of(x.flat.paths)} for x in (layout, like))
    if tree is params and (names - known or layout.treedef != like.treedef):
        _check_structure(updates, params)
    # Squares of parameters do not overflow in a run that trains, and a guard would cost
    # a second pass.
    norms = clip.norm.measure(layout.blocks, guarded=tree is not params).norms
    is_like_params = isinstance(clip.scope, EachElement)
    return layout.treedef, norms if is_like_params else norms.together()


def _check_leaves(like: Layout, params: PyTree) -> None:
    """Raise unless the parameters have each leaf of the updates that is clipped."""
    there = {*_leaves.names_of(_leaves.flatten(params).paths)}
    paths = like.flat.paths
    names = dict(zip(paths, _leaves.names_of(paths), strict=True))
    for leaf in like.used():
        if names[leaf.path] not in there:
            raise ValueError(_prefix.lacks_leaf("params", leaf.path, params))


def _check_together(name: str, layout: Layout) -> None:
    """Raise if leaves are on devices that no single computation accepts."""
    leaves = [leaf for block in layout.blocks for leaf in block.leaves]
    _placement.check_together(
        [(_leaves.named(leaf.path), leaf.array) for leaf in leaves],
        f"The leaves of a rule that learns from elements, passed as `{name}`,",
        "Or use one transformation per device, with optax.partition.",
    )


def _check_structure(updates: PyTree, params: PyTree) -> None:
    """Raise unless the parameters have the updates' structure, or more below None."""
    try:
        _prefix.spread_prefix(
            "params", updates, params,
            is_leaf=lambda x: x is None or _leaves.is_sparse(x) or _prefix.is_masked(x),
        )  # fmt: skip
    except ValueError:
        ours, theirs = (_leaves.flatten(tree).paths for tree in (updates, params))
        missing = [path for path in ours if path not in {*theirs}]
        if missing:
            raise ValueError(_prefix.lacks_leaf("params", missing[0], params)) from None
        more = [path for path in theirs if path not in {*ours}]
        wanted = "a tree with the structure of the updates"
        wanted += f", which lack {_leaves.named(more[0])}" if more else ""
        advice = "The updates may have None there."
        raise ValueError(
            _validate.must_be("params", wanted, params, advice if more else "")
        ) from None


def _rules_over(threshold: Named, clip: Clip) -> PyTree:
    _check_is_no_gradient(threshold, clip)
    _validate.threshold_given(threshold.name, threshold.value)
    rules = as_rules(threshold.name, threshold.value, **signs(clip.response))
    if isinstance(clip.scope, Tree):
        # Raises for a tree of thresholds, since there is one norm.
        _prefix.map_prefix(threshold.name, lambda *_: None, rules, 0, is_leaf=is_rule)
    return rules


def _check_is_no_gradient(threshold: Named, clip: Clip) -> None:
    """Raise if arrays cannot be thresholds of this scope, and may be gradients."""
    name, value = threshold.name, threshold.value
    leaves = jax.tree.leaves(value, is_leaf=is_rule)
    arrays = [x for x in leaves if hasattr(x, "dtype") and np.ndim(x)]
    advice = f"To clip gradients directly, call {pure_call(threshold.function, '...')}."
    sharing = _SHARING.get(type(clip.scope))
    _validate.require(
        name, value, not arrays or sharing is None,
        f"one number, optax schedule or rule for {sharing}", advice, TypeError,
    )  # fmt: skip
    for array in arrays:
        # A traced array passes, since its values are not known.
        known = _validate.concrete(array) if _validate.is_number(array) else None
        is_signed = clip.response.signed
        if known is not None and not (is_signed or np.all(known >= 0)):
            wanted = "at least 0"
            raise ValueError(_validate.must_be(name, wanted, array, advice))
