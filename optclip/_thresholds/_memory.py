"""One step of the rules: their norms, thresholds and memories.

With a tree of 291 norms every operation of a rule becomes 291 operations, and every
sort 291 sorts, which take XLA a minute to compile. Rules of this package therefore
compute with one vector.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._arrays import _batching, _numerics, _packed_state, _prefix, _xla
from .._arrays._batching import Batched
from .._arrays._types import Number, PyTree, TreeDef
from . import _learning
from ._rule import Rule, Seen, is_rule, takes_vector
from ._rule_results import as_array_of_memory, check_threshold, checked_update
from ._threshold_argument import Constant, Schedule


@dataclasses.dataclass(frozen=True)
class NormsOfRule:
    """One rule and its norms.

    Attributes:
      rule: The rule.
      treedef: Structure of its norms.
      indices: Position of each of them among all norms.
      is_vector: Whether the rule receives them as one vector in a `PerNorm`, not as a
        tree.
    """

    rule: Rule
    treedef: TreeDef
    indices: tuple[int, ...]
    is_vector: bool

    def of_vector(self, vector: Any) -> PyTree:
        """Return a vector in the form that the rule receives."""
        return _packed_state.of_vector(self.treedef, vector)

    def select(self, values: Batched) -> PyTree:
        """Select the values of this rule's norms, in the form that the rule receives.

        They are slices: most rules stack them again, and XLA then removes both.
        """
        if self.is_vector and len(self.indices) == len(values.shapes):
            return self.of_vector(values.vector())
        entries = values.entries(as_slices=True)
        selected = [entries[i] for i in self.indices]
        if self.is_vector:
            return self.of_vector(jnp.stack(selected))
        return self.treedef.unflatten(selected)

    def fill(self, name: str, threshold: PyTree, norm: PyTree) -> PyTree:
        """Return the threshold of each norm, from a prefix of the norms' tree."""
        if not self.is_vector or jax.tree.structure(threshold) in (
            jax.tree.structure(0),
            jax.tree.structure(norm),
        ):
            return _prefix.fill(name, threshold, norm)
        # `fill` only needs the structure of the tree.
        example = self.treedef.unflatten(self.indices)
        filled = jax.tree.leaves(_prefix.fill(name, threshold, example))
        return self.of_vector(jnp.stack([jnp.asarray(x) for x in filled]))

    def entries(self, thresholds: PyTree) -> list[Number]:
        """Return one threshold per norm."""
        if not self.is_vector:
            return self.treedef.flatten_up_to(thresholds)
        (vector,) = jax.tree.leaves(thresholds)
        return list(jnp.unstack(vector))


def norms_of_rules(
    name: str,
    rules: PyTree,
    treedef: TreeDef,
    shapes: list[tuple[int, ...]],
    *,
    is_like_params: bool,
) -> list[NormsOfRule]:
    """Return each rule with its norms.

    Args:
      name: Argument that the rules were passed as.
      rules: One rule, or a tree of them, as a prefix of the norms.
      treedef: Structure of the norms.
      shapes: Shape of each norm.
      is_like_params: Whether norms are as large as the parameters. Rules then receive a
        tree, even if each parameter is a single number.

    Raises:
      ValueError: `rules` is not a prefix of that structure.
    """
    pairs: list[tuple[Rule, PyTree]] = []
    _prefix.map_prefix(
        name,
        lambda *pair: pairs.append(pair),
        rules,
        treedef.unflatten(range(treedef.num_leaves)),
        is_leaf=is_rule,
    )
    out = []
    for rule, tree in pairs:
        indices, structure = jax.tree.flatten(tree)
        is_vector = (
            takes_vector(rule)
            and not is_like_params
            and len(indices) > 1
            and not any(shapes[i] for i in indices)
        )
        out.append(NormsOfRule(rule, structure, tuple(indices), is_vector))
    return out


def init_memory(
    name: str,
    rules: PyTree,
    treedef: TreeDef,
    norms: list[Any],
    zeros: Callable[[Any], jax.Array],
    *,
    is_like_params: bool = False,
) -> list[PyTree]:
    """Return the memory of each rule.

    Args:
      name: Argument that the rules were passed as.
      rules: One rule, or a tree of them.
      treedef: Structure of the norms.
      norms: Shape and dtype of each norm.
      zeros: Function from a shape and dtype to an array.
      is_like_params: Whether norms are as large as the parameters.
    """
    memories = []
    shapes = [norm.shape for norm in norms]
    of_rules = norms_of_rules(
        name, rules, treedef, shapes, is_like_params=is_like_params
    )
    for part in of_rules:
        types = [norms[i] for i in part.indices]
        if part.is_vector:
            vector = jax.eval_shape(lambda *x: jnp.stack(x), *types)
            norm = part.of_vector(zeros(vector))
        else:
            norm = part.treedef.unflatten(map(zeros, types))
        as_array = functools.partial(as_array_of_memory, name, part.rule)
        made = jax.tree.map(as_array, part.rule.init(norm))
        if not part.is_vector:
            made = _packed_state.packed(made, norm, is_like_params=is_like_params)
        memories.append(made)
    return memories


def is_fixed(rules: PyTree) -> bool:
    """Return whether all thresholds depend only on the step."""
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    return all(isinstance(rule, (Constant, Schedule)) for rule in leaves)


def at_step(name: str, rules: PyTree, step: jax.Array) -> PyTree:
    """Return the thresholds of fixed rules at a step, a prefix of the norms."""

    def at(rule: Constant | Schedule) -> Number:
        threshold = rule.at(step)
        check_threshold(name, rule, threshold, norm=0)
        return threshold

    return jax.tree.map(at, rules, is_leaf=is_rule)


