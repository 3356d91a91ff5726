"""Rules in a step: what they are shown, what they return and what they remember."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import (
    _batching,
    _by_path,
    _leaves,
    _numerics,
    _prefix,
    _validate,
    _xla,
)
from optclip._arrays._types import PyTree
from optclip.thresholds import _running
from optclip.thresholds._rule import Constant, Rule, Schedule, Seen, is_rule


def init(
    name: str, rules: Any, norm: Any, *, is_like_params: bool = False
) -> list[Any]:
    """The memory of each rule; norms may be as large as the parameters."""
    leaves, parts = _matched(name, rules, norm)
    made = [
        jax.tree.map(functools.partial(_remembered, name, rule), rule.init(part))
        for rule, part in zip(leaves, parts, strict=True)
    ]
    return [
        _by_path.packed(memory, part, is_like_params=is_like_params)
        for memory, part in zip(made, parts, strict=True)
    ]


def is_fixed(rules: Any) -> bool:
    """Whether all of the thresholds are known from the step alone."""
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    return all(isinstance(rule, (Constant, Schedule)) for rule in leaves)


def fixed(name: str, rules: Any, norm: Any, step: jax.Array) -> Any:
    """The thresholds of rules that are fixed, with the structure of the norms."""
    leaves, parts = _matched(name, rules, norm)
    answers = [r.at(step) for r in leaves if isinstance(r, (Constant, Schedule))]
    for rule, answer, part in zip(leaves, answers, parts, strict=True):
        _check_threshold(name, rule, answer, part)
    filled = [_prefix.fill(name, *pair) for pair in zip(answers, parts, strict=True)]
    treedef = jax.tree.structure(rules, is_leaf=is_rule)
    return jax.tree.unflatten(treedef, filled)


def update(
    name: str,
    rules: Any,
    seen: Seen,
    memory: list[Any],
    bad: Any,
    *,
    is_like_params: bool = False,
) -> tuple[Any, list[Any]]:
    """The thresholds, with the structure of the norms, and each rule's new memory.

    A rule that saw a non-finite norm keeps the memory it had: NaN and inf never enter.
    `seen` is of the whole tree, its norms as measured, its `keep` of trees of one
    structure; each rule is shown its own part. `bad` says for each norm whether an
    entry of it is not finite: what a rule lets pass for want of knowledge is then not
    untouchable.
    """
    treedef = jax.tree.structure(rules, is_leaf=is_rule)
    leaves, norms = _matched(name, rules, seen.norm)
    flags, bads = (
        treedef.flatten_up_to(tree)
        for tree in (_batching.each(jnp.isfinite, seen.norm), bad)
    )
    found, memories = [], []
    for i, (rule, norm) in enumerate(zip(leaves, norms, strict=True)):
        known = _batching.each(_or_0, flags[i], norm)
        own = seen._replace(
            norm=known,
            finite=flags[i],
            keep=functools.partial(_kept, name, seen.keep, known),
            measure=lambda tree, i=i, **how: treedef.flatten_up_to(
                seen.measure(tree, **how)
            )[i],
        )
        old = _by_path.unpacked(memory[i], norm)
        threshold, new = _answer(name, rule, own, old)
        filled = _prefix.fill(name, threshold, norm)
        if not isinstance(rule, (Constant, Schedule)):
            filled = _once(_batching.each(_bounded_if, filled, bads[i]))
        found.append(filled)
        taken = _running.taken_if(flags[i], new, old)
        memories.append(_by_path.packed(taken, norm, is_like_params=is_like_params))
    return jax.tree.unflatten(treedef, found), memories


def _or_0(is_finite: jax.Array, norm: jax.Array) -> jax.Array:
    return _numerics.select(is_finite, norm, jnp.zeros_like(norm))


def _remembered(name: str, rule: Any, value: Any) -> Any:
    """An entry of a rule's memory as an array, a PRNG key as it is."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    if isinstance(value, (bool, int, float, complex)):
        return jnp.asarray(value)
    subject = f"`{name}`: what init(norm) of the rule {rule!r} returns"
    raise TypeError(_validate.must_be(subject, "a pytree of arrays", value))


