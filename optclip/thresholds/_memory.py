"""One step of the rules: their norms, thresholds and memories."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optclip._arrays import (
    _batching,
    _leaves,
    _numerics,
    _packed_state,
    _validate,
    _xla,
)
from optclip._arrays._batching import Batched
from optclip._arrays._types import Number, PyTree, TreeDef
from optclip.thresholds import _running
from optclip.thresholds._fixed import Constant, Schedule
from optclip.thresholds._fixed_thresholds import check_threshold
from optclip.thresholds._norms_of_rule import NormsOfRule, norms_of_rules
from optclip.thresholds._rule import Rule, Seen


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
    for each in of_rules:
        types = [norms[i] for i in each.indices]
        if each.is_vector:
            vector = jax.eval_shape(lambda *x: jnp.stack(x), *types)
            norm = each.of_vector(zeros(vector))
        else:
            norm = each.treedef.unflatten(map(zeros, types))
        as_array = functools.partial(_as_array, name, each.rule)
        made = jax.tree.map(as_array, each.rule.init(norm))
        if not each.is_vector:
            made = _packed_state.packed(made, norm, is_like_params=is_like_params)
        memories.append(made)
    return memories


class MeasureAll(Protocol):
    """Return the structure of a tree's norms, and the norms."""

    def __call__(
        self, tree: PyTree, /, *, guarded: bool = True
    ) -> tuple[TreeDef, Batched]: ...


class Context(NamedTuple):
    """The values of a step that a rule may read, besides the norms; see `Seen`.

    Here `keep` takes norms and thresholds. `measure` returns all norms, from which each
    rule of a tree receives those below it.
    """

    keep: Callable[[PyTree, PyTree], PyTree]
    measure: MeasureAll
    params: PyTree
    step: jax.Array
    extra: dict[str, Any]
    updates: PyTree


def learned_thresholds(
    name: str,
    rules: PyTree,
    treedef: TreeDef,
    norms: Batched,
    memory: list[PyTree],
    context: Context,
    *,
    is_like_params: bool = False,
) -> tuple[list[Number] | Batched, list[PyTree]]:
    """Return one threshold per norm, and new memories.

    If one of its norms is not finite, a rule keeps its whole memory, step counts
    included: NaN and inf never enter, and healthy leaves do not learn in that step.

    Args:
      name: Argument that the rules were passed as.
      rules: One rule, or a tree of them, as a prefix of the norms.
      treedef: Structure of the norms.
      norms: Measured norms.
      memory: Memory of each rule.
      context: Values of the step that rules may read.
      is_like_params: Whether norms are as large as the parameters.
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
    for place, (each, old) in enumerate(zip(of_rules, memory, strict=True)):
        norm, is_finite = each.select(finite_norms), each.select(finite)
        if each.is_vector:
            _packed_state.check_same_norms(old, each.treedef)
        else:
            old = _packed_state.unpacked(old, norm)
        seen = Seen(
            norm=norm,
            finite=is_finite,
            keep=functools.partial(_norms_after_clipping, name, each, context, norm),
            measure=functools.partial(_measured, name, rules, place, each, context),
            params=context.params,
            step=context.step,
            extra=context.extra,
            updates=context.updates,
        )
        threshold, new = _checked_update(name, each.rule, seen, old)
        filled = each.fill(name, threshold, norm)
        if not isinstance(each.rule, (Constant, Schedule)):
            filled = _batching.each(_largest_for_inf, filled, is_finite)
            filled = _materialized(filled, is_vector=each.is_vector)
        learned = _running.taken_if(is_finite, new, old)
        if not each.is_vector:
            learned = _packed_state.packed(learned, norm, is_like_params=is_like_params)
        memories.append(learned)
        if each.is_vector and len(of_rules) == len(norms.indices) == 1:
            # The norms are one vector, so the thresholds remain one too.
            return Batched.of_vector(*jax.tree.leaves(filled)), memories
        for i, limit in zip(each.indices, each.entries(filled), strict=True):
            thresholds[i] = limit
    return thresholds, memories


def _or_zero(is_finite: jax.Array, norm: jax.Array) -> jax.Array:
    return _numerics.select(is_finite, norm, jnp.zeros_like(norm))


def _as_array(name: str, rule: Rule, value: Any) -> Any:
    """Return an entry of a rule's memory as an array; a PRNG key is unchanged."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    if isinstance(value, (bool, int, float, complex)):
        return jnp.asarray(value)
    subject = f"`{name}`: the memory returned by init(norm) of the rule {rule!r}"
    raise TypeError(_validate.must_be(subject, "a pytree of arrays", value))


def _checked_update(
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


def _norms_after_clipping(
    name: str, each: NormsOfRule, context: Context, norm: PyTree, threshold: PyTree
) -> PyTree:
    """Return a rule's norms after clipping, as a function of its threshold alone."""
    return context.keep(norm, each.fill(f"{name}: keep(threshold)", threshold, norm))


def _measured(
    name: str,
    rules: PyTree,
    place: int,
    each: NormsOfRule,
    context: Context,
    tree: PyTree,
    /,
    *,
    guarded: bool = True,
) -> PyTree:
    """Return the norms of a tree that belong to the rule at position `place`."""
    treedef, norms = context.measure(tree, guarded=guarded)
    # The norms are first arranged as a tree, since parameters may have leaves that the
    # updates lack.
    measured = norms_of_rules(name, rules, treedef, norms.shapes, is_like_params=True)
    if measured[place].treedef == each.treedef:
        return dataclasses.replace(measured[place], is_vector=each.is_vector).select(
            norms
        )
    norm = measured[place].select(norms)
    return each.fill(name, norm, each.of_vector(norm)) if each.is_vector else norm


def _largest_for_inf(threshold: ArrayLike, is_finite: jax.Array) -> jax.Array:
    """Replace inf by the largest float where the norm is not finite.

    A user's infinite threshold changes nothing, NaN and inf included, and
    `_clip/_coefficient.respond` exempts it from `nonfinite="zero"`. A rule returns inf
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