def learned_thresholds(
    name: str,
    rules: PyTree,
    treedef: TreeDef,
    norms: Batched,
    memory: list[PyTree],
    step: Seen,
    *,
    is_like_params: bool = False,
    zeros_teach: bool = False,
) -> tuple[list[Number] | Batched, list[PyTree]]:
    """Return one threshold per norm, and new memories.

    Each norm keeps its memory, counts included, unless it teaches; see `_learning`.

    Args:
      name: Argument that the rules were passed as.
      rules: One rule, or a tree of them, as a prefix of the norms.
      treedef: Structure of the norms.
      norms: Measured norms.
      memory: Memory of each rule.
      step: As all rules see it, without norms. Its `keep` takes norms and thresholds;
        its `measure` returns the structure of all norms, and the norms.
      is_like_params: Whether norms are as large as the parameters.
      zeros_teach: Whether every rule learns from zeros, as from a loss of 0.
    """
    finite = norms.map(jnp.isfinite)
    finite_norms = finite.map(_or_zero, norms)
    of_rules = norms_of_rules(
        name, rules, treedef, norms.shapes, is_like_params=is_like_params
    )
    if len(memory) != len(of_rules):
        raise ValueError(
            f"`state` must have a memory for each of the {len(of_rules)} rules in"
            f" `{name}`, got {len(memory)}. Pass the state returned by this"
            " transformation's init."
        )
    thresholds: list[Number] = [0.0] * len(norms.shapes)
    memories = []
    for place, (part, old) in enumerate(zip(of_rules, memory, strict=True)):
        norm, is_finite = part.select(finite_norms), part.select(finite)
        if part.is_vector:
            _packed_state.check_same_norms(old, part.treedef)
        else:
            old = _packed_state.unpacked(old, norm)
        seen = step._replace(
            norm=norm,
            finite=is_finite,
            keep=functools.partial(_norms_after_clipping, name, part, step, norm),
            measure=functools.partial(_measured, name, rules, place, part, step),
        )
        threshold, new = checked_update(name, part.rule, seen, old)
        filled = part.fill(name, threshold, norm)
        if not isinstance(part.rule, (Constant, Schedule)):
            filled = _batching.each(_largest_for_inf, filled, is_finite)
            filled = _materialized(filled, is_vector=part.is_vector)
        teaching = is_finite
        if not zeros_teach:
            teaching = _learning.teaches(part.rule, norm, is_finite)
        learned = _learning.learned(teaching, new, old)
        if not part.is_vector:
            learned = _packed_state.packed(learned, norm, is_like_params=is_like_params)
        memories.append(learned)
        if part.is_vector and len(of_rules) == len(norms.indices) == 1:
            # The norms are one vector, so the thresholds remain one too.
            return Batched.of_vector(*jax.tree.leaves(filled)), memories
        for i, limit in zip(part.indices, part.entries(filled), strict=True):
            thresholds[i] = limit
    return thresholds, memories


def _or_zero(is_finite: jax.Array, norm: jax.Array) -> jax.Array:
    return _numerics.select(is_finite, norm, jnp.zeros_like(norm))


def _norms_after_clipping(
    name: str, part: NormsOfRule, step: Seen, norm: PyTree, threshold: PyTree
) -> PyTree:
    """Return a rule's norms after clipping, as a function of its threshold alone."""
    return step.keep(norm, part.fill(f"{name}: keep(threshold)", threshold, norm))


def _measured(
    name: str,
    rules: PyTree,
    place: int,
    part: NormsOfRule,
    step: Seen,
    tree: PyTree,
) -> PyTree:
    """Return the norms of a tree that belong to the rule at position `place`."""
    treedef, norms = step.measure(tree)
    # The norms are first arranged as a tree, since parameters may have leaves that the
    # updates lack.
    measured = norms_of_rules(name, rules, treedef, norms.shapes, is_like_params=True)
    if measured[place].treedef == part.treedef:
        return dataclasses.replace(measured[place], is_vector=part.is_vector).select(
            norms
        )
    norm = measured[place].select(norms)
    return part.fill(name, norm, part.of_vector(norm)) if part.is_vector else norm


def _largest_for_inf(threshold: ArrayLike, is_finite: jax.Array) -> jax.Array:
    """Replace inf by the largest float where the norm is not finite.

    A user's infinite threshold changes nothing, NaN and inf included, and
    `_clip/_scale.respond` exempts it from `nonfinite="zero"`. A rule returns inf
    until it has norms, and there the policy must apply too.
    """
    limit = jnp.asarray(threshold)
    if not jnp.issubdtype(limit.dtype, jnp.floating):
        return limit
    if limit.ndim == 0:
        limit = _numerics.broadcast_like(limit, is_finite)
    limit = jnp.broadcast_to(limit, jnp.broadcast_shapes(limit.shape, is_finite.shape))
    largest = jnp.asarray(jnp.finfo(limit.dtype).max, limit.dtype)
    return jnp.where(is_finite | (limit != jnp.inf), limit, largest)


def _materialized(thresholds: PyTree, *, is_vector: bool) -> PyTree:
    """Materialize scalars, which XLA on CPU would otherwise recompute for each use."""
    if is_vector:
        return _xla.materialized(thresholds)
    leaves, treedef = jax.tree.flatten(thresholds)
    scalars = {i: x for i, x in enumerate(leaves) if jnp.ndim(x) == 0}
    floats = {i: x for i, x in scalars.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    if not floats:
        return thresholds
    batched = _xla.materialized(_batching.Batched(list(floats.values())))
    materialized = batched.entries(as_slices=True)
    replaced = dict(zip(floats, materialized, strict=True))
    return treedef.unflatten([replaced.get(i, x) for i, x in enumerate(leaves)])
