"""The norms for which one rule sets thresholds, as a tree or as one vector.

With a tree of 291 norms every operation of a rule becomes 291 operations, and every
sort 291 sorts, which take XLA a minute to compile. Rules of this package therefore
compute with one vector.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _packed_state, _prefix
from .._arrays._batching import Batched
from .._arrays._types import Number, PyTree, TreeDef
from ._rule import Rule, is_rule, takes_vector


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
