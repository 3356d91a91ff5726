"""One step of the rules: their norms, thresholds and memories.

With a tree of 291 norms every operation of a rule becomes 291 operations, and every
sort 291 sorts, which take XLA a minute to compile. Rules of this package therefore
compute with one vector.

Each norm counts by itself: a norm that is NaN, inf or, for most rules, 0 keeps its own
memory, and does not affect the memory of the other norms (`teaches`, `learned`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._arrays import (
    _axis_names,
    _batching,
    _collectives,
    _leaves,
    _numerics,
    _packed_state,
    _placement,
    _prefix,
    _validate,
    _xla,
)
from .._arrays._batching import Batched
from .._arrays._types import Number, PyTree, TreeDef
from ._rule import Rule, Seen, is_rule, learns_from_zeros, takes_vector
from ._threshold_argument import Constant, Schedule

# The largest number of flags to materialize. More occur only if the norms are single
# elements or very many slices, and a copy of the flags would then be expensive.
_FEW = 2**16


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
        if any(x.shape for x in types):
            _check_axes(name, part.rule, norm, made)
        if not part.is_vector:
            made = _packed_state.packed(made, norm, is_like_params=is_like_params)
        memories.append(made)
    return memories


def _check_axes(name: str, rule: Rule, norm: PyTree, memory: PyTree) -> None:
    """Raise if an array of a norm's memory has others before the axes of the norm.

    `learned` would select along wrong axes. The memory of longer norms shows which axes
    are those of the norm, also where a window is as long.
    """
    longer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct([size + 1 for size in x.shape], x.dtype), norm
    )
    treedef = jax.tree.structure(norm)
    is_per_norm = functools.partial(_packed_state.is_per_norm, treedef)
    parts, structure = jax.tree.flatten(memory, is_leaf=is_per_norm)
    try:
        others = structure.flatten_up_to(jax.eval_shape(rule.init, longer))
    except Exception:  # The rule may hold arrays for these norms.
        return
    shapes = [
        (of_norm.shape, here.shape, there.shape)
        for pair in zip(parts, others, strict=True)
        if is_per_norm(pair[0])
        for of_norm, *both in zip(
            *map(treedef.flatten_up_to, (longer, *pair)), strict=True
        )
        for here, there in zip(*map(jax.tree.leaves, both), strict=True)
    ]
    for of_norm, here, there in shapes:
        if there[: len(of_norm)] != of_norm and there != here:
            raise ValueError(
                f"`{name}`: arrays in the memory of the rule {rule!r} must begin with"
                f" the axes of their norm, got shape {here}. Put other axes, such as a"
                " window, last."
            )


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
    of_loss: bool = False,
) -> tuple[list[Number] | Batched, list[PyTree]]:
    """Return one threshold per norm, and new memories.

    Each norm keeps its memory, counts included, unless it teaches; see `learned`.

    Args:
      name: Argument that the rules were passed as.
      rules: One rule, or a tree of them, as a prefix of the norms.
      treedef: Structure of the norms.
      norms: Measured norms.
      memory: Memory of each rule.
      step: As all rules see it, without norms. Its `keep` takes norms and thresholds;
        its `measure` returns the structure of all norms, and the norms.
      is_like_params: Whether norms are as large as the parameters.
      of_loss: Whether the norm is a loss: zeros teach it, and no policy reads its
        threshold.
    """
    finite = norms.map(jnp.isfinite)
    finite_norms = finite.map(or_zero, norms)
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
            if not of_loss:
                filled = _batching.each(_largest_for_inf, filled, is_finite)
            filled = _materialized(filled, is_vector=part.is_vector)
        teaching = is_finite
        if not of_loss:
            teaching = teaches(part.rule, norm, is_finite)
        new = learned(teaching, new, old)
        if not part.is_vector:
            new = _packed_state.packed(new, norm, is_like_params=is_like_params)
        memories.append(new)
        if part.is_vector and len(of_rules) == len(norms.indices) == 1:
            # The norms are one vector, so the thresholds remain one too.
            return Batched.of_vector(*jax.tree.leaves(filled)), memories
        for i, limit in zip(part.indices, part.entries(filled), strict=True):
            thresholds[i] = limit
    return thresholds, memories


def or_zero(is_finite: jax.Array, norm: jax.Array) -> jax.Array:
    """Return the norms, with zeros where they are not finite."""
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


# Compiled, so that thresholds of one type are traced once.
@jax.jit
def _largest_for_inf(threshold: ArrayLike, is_finite: jax.Array) -> jax.Array:
    """Replace inf by the largest float where the norm is not finite.

    A user's infinite threshold changes nothing, NaN and inf included, and
    `_clip/_scale.respond` exempts it from `nonfinite="zero"`. A rule returns inf
    until it has norms, and there the policy must apply too. The record restores inf.
    """
    limit = jnp.asarray(threshold)
    if not jnp.issubdtype(limit.dtype, jnp.floating):
        return limit
    limit = _leaves.widen(limit)
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
    scalars = {i: jnp.asarray(x) for i, x in enumerate(leaves) if jnp.ndim(x) == 0}
    floats = {i: x for i, x in scalars.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    if not floats:
        return thresholds
    batched = _xla.materialized(_batching.Batched(list(floats.values())))
    replaced = dict(zip(floats, batched.entries(as_slices=True), strict=True))
    return treedef.unflatten([replaced.get(i, x) for i, x in enumerate(leaves)])


def teaches(rule: object, norm: PyTree, finite: PyTree) -> PyTree:
    """Return for each norm whether a rule learns from it.

    A zero gradient has no size to learn: it comes from an idle expert, a frozen layer
    or a masked loss.
    """
    if learns_from_zeros(rule):
        return finite
    return _batching.each(lambda n, is_finite: is_finite & (n != 0), norm, finite)


def learned(teaching: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Return the memory after a step: the new one of each norm that teaches its rule.

    A part of the memory with the structure of the norms has an entry per norm. The
    other parts are shared by all norms, and are new if one of these teaches.

    Args:
      teaching: Bools like the norms.
      new: Memory that the rule returned.
      old: Memory before the step, with the structure and shapes of `new`.
    """
    flags, treedef = jax.tree.flatten(teaching)
    if not flags or not jax.tree.leaves(new):
        return new
    # The flags are materialized: otherwise XLA on CPU recomputes the norms for each
    # entry of the memory.
    flags = [_xla.materialized(x) if _leaves.size_of(x) <= _FEW else x for x in flags]
    of_norms = treedef.unflatten(flags)
    is_per_norm = functools.partial(_packed_state.is_per_norm, treedef)
    # Called only if a part is shared, since eager code would compute an unused flag.
    any_teaches = functools.cache(lambda: _any(flags))

    def of_part(part: PyTree) -> PyTree:
        """Return one flag for each array of a part of the memory."""
        if not is_per_norm(part):
            return any_teaches()
        return jax.tree.map(
            lambda flag, entry: jax.tree.map(lambda _: flag, entry), of_norms, part
        )

    of_arrays = jax.tree.map(of_part, old, is_leaf=is_per_norm)
    return _batching.each(_new_or_old, new, old, of_arrays, as_slices=False)


