"""Run a clipping operation in training: its rules, its state, and its record."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._arrays import (
    _axis_names,
    _leaves,
    _numerics,
    _packed_state,
    _placement,
    _validate,
)
from .._arrays._batching import Batched
from .._arrays._numerics import as_count, counted
from .._arrays._packed_state import PerNorm
from .._arrays._types import LeafLike, PyTree, Record
from .._clip import (
    Clip,
    Decision,
    Layout,
    apply,
    check_axes_known,
    decide,
    layout_of,
)
from .._norms import L2, Measured, Measurement, accumulator, flush_small, of_order
from .._responses import is_same_always
from .._scopes import LEAF, TREE, EachElement, Scope, Tree
from .._thresholds import Constant, RelativeToParams, Schedule, is_rule
from .._typing import ClipRecord, ClipState, Mask
from . import _record, _shared_norms
from ._record import Entries
from ._rules import Rules


class Noted(NamedTuple):
    """Hold an engine, the parameters of its `init`, and the state that it returned."""

    engine: Engine
    params: PyTree
    state: ClipState


_NOTED: contextvars.ContextVar[list[Noted] | None]
_NOTED = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting_engines() -> Iterator[list[Noted]]:
    """Yield a list of the engines that create a state meanwhile.

    A transformation consists of two functions, so only calls show what it contains.
    """
    noted: list[Noted] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)
        if (outer := _NOTED.get()) is not None:
            outer += noted


_WITHOUT_STATE = (
    "To clip without a state, call the function of the same name, such as"
    " optclip.functional.clip_by_global_norm(grads, max_norm), or build the"
    " transformation with record=False, which accepts any state. To record in place of"
    " optax's clipping or record=False, move its state with optclip.carry_over."
)
_OF_UPDATE = ("updates", "state", "params")
# Thresholds that no norm changes, so that noise does not exceed them. Without them the
# compiled AGC of a narrow Llama had 67,900 lines instead of 60,400.
_OF_NO_NORM = Constant, Schedule, RelativeToParams

# The shape of a placeholder's norms. It is not a scalar's, so that a sum of norms is
# not mistaken for the norms.
_SHAPE = (2, 3)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """Combine a clipping operation with the rules of its threshold and its record.

    It is hashed by identity, since thresholds and masks may have no hash, and Equinox
    and Optimistix hash the engine of which `init` is a method.
    """

    clip: Clip
    rules: Rules
    record: Record
    name: str
    use_norm: str | None = None

    def __post_init__(self) -> None:
        _record.check_record(self.record, self.name)

    @property
    def needs_state(self) -> bool:
        """Whether an update depends on the step count or on a memory."""
        is_fixed = self.rules.are_stateless and is_same_always(self.clip.response)
        return self.clip.norm.remembers or not is_fixed

    @functools.cached_property
    def learns(self) -> bool:
        """Whether an update may depend on a memory."""
        return self.clip.norm.remembers or bool(self.rules.learning)

    @property
    def key(self) -> str:
        """The key of the record in the state."""
        return _packed_state.as_key(self.name)

    @functools.cached_property
    def measured(self) -> str:
        """The norm and the scope, as the key of a memory: `"Norm 2 0 of EachLeaf"`."""
        return _packed_state.as_key(
            f"{_in_words(self.clip.norm)} of {_in_words(self.clip.scope)}"
        )

    @property
    def is_itemized(self) -> bool:
        """Whether the record has an entry for each norm, not the largest one."""
        return self.clip.scope.itemized or self.record == "leaves"

    @property
    def has_leaf_norms(self) -> bool:
        """Whether norms of leaves are recorded that clipping itself does not use."""
        is_of_tree = self.record == "leaves" and self.clip.scope is TREE
        # The vectors of a power iteration belong to the norm itself.
        return is_of_tree and not self.clip.norm.remembers

    def init(self, params: PyTree) -> ClipState:
        """Return the state before the first step."""
        if is_placeholder(params):
            entries, shapes = Entries(jax.tree.structure(0), (False,)), [()]
            memory = [
                _placeholder_memory(self.clip.scope, rule, params)
                for rule in self.rules.by_argument.values()
            ]
            # The memory of a norm has one number here, a prefix of the true state.
            memory += [jnp.zeros(())] * self.clip.norm.remembers
        else:
            entries, shapes, norms, vectors = _shapes(self.clip, params)
            treedef = entries.treedef
            zeros = functools.partial(_placement.zeros, tree=params)
            memory = self.rules.init(
                treedef, norms, zeros,
                is_like_params=isinstance(self.clip.scope, EachElement),
            )  # fmt: skip
            if self.clip.norm.remembers:
                blank = [zeros(shape) for shape in vectors]
                memory.append(_packed_state.by_position(treedef, blank))
        record = _record.blank(
            entries, shapes, self.clip.scope, itemized=self.is_itemized
        )
        if self.has_leaf_norms:
            if not is_placeholder(params):
                of_leaves = dataclasses.replace(self.clip, scope=LEAF)
                entries, *_ = _shapes(of_leaves, params)
            blank = [jnp.zeros((), jnp.float32) for _ in entries.are_layers]
            record = record._replace(clip_leaf_norm=entries.keyed(blank))
        step, records = jnp.zeros((), jnp.int32), {self.key: record}
        state = ClipState(step, self._named(memory), records if self.record else {})
        if (noted := _NOTED.get()) is not None:
            noted.append(Noted(self, params, state))
        return state

    def decide(
        self,
        updates: PyTree,
        state: ClipState,
        params: PyTree,
        extra: dict[str, Any],
        *,
        in_common: bool = False,
        by_leaf: bool = False,
    ) -> Decision:
        """Measure the updates of a step and decide where to clip them.

        Args:
          updates: As passed to `update`.
          state: The state before the step.
          params: As passed to `update`.
          extra: The extra arguments of `update`, of any type.
          in_common: Whether all devices must decide alike.
          by_leaf: Whether to measure a tree by the norms of its leaves, which can be
            shared with clipping that records them.
        """
        layout = layout_of(self.clip, updates)
        names = [self.name] if self.record else []
        number = len(self.rules.by_argument) + self.clip.norm.remembers
        memory = _record.memory_in(
            state, names, self.measured, number, learns=self.learns
        )
        # Neither a memory nor a common decision may differ between devices.
        if in_common or jax.tree.leaves(state.clip_memory):
            check_axes_known(layout)
        count = as_count(state.clip_step)
        clip = self.clip.at(count)
        rule_memory, norm_memory = memory, []
        if self.clip.norm.remembers:
            *rule_memory, vectors = memory
            norm_memory = _packed_state.in_order(vectors, layout.treedef)
        leaf_norms, norm = None, self.clip.norm
        # The norms of leaves then also give the norm, at no further cost.
        by_leaf &= self.clip.scope is TREE and norm.composes and not norm.remembers
        if self.use_norm is not None:
            measured = Measured(Batched([_passed_norm(extra, self.use_norm, layout)]))
        elif self.has_leaf_norms or by_leaf:
            measured, leaf_norms = _record.measure_leaves(clip, layout, updates)
        else:
            measured = _shared_norms.measured(clip.norm, layout.blocks, norm_memory)
        limits, rule_memory = self.rules.thresholds(
            layout, measured.norms, clip=clip, memories=rule_memory, step=count,
            updates=updates, params=params, extra=extra,
        )  # fmt: skip
        decision = decide(clip, layout, measured, limits, rule_memory)
        if self.record:
            decision = clip.action.sampled(decision, itemized=self.is_itemized)
        return decision._replace(leaf_norms=leaf_norms)

    def _named(self, memory: list[PyTree]) -> PyTree:
        """Return a memory under the key of its norm, unless nothing is learned."""
        # A fixed threshold keeps the memory of a rule that it replaces.
        is_learned = self.learns or jax.tree.leaves(memory)
        return {self.measured: memory} if is_learned else memory

    def recorded(
        self,
        decision: Decision,
        coefficients: Batched,
        *,
        recorded_norms: Batched | None = None,
    ) -> ClipRecord:
        """Return the contribution of a step to the record.

        Args:
          decision: Of the step.
          coefficients: As `apply` returned them.
          recorded_norms: Norms to record in place of the measured ones.
        """
        outcomes = decision.clip.action.outcomes(decision, coefficients)
        if recorded_norms is not None:
            finite = decision.norms.map(jnp.isfinite)
            outcomes = outcomes.map(
                lambda x, n, f: x._replace(norm=n, nonfinite=~f), recorded_norms, finite
            )
        new = _record.of_step(
            decision.layout, self.clip.scope, outcomes,
            itemized=self.is_itemized,
            by_rule=any(not isinstance(x, _OF_NO_NORM) for x in self.rules.each),
        )  # fmt: skip
        if not self.has_leaf_norms:
            return new
        return new._replace(clip_leaf_norm=decision.leaf_norms.by_path())

    def after(
        self, state: ClipState, decision: Decision, new: ClipRecord | None
    ) -> ClipState:
        """Return the state after a step."""
        memory = [*decision.rule_memory]
        if decision.clip.norm.remembers:
            treedef, vectors = decision.layout.treedef, [*decision.norm_memory]
            memory.append(_packed_state.by_position(treedef, vectors))
        count, records = counted(state.clip_step), {}
        if new is not None:
            records[self.key] = _record.advanced(state.clip_record[self.key], new)
        return ClipState(count, self._named(memory), records)


def _in_words(part: Scope | Measurement) -> str:
    """Return the class of a scope or norm, with its numbers, and words of a norm.

    The words of a scope may be paths, which rules over parameter names match. Inner
    tuples are joined: the axes `((0, 1), ...)` read "0+1 rest".
    """
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = tuple(getattr(part, field.name) for field in fields)
    named = jax.tree.leaves(values) if isinstance(part, Measurement) else []
    words = [type(part).__name__, *(x for x in named if isinstance(x, str))]
    return " ".join([*words, *_numbers(values, depth=2)])


def _numbers(value: Any, depth: int) -> list[str]:
    """Return the numbers of a value; tuples below this depth are one word."""
    if not isinstance(value, tuple):
        leaves = jax.tree.leaves(value)
        numbers = [x for x in leaves if x is ... or isinstance(x, (int, float))]
        return ["rest" if x is ... else f"{x:g}" for x in numbers]
    inner = [word for x in value for word in _numbers(x, depth - 1)]
    return inner if depth > 0 or not inner else ["+".join(inner)]


def _shapes(
    clip: Clip, params: PyTree
) -> tuple[
    Entries,
    list[tuple[int, ...]],
    list[jax.ShapeDtypeStruct],
    list[jax.ShapeDtypeStruct],
]:
    """Return the structure of the norms of trees like `params`, without computing any.

    Also returns the shapes of the entries of the record, of the norms, and of the
    memory of the norm.
    """
    # `init` may run outside the `shard_map` in which `update` runs, so declared mapped
    # axes count only where types specify them.
    typed = _axis_names.is_typed_here()
    local = clip if typed else dataclasses.replace(clip, axis_name=())
    flat = _leaves.flatten(params)
    live = flat.clippable()
    found: list[tuple[Entries, list[tuple[int, ...]], list[Any]]] = []

    def measured(arrays: list[LeafLike]) -> tuple[list[jax.Array], list[jax.Array]]:
        rest = iter(arrays)
        leaves = [
            next(rest) if is_live else x
            for is_live, x in zip(live, flat.leaves, strict=True)
        ]
        layout = layout_of(local, flat.rebuild(leaves))
        memory = local.norm.init(layout.blocks)
        norms = local.norm.measure(layout.blocks, memory).norms.entries()
        pairs = zip(layout.blocks, norms, strict=True)
        shapes = [_record.shape_of(*pair) for pair in pairs]
        paths = [x.axis is not None and x.leaves[0].path for x in layout.blocks]
        found.append((Entries.of(layout), shapes, paths))
        return norms, list(memory)

    arrays = [x for is_live, x in zip(live, flat.leaves, strict=True) if is_live]
    norms, memory = jax.eval_shape(measured, arrays)
    entries, shapes, paths = found[-1]
    by_path = dict(zip(flat.paths, flat.leaves, strict=True))
    norms = map(_placement.placed, norms, map(by_path.get, paths))
    return entries, shapes, list(norms), memory


def transformation_of(engine: Engine) -> optax.GradientTransformationExtraArgs:
    """Build the transformation of an engine."""

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        decision = engine.decide(updates, state, params, extra_args)
        clipped, coefficients = apply(decision)
        new = engine.recorded(decision, coefficients) if engine.record else None
        return clipped, engine.after(state, decision, new)

    return with_optional_state(engine, engine.init, update_fn)


def with_optional_state(
    engine: Engine,
    init: Callable[..., ClipState],
    update: Callable[..., tuple[PyTree, ClipState]],
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation.

    If it neither records nor has a memory, its state is optax's `EmptyState`, and it
    accepts any state, as optax's own clipping does. If it only records, it also accepts
    None, as optax's tests pass it, and records nothing. Both are returned unchanged.
    """
    if engine.needs_state:
        return optax.GradientTransformationExtraArgs(init, update)

    def init_fn(params: PyTree) -> ClipState | optax.EmptyState:
        if not engine.record and not all(
            isinstance(x, (bool, int, float, complex)) or hasattr(x, "dtype")
            for x in _leaves.flatten(params).leaves
        ):
            # As optax does: the tree may be a model with functions in it.
            return optax.EmptyState()
        state = init(params)  # Raises the errors of bad arguments.
        return state if engine.record else optax.EmptyState()

    def update_any_state(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        if engine.record and state is not None:
            is_empty = isinstance(state, optax.EmptyState)
            _validate.require(
                "state",
                state,
                isinstance(state, ClipState),
                "the ClipState that init returned, or None",
                f"{_record.ORDER} {_WITHOUT_STATE}",
                ValueError if is_empty else TypeError,
            )
            return update(updates, state, params, **extra_args)
        rules = engine.rules.by_argument.values()
        memory = [[()] * len(jax.tree.leaves(x, is_leaf=is_rule)) for x in rules]
        blank = ClipState(jnp.zeros((), jnp.int32), memory, {})
        unused = init(updates) if engine.record else blank
        clipped, _ = update(updates, unused, params, **extra_args)
        return clipped, state

    return optax.GradientTransformationExtraArgs(init_fn, update_any_state)


def check_use_norm(
    use_norm: str, *, ord: float | None, strict: bool, mask: Mask | None, record: Record
) -> None:
    """Raise unless this names an argument, and no option needs another norm."""
    is_name = isinstance(use_norm, str) and use_norm.isidentifier()
    is_free = is_name and use_norm not in _OF_UPDATE
    _validate.require(
        "use_norm",
        use_norm,
        is_free,
        "the name of an extra argument of update, such as 'grad_norm'",
        "Pass the norm itself to update(..., grad_norm=norm).",
        TypeError,
    )
    _validate.flag("strict", strict)
    needs_another = {
        "ord=": of_order(ord) != L2,
        "strict=": strict,
        "mask=": mask is not None,
        "record='leaves'": isinstance(record, str) and record == "leaves",
    }
    for option, is_needed in needs_another.items():
        if is_needed:
            raise ValueError(
                f"`use_norm` cannot be combined with {option}, which measures another"
                f" norm. Remove {option} or use_norm=."
            )


def _passed_norm(extra: dict[str, Any], name: str, layout: Layout) -> jax.Array:
    """Return the extra argument of `update` that is the norm, as if measured."""
    norm: Any = extra.get(name)
    wanted = "a real scalar of at least 0, the global norm of the updates"
    advice = (
        f"Pass it: tx.update(updates, state, params, {name}=norm). Flax's"
        " TrainState.apply_gradients does not pass it on."
    )
    _validate.require(name, norm, norm is not None, wanted, advice)
    _validate.passed_norm(name, norm, wanted, advice)
    scalar = _numerics.as_array(norm)
    if axes := _axis_names.split_axes(scalar):
        raise ValueError(
            f"`{name}` varies over the mesh axes {axes}, whose devices must act alike."
            f" Pass jnp.sqrt(jax.lax.psum({name}**2, {axes})) if it is the norm of a"
            f" shard, else {_axis_names.maximum_of(name, axes)}."
        )
    arrays = [jax.typeof(leaf.array) for leaf in layout.used()]
    return flush_small(scalar.astype(accumulator(arrays)))


def is_placeholder(params: PyTree) -> bool:
    """Return whether this stands for parameters, in `optax.tree_map_params`."""
    return isinstance(params, _placeholder())


def _placeholder_memory(scope: Scope, rules: Any, placeholder: Any) -> list[Any]:
    """Return the memory of each rule; `placeholder` replaces parameter-like trees."""
    if isinstance(scope, Tree) or not is_rule(rules):
        leaves = jax.tree.leaves(rules, is_leaf=is_rule)
        return [rule.init(jnp.zeros(())) for rule in leaves]
    norm = {"": jnp.zeros(_SHAPE)}
    packed_memory = _packed_state.packed(
        rules.init(norm), norm, is_like_params=isinstance(scope, EachElement)
    )

    def is_whole(x: Any) -> bool:
        return isinstance(x, PerNorm) or jax.tree.structure(x) == jax.tree.structure(
            norm
        )

    def replaced(x: Any) -> Any:
        if isinstance(x, PerNorm):
            return jnp.zeros(())
        return placeholder if is_whole(x) else x

    return [jax.tree.map(replaced, packed_memory, is_leaf=is_whole)]


@functools.cache
def _placeholder() -> type:
    # Optax has no public name for the class, so it is read from a call.
    received: list[PyTree] = []

    def init(params: PyTree) -> tuple[()]:
        received.append(params)
        return ()

    optax.tree_map_params(init, lambda x: x, ())
    return type(received[0])
