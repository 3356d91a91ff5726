"""Rules in a step: what they are shown, what they return and what they remember."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optclip._arrays import (
    _batching,
    _leaves,
    _numerics,
    _packed_state,
    _prefix,
    _validate,
    _xla,
)
from optclip._arrays._types import PyTree
from optclip.thresholds import _running
from optclip.thresholds._fixed import Constant, Schedule
from optclip.thresholds._rule import Measure, Rule, Seen
from optclip.thresholds._threshold_argument import is_rule


def init_memory(
    name: str, rules: PyTree, norm: PyTree, *, is_like_params: bool = False
) -> list[PyTree]:
    """Return the memory of each rule; norms may be as large as the parameters."""
    memories = []
    for rule, norms in _rules_with_norms(name, rules, norm):
        made = jax.tree.map(functools.partial(_as_array, name, rule), rule.init(norms))
        memories.append(
            _packed_state.packed(made, norms, is_like_params=is_like_params)
        )
    return memories


def is_fixed(rules: PyTree) -> bool:
    """Whether all of the thresholds are known from the step alone."""
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
        _check_threshold(name, rule, threshold, norms)
        thresholds.append(_prefix.fill(name, threshold, norms))
    treedef = jax.tree.structure(rules, is_leaf=is_rule)
    return jax.tree.unflatten(treedef, thresholds)


class Context(NamedTuple):
    """What a rule may read of a step, besides the norms; see `Seen`.

    Here `keep` takes norms and thresholds, and `measure` returns all norms, of which a
    rule in a tree of rules gets its own.
    """

    keep: Callable[[PyTree, PyTree], PyTree]
    measure: Measure
    params: PyTree
    step: jax.Array
    extra: dict[str, Any]
    updates: PyTree


def learned_thresholds(
    name: str,
    rules: PyTree,
    norms: PyTree,
    memory: list[PyTree],
    context: Context,
    *,
    is_like_params: bool = False,
) -> tuple[PyTree, list[PyTree]]:
    """Return the thresholds, with the structure of the norms, and new memories.

    If one of its norms is not finite, a rule keeps its whole memory, step counts
    included: NaN and inf never enter, and healthy leaves do not learn in that step.

    Args:
      name: the argument that the rules were passed as.
      rules: one rule, or a tree of them, each above the norms that it sets thresholds
        for.
      norms: as measured.
      memory: the memory of each rule.
      context: what rules may read of the step.
      is_like_params: whether norms are as large as the parameters.
    """
    treedef = jax.tree.structure(rules, is_leaf=is_rule)
    finite = treedef.flatten_up_to(_batching.each(jnp.isfinite, norms))
    thresholds, memories = [], []
    for i, (rule, norm) in enumerate(_rules_with_norms(name, rules, norms)):
        finite_norm = _batching.each(_or_zero, finite[i], norm)
        seen = Seen(
            norm=finite_norm,
            finite=finite[i],
            keep=functools.partial(
                _norms_after_clipping, name, context.keep, finite_norm
            ),
            measure=lambda tree, i=i, **how: treedef.flatten_up_to(
                context.measure(tree, **how)
            )[i],
            params=context.params,
            step=context.step,
            extra=context.extra,
            updates=context.updates,
        )
        old = _packed_state.unpacked(memory[i], norm)
        threshold, new = _checked_update(name, rule, seen, old)
        filled = _prefix.fill(name, threshold, norm)
        if not isinstance(rule, (Constant, Schedule)):
            filled = _materialized(_batching.each(_largest_for_inf, filled, finite[i]))
        thresholds.append(filled)
        learned = _running.taken_if(finite[i], new, old)
        memories.append(
            _packed_state.packed(learned, norm, is_like_params=is_like_params)
        )
    return jax.tree.unflatten(treedef, thresholds), memories


def _or_zero(is_finite: jax.Array, norm: jax.Array) -> jax.Array:
    return _numerics.select(is_finite, norm, jnp.zeros_like(norm))


def _as_array(name: str, rule: Rule, value: Any) -> Any:
    """Return an entry of a rule's memory as an array, a PRNG key unchanged."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    if isinstance(value, (bool, int, float, complex)):
        return jnp.asarray(value)
    subject = f"`{name}`: what init(norm) of the rule {rule!r} returns"
    raise TypeError(_validate.must_be(subject, "a pytree of arrays", value))


