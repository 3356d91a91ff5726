"""Check the threshold and the memory that a rule returns."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import _leaves, _validate
from .._arrays._types import PyTree
from ._rule import Rule, Seen, is_rule
from ._threshold_argument import Schedule


def as_array_of_memory(name: str, rule: Rule, value: Any) -> Any:
    """Return an entry of a rule's memory as an array; a PRNG key is unchanged."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    if isinstance(value, (bool, int, float, complex)):
        # With a dtype the type is not weak, as it would not be after a step.
        return jnp.asarray(value, jnp.result_type(value))
    subject = f"`{name}`: the memory returned by init(norm) of the rule {rule!r}"
    raise TypeError(_validate.must_be(subject, "a pytree of arrays", value))


def checked_update(
    name: str, rule: Rule, seen: Seen, memory: PyTree
) -> tuple[PyTree, PyTree]:
    """Return a rule's threshold and new memory; raise if one is invalid."""
    try:
        answer = rule.update(seen, memory)
    except (AttributeError, TypeError, ValueError) as error:
        _raise_if_foreign(name, rule, seen.norm, memory, error)
        raise
    if not isinstance(answer, tuple) or len(answer) != 2:
        subject = f"`{name}`: the result of update(seen, memory) of the rule {rule!r}"
        wanted = "a tuple of two: the threshold and the new memory"
        raise TypeError(_validate.must_be(subject, wanted, answer))
    threshold, new = answer
    check_threshold(name, rule, threshold, seen.norm)
    if _shapes(new) != _shapes(memory):
        _raise_if_foreign(name, rule, seen.norm, memory, None)
        raise ValueError(
            f"`{name}`: update(seen, memory) of the rule {rule!r} must return a memory"
            f" with the structure and shapes of its argument, {_shapes(memory)}, got"
            f" {_shapes(new)}. Change init or update of the rule to match."
        )
    for now, then in zip(jax.tree.leaves(new), jax.tree.leaves(memory), strict=True):
        if _leaves.is_floating(now) and not _leaves.is_floating(then):
            raise ValueError(
                f"`{name}`: the memory of the rule {rule!r} must be floats, got"
                f" {jnp.result_type(then)} from init(norm), which would truncate the"
                " floats that update returns. Return floats from init too."
            )
    return threshold, new


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


def _raise_if_foreign(
    name: str, rule: Rule, norm: PyTree, memory: PyTree, error: Exception | None
) -> None:
    """Raise if a rule failed because the memory in the state is another rule's."""
    try:
        made = jax.eval_shape(rule.init, norm)
    except Exception:
        return  # An init that requires concrete numbers has no abstract result.
    if _shapes(made) != _shapes(memory):
        cause = "" if error is None else f" The rule itself raised: {error}"
        raise ValueError(
            f"`{name}`: the rule {rule!r} must find its own memory in the state,"
            f" {_in_words(made)}, got {_in_words(memory)}. The state belongs to another"
            " threshold or tree. Pass the state that init of this transformation"
            f" returns; a new threshold requires a new state.{cause}"
        ) from error


def _in_words(memory: PyTree) -> str:
    """Return the type and shapes of a memory."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(memory)]
    if not shapes:
        return "no memory, as for a fixed threshold"
    node = jax.tree.structure(memory).node_data()
    kind = node[0].__name__ if node else "array"
    return f"{kind} of shapes {', '.join(map(str, shapes))}"


def _shapes(memory: PyTree) -> tuple[Hashable, list[tuple[int, ...]]]:
    """Return the structure and shapes of a memory; dtypes are cast back later."""
    return jax.tree.structure(memory), [jnp.shape(x) for x in jax.tree.leaves(memory)]