def _answer(name: str, rule: Any, seen: Seen, memory: PyTree) -> tuple[Any, Any]:
    """The threshold and memory that a rule returns, checked to be such."""
    try:
        found = rule.update(seen, memory)
    except (AttributeError, TypeError, ValueError) as error:
        _refuse_foreign(name, rule, seen.norm, memory, error)
        raise
    if not isinstance(found, tuple) or len(found) != 2:
        subject = f"`{name}`: what update(seen, memory) of the rule {rule!r} returns"
        wanted = "a tuple of two, the threshold and the new memory"
        raise TypeError(_validate.must_be(subject, wanted, found))
    threshold, new = found
    _check_threshold(name, rule, threshold, seen.norm)
    if _types(new) != _types(memory):
        _refuse_foreign(name, rule, seen.norm, memory, None)
        raise ValueError(
            f"`{name}`: update(seen, memory) of the rule {rule!r} must return a memory"
            f" of the structure and shapes of the one it is given, {_types(memory)},"
            f" got {_types(new)}."
        )
    for now, then in zip(jax.tree.leaves(new), jax.tree.leaves(memory), strict=True):
        if _leaves.is_floating(now) and not _leaves.is_floating(then):
            raise ValueError(
                f"`{name}`: the memory of the rule {rule!r} must be floats, got"
                f" {jnp.result_type(then)} from init(norm), which would cut the floats"
                " that update returns to whole numbers. Return floats from init too."
            )
    return threshold, new


def _check_threshold(name: str, rule: Any, threshold: Any, norm: Any) -> None:
    leaves = jax.tree.leaves(threshold)
    # Of a tree without leaves, which may be None, there are no norms.
    is_missing = threshold is None and norm is not None
    for value in [None] if is_missing else leaves:
        if _validate.is_number(value):
            continue
        if is_rule(value):
            raise TypeError(
                f"`{name}`: the schedule {rule.function!r} must return a number, got a"
                f" rule, {type(value).__name__}. Call it first and give the rule"
                " itself."
            )
        who = "schedule" if isinstance(rule, Schedule) else f"rule {rule!r}"
        subject = f"`{name}`: the threshold that the {who} returns"
        wanted = "a real number, an array, or a tree of these"
        raise TypeError(_validate.must_be(subject, wanted, value))


def _refuse_foreign(
    name: str, rule: Any, norm: Any, memory: PyTree, error: Exception | None
) -> None:
    """Raise if it is the memory of other norms that a rule failed on."""
    try:
        made = jax.eval_shape(rule.init, norm)
    except Exception:
        return  # An init that wants known numbers: which memory it makes is not known.
    if _types(made) != _types(memory):
        cause = "" if error is None else f" The rule itself says: {error}"
        raise ValueError(
            f"`{name}`: the memory in the state must be of the structure and shapes"
            f" that the rule {rule!r} has for these updates, {_types(made)}, got"
            f" {_types(memory)}. Give the state that init returned for this rule and a"
            f" tree like these updates.{cause}"
        ) from error


def _types(memory: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    """The structure and shapes of a memory; dtypes are cast back."""
    return jax.tree.structure(memory), [jnp.shape(x) for x in jax.tree.leaves(memory)]


def _matched(name: str, rules: Any, norm: Any) -> tuple[list[Rule], list[Any]]:
    parts: list[Any] = []
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    _prefix.map_prefix(
        name, lambda _, part: parts.append(part), rules, norm, is_leaf=is_rule
    )
    return leaves, parts


def _kept(name: str, keep: Callable[..., Any], norm: Any, threshold: Any) -> Any:
    return keep(norm, _prefix.fill(f"{name}: keep(threshold)", threshold, norm))


def _bounded_if(threshold: Any, bad: jax.Array) -> jax.Array:
    """The largest float in place of inf, where a norm is not finite.

    A user's own inf touches nothing, NaN and inf included; a rule's only means that it
    does not know better, so that `nonfinite=` still holds.
    """
    limit = jnp.asarray(threshold)
    if not jnp.issubdtype(limit.dtype, jnp.floating):
        return limit
    if limit.ndim == 0:
        limit = _numerics.broadcast_like(limit, bad)
    limit = jnp.broadcast_to(limit, jnp.broadcast_shapes(limit.shape, bad.shape))
    largest = jnp.asarray(jnp.finfo(limit.dtype).max, limit.dtype)
    return jnp.where((limit == jnp.inf) & bad, largest, limit)


def _once(thresholds: PyTree) -> Any:
    """The same; XLA on CPU would compute each anew for all that is made of it."""
    leaves, treedef = jax.tree.flatten(thresholds)
    scalars = {i: x for i, x in enumerate(leaves) if jnp.ndim(x) == 0}
    floats = {i: x for i, x in scalars.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    if not floats:
        return thresholds
    batched = _xla.materialized(_batching.Batched(list(floats.values())))
    materialized = batched.entries(as_slices=True)
    found = dict(zip(floats, materialized, strict=True))
    return treedef.unflatten([found.get(i, x) for i, x in enumerate(leaves)])
