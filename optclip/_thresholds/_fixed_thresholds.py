"""Thresholds of numbers and schedules, which depend only on the step."""

from __future__ import annotations

import jax

from .._arrays import _prefix
from .._arrays._types import PyTree
from ._fixed import Constant, Schedule
from ._rule_results import check_threshold
from ._threshold_argument import is_rule


def is_fixed(rules: PyTree) -> bool:
    """Return whether all thresholds depend only on the step."""
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    return all(isinstance(rule, (Constant, Schedule)) for rule in leaves)


def fixed_thresholds(name: str, rules: PyTree, norm: PyTree, step: jax.Array) -> PyTree:
    """Return the thresholds of fixed rules, with the structure of the norms."""

    def filled(rule: Constant | Schedule, norms: PyTree) -> PyTree:
        threshold = rule.at(step)
        check_threshold(name, rule, threshold, norms)
        return _prefix.fill(name, threshold, norms)

    return _prefix.map_prefix(name, filled, rules, norm, is_leaf=is_rule)
