"""Thresholds of numbers and schedules, which depend only on the step."""

from __future__ import annotations

import jax

from optclip._arrays import _prefix, _validate
from optclip._arrays._types import PyTree
from optclip.thresholds._fixed import Constant, Schedule
from optclip.thresholds._rule import Rule
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


def check_threshold(name: str, rule: Rule, threshold: PyTree, norm: PyTree) -> None:
    """Raise unless a rule returned numbers, arrays or a tree of these."""
    leaves = jax.tree.leaves(threshold)
    # A tree without leaves, which may be None, has no norms.
    is_missing = threshold is None and norm is not None
    for value in [None] if is_missing else leaves:
        if _validate.is_number(value):
            continue
        is_schedule = isinstance(rule, Schedule)
        who = f"schedule {rule.function!r}" if is_schedule else f"rule {rule!r}"
        subject = f"`{name}`: the threshold returned by the {who}"
        wanted = "a real number, an array, or a tree of these"
        is_factory = is_schedule and is_rule(value)
        advice = "Call it first and pass the rule itself." if is_factory else ""
        raise TypeError(_validate.must_be(subject, wanted, value, advice))


def _rules_with_norms(
    name: str, rules: PyTree, norm: PyTree
) -> list[tuple[Rule, PyTree]]:
    """Return each rule with its subtree of norms."""
    pairs: list[tuple[Rule, PyTree]] = []
    _prefix.map_prefix(
        name, lambda *pair: pairs.append(pair), rules, norm, is_leaf=is_rule
    )
    return pairs