def _new_or_old(new: ArrayLike, old: ArrayLike, flag: jax.Array) -> jax.Array:
    """Return the entries of `new` whose norm teaches; dtype and placement of `old`."""
    new = jnp.asarray(new)
    old = jnp.asarray(_numerics.as_counted_in(old, new))
    if new.dtype != old.dtype:
        new = new.astype(old.dtype)
    if new.ndim and jax.typeof(old).sharding.mesh == jax.typeof(new).sharding.mesh:
        new = _placement.placed_as(new, old)
    if flag.shape != old.shape[: flag.ndim]:
        # The array is one entry for all norms of a leaf, such as of its elements.
        flag = _any([flag])
    # Further axes, such as a window, belong to one norm.
    flag = jnp.expand_dims(flag, tuple(range(flag.ndim, old.ndim)))
    flag = jnp.broadcast_to(flag, old.shape)
    if jax.typeof(old).sharding.mesh.empty:  # The state is from a traced `init`.
        new, old = (_placement.placed_as(x, flag) for x in (new, old))
    return _numerics.select(flag, new, old)


def _any(flags: list[jax.Array]) -> jax.Array:
    """Return whether one of the flags is set, on any device."""
    is_set = _batching.Batched(flags).any().astype(jnp.float32)
    # All devices use the same flag, so that their memories stay equal.
    return _xla.materialized(_collectives.reduced_over(lax.pmax, is_set)) > 0


def as_array_of_memory(name: str, rule: Rule, value: Any) -> Any:
    """Return an entry of a rule's memory as an array; a PRNG key is unchanged."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    if isinstance(value, (bool, int, float, complex)):
        # With a dtype the type is not weak, as it would not be after a step.
        return jnp.asarray(value, jnp.result_type(value))
    raise TypeError(
        _validate.must_be(
            f"`{name}`: the memory returned by init(norm) of the rule {rule!r}",
            "a pytree of arrays",
            value,
        )
    )


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
        raise TypeError(
            _validate.must_be(
                f"`{name}`: the result of update(seen, memory) of the rule {rule!r}",
                "a tuple of two: the threshold and the new memory",
                answer,
            )
        )
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
    if "must find its own memory" in str(error):
        return  # The rule inside says so.
    try:
        made = jax.eval_shape(rule.init, norm)
    except Exception:
        return  # An init that requires concrete numbers has no abstract result.
    if _shapes(made) != _shapes(memory):
        cause = "" if error is None else f" The rule itself raised: {error}"
        if _axis_names.is_typed_here():
            cause = f" Call init inside the same shard_map if slices are split.{cause}"
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