def _checked_update(
    name: str, rule: Rule, seen: Seen, memory: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the threshold and memory that a rule returns; raise if invalid."""
    try:
        answer = rule.update(seen, memory)
    except (AttributeError, TypeError, ValueError) as error:
        _raise_if_foreign(name, rule, seen.norm, memory, error)
        raise
    if not isinstance(answer, tuple) or len(answer) != 2:
        subject = f"`{name}`: what update(seen, memory) of the rule {rule!r} returns"
        wanted = "a tuple of two, the threshold and the new memory"
        raise TypeError(_validate.must_be(subject, wanted, answer))
    threshold, new = answer
    _check_threshold(name, rule, threshold, seen.norm)
    if _shapes(new) != _shapes(memory):
        _raise_if_foreign(name, rule, seen.norm, memory, None)
        raise ValueError(
            f"`{name}`: update(seen, memory) of the rule {rule!r} must return a memory"
            f" of the structure and shapes of the one it is given, {_shapes(memory)},"
            f" got {_shapes(new)}."
        )
    for now, then in zip(jax.tree.leaves(new), jax.tree.leaves(memory), strict=True):
        if _leaves.is_floating(now) and not _leaves.is_floating(then):
            raise ValueError(
                f"`{name}`: the memory of the rule {rule!r} must be floats, got"
                f" {jnp.result_type(then)} from init(norm), which would cut the floats"
                " that update returns to whole numbers. Return floats from init too."
            )
    return threshold, new


def _check_threshold(name: str, rule: Rule, threshold: PyTree, norm: PyTree) -> None:
    leaves = jax.tree.leaves(threshold)
    # Of a tree without leaves, which may be None, there are no norms.
    is_missing = threshold is None and norm is not None
    for value in [None] if is_missing else leaves:
        if _validate.is_number(value):
            continue
        is_schedule = isinstance(rule, Schedule)
        who = f"schedule {rule.function!r}" if is_schedule else f"rule {rule!r}"
        subject = f"`{name}`: the threshold that the {who} returns"
        wanted = "a real number, an array, or a tree of these"
        is_factory = is_schedule and is_rule(value)
        advice = "Call it first and give the rule itself." if is_factory else ""
        raise TypeError(_validate.must_be(subject, wanted, value, advice))


def _raise_if_foreign(
    name: str, rule: Rule, norm: PyTree, memory: PyTree, error: Exception | None
) -> None:
    """Raise if a rule failed since the memory in the state is not its own."""
    try:
        made = jax.eval_shape(rule.init, norm)
    except Exception:
        return  # An init that needs concrete numbers cannot say what it makes.
    if _shapes(made) != _shapes(memory):
        cause = "" if error is None else f" The rule itself says: {error}"
        raise ValueError(
            f"`{name}`: the memory in the state must be of the structure and shapes"
            f" that the rule {rule!r} has for these updates, {_shapes(made)}, got"
            f" {_shapes(memory)}. Give the state that init returned for this rule and a"
            f" tree like these updates.{cause}"
        ) from error


def _shapes(memory: PyTree) -> tuple[Hashable, list[tuple[int, ...]]]:
    """Return the structure and shapes of a memory; dtypes are cast back."""
    return jax.tree.structure(memory), [jnp.shape(x) for x in jax.tree.leaves(memory)]


def _rules_with_norms(
    name: str, rules: PyTree, norm: PyTree
) -> list[tuple[Rule, PyTree]]:
    """Return each rule with its subtree of norms."""
    pairs: list[tuple[Rule, PyTree]] = []
    _prefix.map_prefix(
        name, lambda *pair: pairs.append(pair), rules, norm, is_leaf=is_rule
    )
    return pairs


def _norms_after_clipping(
    name: str, keep: Callable[..., PyTree], norm: PyTree, threshold: PyTree
) -> PyTree:
    """Compute `keep` of a rule's norms, as a function of its threshold alone."""
    return keep(norm, _prefix.fill(f"{name}: keep(threshold)", threshold, norm))


def _largest_for_inf(threshold: ArrayLike, is_finite: jax.Array) -> jax.Array:
    """Replace inf by the largest float where the norm is not finite.

    An infinite threshold of the user's changes nothing, NaN and inf included, and
    `_clip/_coefficient.respond` exempts it from `nonfinite="zero"`. A rule returns inf
    as long as it knows no norms, and the policy applies then too.
    """
    limit = jnp.asarray(threshold)
    if not jnp.issubdtype(limit.dtype, jnp.floating):
        return limit
    if limit.ndim == 0:
        limit = _numerics.broadcast_like(limit, is_finite)
    limit = jnp.broadcast_to(limit, jnp.broadcast_shapes(limit.shape, is_finite.shape))
    largest = jnp.asarray(jnp.finfo(limit.dtype).max, limit.dtype)
    return jnp.where(is_finite | (limit != jnp.inf), limit, largest)


def _materialized(thresholds: PyTree) -> PyTree:
    """Materialize scalars, which XLA on CPU would recompute in every use."""
    leaves, treedef = jax.tree.flatten(thresholds)
    scalars = {i: x for i, x in enumerate(leaves) if jnp.ndim(x) == 0}
    floats = {i: x for i, x in scalars.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    if not floats:
        return thresholds
    batched = _xla.materialized(_batching.Batched(list(floats.values())))
    materialized = batched.entries(as_slices=True)
    replaced = dict(zip(floats, materialized, strict=True))
    return treedef.unflatten([replaced.get(i, x) for i, x in enumerate(leaves)])
