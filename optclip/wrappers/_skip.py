"""Steps that are skipped: zero updates, and an optimizer whose state stays."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optclip import responses
from optclip._arrays import _axis_names, _leaves, _numerics, _sparse, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import Leaf, PyTree
from optclip._clip import clip_of, coefficients_of
from optclip.norms._interface import as_norm
from optclip.scopes._interface import as_scope
from optclip.thresholds._interface import (
    Context,
    Rule,
    as_rules,
    init_memory,
    learned_thresholds,
    one_rule,
)
from optclip.transforms._interface import Engine, Rules
from optclip.typing import (
    AxisName,
    ClipRecord,
    ClipState,
    Mask,
    NormLike,
    ScopeLike,
    SkipRecord,
    SkipState,
    Threshold,
    ThresholdTree,
)
from optclip.wrappers._inner import check_state, transformation

# The structure of a loss.
_ONE_VALUE = jax.tree.structure(0)


def skip(
    inner: optax.GradientTransformation,
    *,
    max_norm: ThresholdTree = math.inf,
    max_value: Threshold | None = None,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    max_consecutive: int | None = None,
    learn_skipped: bool = True,
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    name: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Leave out steps whose norm or loss is off, or not finite.

    In such a step the updates are zero and the state of `inner` stays as it was:
    moments, counts, schedules. (A clip to zero before it would let the moments decay
    and the weights too.) NaN and inf in the leaves that it looks at are always off.

    Args:
      inner: the optimizer to leave out, such as a chain of a clip and Adam.
      max_norm: the norm above which a step is skipped: a number, an optax schedule, a
        rule of `optclip.thresholds`, or for leaves and groups a prefix tree of these
        with None for no limit; of several norms one is enough.
      max_value: the loss above which a step is skipped, the extra argument `value` or
        `loss` of `update`: a number, a schedule or a rule; None does not look at it.
      over: what shares a norm: `"tree"`, `"leaf"`, `"element"`, `axes(...)`,
        `units(...)`, `groups(...)`, or a scope of your own.
      norm: which norm: `"l2"`, `"l1"`, `"inf"`, `"rms"`, `"average"`, any order p above
        0, or an `optclip.norms.Norm`.
      max_consecutive: after so many skips without a break the next step is taken
        whatever it is, NaN included: loud, where training stands still otherwise. None
        is never.
      learn_skipped: whether the rules of `max_norm` and `max_value` learn from steps
        that were skipped (never from what is not finite; `ema`, which learns from what
        is left, from none of them). True follows a shift of level, but a huge spike
        then hides the next ones as long as the window remembers it; False sees those,
        but after a shift skips for ever: give `max_consecutive` with it.
      mask: which leaves are looked at; a step is skipped for all leaves or for none. A
        tree of bools, a prefix of one, or a function that makes one of the updates,
        such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.
      name: what `optclip.metrics` calls it: it gives `skip/norm`, `skip/threshold`,
        `skip/skipped` and `skip/consecutive`, `skip/rate`, the fraction of steps whose
        norm was above the threshold, and with `max_value` also `skip/value` and
        `skip/value_threshold`. What `inner` records it records of steps taken.

    Returns:
      A transformation that ends a chain: what follows it sees zeros in a skipped step.

    Raises:
      ValueError: `max_value` is given, and at `update` neither `value` nor `loss` is.

    ========================== ======================================================
    edge                       what happens
    ========================== ======================================================
    NaN or inf in the updates  skipped; it never enters a rule's memory
    NaN or inf as `value`      skipped, if `max_value` is given; it enters no memory
    norm equal to `max_norm`   taken
    `max_norm` that is NaN     skipped
    ========================== ======================================================

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.skip(optax.sgd(1.0, momentum=0.9), max_norm=10.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1000.0, jnp.nan, 1.0):
      ...     updates, state = tx.update(jnp.array([size]), state)
      ...     print(updates)
      [-1.]
      [0.]
      [0.]
      [-1.9]
      >>> print(optclip.metrics(state)["skip/skipped"])
      2

    Source: OLMo (allenai/OLMo-core), MaxText, Levanter, AXLearn and Megatron each have
    such a rule; see `optclip.recipes`.
    """
    wrapped = transformation("inner", inner)
    # Detached, so that of single elements the norms are taken too.
    clip = clip_of(
        as_scope(over), as_norm(norm), responses.detached("drop"),
        mask=mask, axis_name=axis_name,
    )  # fmt: skip
    rules = Rules({"max_norm": as_rules("max_norm", max_norm)})
    watch = Engine(clip, rules, True, name)
    value_rule = None if max_value is None else one_rule("max_value", max_value)
    if max_consecutive is not None:
        _validate.length("max_consecutive", max_consecutive)
    _validate.flag("learn_skipped", learn_skipped)

    def init_fn(params: PyTree) -> SkipState:
        memory: PyTree = ()
        if value_rule is not None:
            zero = jnp.zeros((), jnp.float32)
            memory = init_memory(
                "max_value", value_rule, _ONE_VALUE, [zero], jnp.zeros_like
            )
        # The counters are two arrays, since one used twice could not be donated.
        record = SkipRecord(*jnp.zeros((2,), jnp.int32))
        if value_rule is not None:
            value, limit = jnp.zeros((2,), jnp.float32)
            record = record._replace(skip_value=value, skip_value_threshold=limit)
        return SkipState(
            wrapped.init(params), watch.init(params), memory, {name: record}
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        check_state(state, SkipState)
        # Devices skip together, since their parameters must stay the same.
        step = watch.decide(
            updates, state.skip_norm, params, extra_args,
            in_common=bool(_axis_names.untyped_axes()),
        )  # fmt: skip
        decision = step.decision
        coefficients = coefficients_of(
            decision.clip, decision.norms, decision.thresholds
        )
        norm_record = watch.recorded(step, coefficients)
        seen = watch.after(state.skip_norm, step, norm_record)
        is_off = _is_above(norm_record)
        memory, old = state.skip_value, state.skip_record[name]
        _check_record(old, has_value=value_rule is not None)
        record = old
        if value_rule is not None:
            value = _loss_in(extra_args)
            limit, memory = _value_threshold(
                value_rule, memory, value, seen, updates, params, extra_args
            )
            # The comparison is negated, since `value > limit` is false for NaN limits.
            is_off = is_off | ~jnp.isfinite(value) | ~(value <= limit)
            record = record._replace(skip_value=value, skip_value_threshold=limit)
        skipped = is_off
        if max_consecutive is not None:
            skipped = is_off & (old.skip_consecutive < max_consecutive)
        if not learn_skipped:
            unlearned = _select_tree(
                skipped, state.skip_norm.clip_memory, seen.clip_memory
            )
            seen = seen._replace(clip_memory=unlearned)
            memory = _select_tree(skipped, state.skip_value, memory)
        # A skipped step passes zeros to `inner`, so that a NaN raises no error there
        # and makes no derivative NaN.
        inner_input = _zero_if(skipped, updates)
        inner_updates, inner_state = wrapped.update(
            inner_input, state.skip_inner, params, **extra_args
        )
        again = _numerics.counted(old.skip_consecutive, skipped)
        record = record._replace(
            skip_skipped=_numerics.counted(old.skip_skipped, skipped),
            skip_consecutive=jnp.where(skipped, again, jnp.zeros_like(again)),
        )
        return _zero_if(skipped, inner_updates), SkipState(
            _select_tree(skipped, state.skip_inner, inner_state),
            seen,
            memory,
            {name: record},
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_record(record: SkipRecord, *, has_value: bool) -> None:
    """Raise if the record is of a skip that differs in `max_value`."""
    if (record.skip_value is not None) != has_value:
        wanted = f"the state of a skip with{'' if has_value else 'out'} max_value"
        advice = "Give the state that init of this very transformation returned."
        raise ValueError(_validate.must_be("state", wanted, record, advice))


def _loss_in(extra: dict[str, Any]) -> jax.Array:
    """Return the extra argument `value`, or `loss`, as some trainers call it."""
    value = extra.get("value")
    if value is None:
        value = extra.get("loss")
    if value is None or not _validate.is_number(value) or jnp.shape(value):
        wanted = "a real scalar, the loss, which this skip looks at"
        advice = (
            "Pass value= or loss=: tx.update(updates, state, params, value=loss)."
            " Flax's TrainState.apply_gradients does not pass it on. Without a loss,"
            " omit max_value; for olmo_skip pass use_value=False."
        )
        name = "loss" if extra.get("value") is None and value is not None else "value"
        raise ValueError(_validate.must_be(name, wanted, value, advice))
    loss = jnp.asarray(value).astype(jnp.float32)
    _axis_names.check_one("value", loss)
    return loss


def _value_threshold(
    rule: Rule,
    memory: PyTree,
    value: jax.Array,
    seen: ClipState,
    updates: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[jax.Array, PyTree]:
    """The threshold of the loss, and the new memory of its rule."""
    context = Context(
        keep=lambda norm, threshold: jnp.minimum(norm, threshold),
        measure=functools.partial(_raise_on_measure, rule),
        params=params,
        step=seen.clip_step - 1,
        extra=extra,
        updates=updates,
    )
    thresholds, memory = learned_thresholds(
        "max_value", rule, _ONE_VALUE, Batched.apart([value]), memory, context
    )
    # A single value is never stacked, so its threshold comes in a list.
    (threshold,) = (
        thresholds.entries() if isinstance(thresholds, Batched) else thresholds
    )
    return jnp.asarray(threshold).astype(jnp.float32), memory


def _raise_on_measure(rule: Rule, tree: PyTree, **how: Any) -> PyTree:
    del tree, how
    wanted = "a rule that learns from its norms alone, since a loss is one number"
    advice = "It measures a tree. Try optclip.thresholds.mean_plus_std(6.0)."
    raise ValueError(_validate.must_be("max_value", wanted, rule, advice))


def _is_above(step: ClipRecord) -> jax.Array:
    """Whether a norm is past its threshold, or not finite, or the threshold is NaN."""
    flags = jax.tree.leaves((step.clip_clipped, step.clip_nonfinite))
    flags += [jnp.isnan(limit) for limit in jax.tree.leaves(step.clip_threshold)]
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), jnp.bool_)


def _select_tree(where: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    def select(a: ArrayLike, b: ArrayLike) -> ArrayLike:
        return a if a is b else jnp.where(where, a, b)

    return jax.tree.map(select, yes, no)


def _zero_if(where: jax.Array, tree: PyTree) -> PyTree:
    """The tree with zeros for its numbers, integers and bools too; PRNG keys stay."""

    def zeroed(x: Leaf) -> Leaf:
        if _leaves.is_sparse(x):
            return _sparse.with_data(x, zeroed(x.data))
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
            return x
        return jnp.where(where, jnp.zeros_like(x), x)

    return jax.tree.map(zeroed, tree, is_leaf=_leaves.is_sparse)
