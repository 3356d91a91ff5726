"""Thresholds of numbers and schedules, which depend only on the step."""

from __future__ import annotations

import jax

from optclip._arrays import _prefix
from optclip._arrays._types import PyTree
from optclip.thresholds._fixed import Constant, Schedule
from optclip.thresholds._rule import Rule
from optclip.thresholds._rule_results import check_threshold
from optclip.thresholds._threshold_argument import is_rule


def is_fixed(rules: PyTree) -> bool:
    """Return whether all thresholds depend only on the step."""
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    return all(isinstance(rule, (Constant, Schedule)) for rule in leaves)


def fixed_thresholds(name: str, rules: PyTree, norm: PyTree, step: jax.Array) -> PyTree:
    """Return the thresholds of fixed rules, with the structure of the norms."""
    pairs = _rules_with_norms(name, rules, norm)
    fixed_rules = [
        (r, norms) for r, norms in pairs if isinstance(r, (Constant, Schedule))
    ]
    thresholds = []
    for rule, norms in fixed_rules:
        threshold = rule.at(step)
        check_threshold(name, rule, threshold, norms)
        thresholds.append(_prefix.fill(name, threshold, norms))
    treedef = jax.tree.structure(rules, is_leaf=is_rule)
    return jax.tree.unflatten(treedef, thresholds)


def _rules_with_norms(
    name: str, rules: PyTree, norm: PyTree
) -> list[tuple[Rule, PyTree]]:
    """Return each rule with its subtree of norms."""
    pairs: list[tuple[Rule, PyTree]] = []
    _prefix.map_prefix(
        name, lambda *pair: pairs.append(pair), rules, norm, is_leaf=is_rule
    )
    return pairs
