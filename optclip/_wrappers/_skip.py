"""Skipped steps: zero updates, and an optimizer whose state does not change."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import _responses as responses
from .._arrays import (
    _axis_names,
    _leaf,
    _leaves,
    _numerics,
    _placement,
    _validate,
    _xla,
)
from .._arrays._batching import Batched
from .._arrays._types import Held, LeafLike, PyTree
from .._clip import SCALE, clip_of, coefficients_of
from .._norms import as_norm
from .._scopes import as_scope, declaring
from .._thresholds import (
    Named,
    Rule,
    Seen,
    init_memory,
    learned_thresholds,
    one_rule,
)
from .._transforms import Engine, rules_of, sharing_norms
from .._typing import (
    AxisName,
    ClipRecord,
    Mask,
    NormLike,
    ScopeLike,
    SkipRecord,
    SkipState,
    Threshold,
    ThresholdTree,
)
from ._checks import LOSS_ADVICE, check_state, passed_loss, transformation

# After a lasting change of the level, `mean_plus_std(6.0)` skips 200 steps, since it
# needs four losses of the new level. No step of a burst of 50 is applied.
_MOST_LOSSES = 50


def skip(
    inner: optax.GradientTransformation,
    *,
    max_norm: ThresholdTree = math.inf,
    max_loss: Threshold | None = None,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    max_consecutive: float | None = None,
    learn_skipped: bool | None = None,
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Literal[True, "leaves"] = True,
    name: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradient norm or loss is too large or not finite.

    A skipped step returns zero updates and leaves the state of `inner` (moments, step
    counts, schedules) unchanged. Clipping the gradients to zero would instead let the
    moments decay and apply weight decay.

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

    Args:
      inner: The optimizer to wrap, such as a chain of clipping and Adam.
      max_norm: Maximum norm of an accepted step: a number, optax schedule,
        `optclip.thresholds` rule, or prefix tree of these. Default: inf, which skips
        only non-finite steps.
      max_loss: Maximum loss of an accepted step: a number of any sign, an optax
        schedule, or a rule suited to losses, such as `thresholds.mean_plus_std(6.0)`.
        Pass the loss to `update` as `value`, or as `loss`, which is read if `value` is
        missing. Default: None; the loss is then not read, even if it is not finite.
      over: Scope of each norm, as in `clip_by`; one norm above its limit is enough to
        skip the step. Default: `"tree"`.
      norm: Norm to compare, as in `clip_by`. Default: `"l2"`.
      max_consecutive: Maximum number of finite steps skipped since the last applied
        one, an int or inf. The next finite step is applied; a non-finite one never is.
        Default: inf for `max_norm` and fixed losses, 50 for a rule in `max_loss`.
      learn_skipped: Whether rules learn from skipped finite steps. True follows a
        lasting change; False keeps a burst out of the memory, and in `max_norm` needs
        `max_consecutive`. Default: True for `max_norm`, False for `max_loss`.
      mask: Leaves to check: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      record: `"leaves"` also records the norm of each leaf, in skipped steps too.
        Default: True.
      name: Key prefix in `optclip.metrics`.

    Returns:
      A transformation. Wrap the whole optimizer, or place it last in a chain;
      later transformations receive zeros in skipped steps.

      `optclip.metrics` reports `skip/norm`, `skip/threshold`, `skip/skipped` and
      others for the gradient that this transformation compares, of skipped steps too.
      Clipping inside `inner` records only the accepted steps.

    Raises:
      ValueError: In `update`: `max_loss` is set, but neither `value` nor `loss` is
        passed.

    Edge cases:
      - Norm and loss of a step: do not enter their own thresholds; for your own rules,
        see `Seen.includes_norm`. A limit like Megatron-LM's, over the last 100 losses,
        is `scaled(quantile(1.0, 100), 10.0)`.
      - Warm-up of a rule: no step is skipped, except with rules that have an argument
        `max_norm`, such as `ema`: they skip steps above it.
      - NaN or inf in a checked leaf, or in the loss if `max_loss` is set: the step is
        skipped, and the rules do not learn from this norm or loss. It counts in
        `skip/consecutive`; `max_consecutive` neither counts it nor applies it.
      - A loss that differs between mapped devices: all use the largest, NaN or -inf if
        a device has it.
      - NaN as `max_norm` or `max_loss`: the step is skipped. If its norm and loss are
        finite, it is a finite step, which `max_consecutive` counts.
      - `ema` and `zscore` as `max_norm`: learn from clipped norms, so they skip every
        step after a large lasting change, and `max_consecutive` does not end that. A
        multiple of a median follows it: `scaled(quantile(0.5, window=200), 10.0)`.

    See Also:
      `recipes.olmo_skip`, `recipes.axlearn_skip` and `recipes.megatron_skip`, the rules
      of these codebases.
    """
    wrapped = transformation("inner", inner)
    clip = clip_of(
        declaring(as_scope(over), max_norm), as_norm(norm), responses.Drop(),
        mask=mask, axis_name=axis_name,
    )  # fmt: skip
    # `SCALE` compares each norm with its threshold; other actions may read no norms.
    clip = dataclasses.replace(clip, action=SCALE)
    if _validate.is_number(max_norm):
        advice = "0 skips each step with a gradient, inf only non-finite steps."
        _validate.number("max_norm", max_norm, advice=advice)
    # No spike exceeds ten times the maximum of norms that include it.
    rules = dataclasses.replace(
        rules_of(Named("max_norm", max_norm), clip), includes_norm=False
    )
    wanted, advice = "True or 'leaves'", "Skipping needs a state."
    _validate.require("record", record, record is not False, wanted, advice, TypeError)
    watch = Engine(clip, rules, record, name)
    loss_rule = None
    if max_loss is not None:  # Losses may be negative, unlike norms.
        loss_rule = Held(one_rule("max_loss", max_loss, negative=True))
    is_unlimited = isinstance(max_consecutive, float) and max_consecutive == math.inf
    if max_consecutive is not None and not is_unlimited:
        max_consecutive = _validate.length("max_consecutive", max_consecutive)
    if learn_skipped is not None:
        _validate.flag("learn_skipped", learn_skipped)

    def init_fn(params: PyTree) -> SkipState:
        memory: PyTree = ()
        # Each counter has its own array, since an array used twice cannot be donated.
        record = SkipRecord(*jnp.zeros((2,), jnp.int32))
        if loss_rule is not None:
            memory = init_memory(
                "max_loss", loss_rule.value, _ONE_LOSS, [jnp.zeros((), jnp.float32)],
                jnp.zeros_like,
            )  # fmt: skip
            loss, limit = jnp.zeros((2,), jnp.float32)
            record = record._replace(skip_loss=loss, skip_loss_threshold=limit)
        return SkipState(
            wrapped.init(params), watch.init(params), memory, {watch.key: record},
            jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        check_state(state, SkipState)
        norm_step = _numerics.as_count(state.skip_norm.clip_step)
        # All devices skip the same steps, so that their parameters stay equal.
        decision = watch.decide(
            updates, state.skip_norm, params, extra_args,
            in_common=bool(_axis_names.untyped_axes()),
            by_leaf=_records_leaves(state.skip_inner),
        )  # fmt: skip
        coefficients = coefficients_of(
            decision.clip, decision.norms, decision.thresholds
        )
        norm_record = watch.recorded(decision, coefficients)
        seen = watch.after(state.skip_norm, decision, norm_record)
        in_a_row = _numerics.as_count(state.skip_finite)
        # A fixed limit is never exceeded, and norm rules follow a change by learning.
        is_off = _unless_after(max_consecutive, in_a_row, _is_above(norm_record))
        is_nonfinite = _any(jax.tree.leaves(norm_record.clip_nonfinite))
        memory, old = state.skip_loss, state.skip_record[watch.key]
        _check_record(old, has_loss=loss_rule is not None)
        record = old
        if loss_rule is not None:
            loss = loss_in(extra_args)
            limit, memory = loss_threshold(
                loss_rule.value, memory, loss, norm_step,
                updates, params, extra_args,
            )  # fmt: skip
            most = max_consecutive
            if most is None and jax.tree.leaves(memory):
                most = _MOST_LOSSES
            # The comparison is negated, since `loss > limit` is false for NaN limits.
            is_off = is_off | _unless_after(most, in_a_row, ~(loss <= limit))
            is_nonfinite = is_nonfinite | ~jnp.isfinite(loss)
            loss, limit = _xla.in_place(
                (loss, limit), (old.skip_loss, old.skip_loss_threshold)
            )
            record = record._replace(skip_loss=loss, skip_loss_threshold=limit)
        skipped = is_off | is_nonfinite
        if learn_skipped is False:
            unlearned = _select_tree(
                skipped, state.skip_norm.clip_memory, seen.clip_memory
            )
            seen = seen._replace(clip_memory=unlearned)
        if not learn_skipped:
            memory = _select_tree(skipped, state.skip_loss, memory)
        # `inner` receives zeros in a skipped step, so that a NaN neither raises an
        # error there nor makes derivatives NaN.
        accepted = _zero_if(skipped, updates)
        with sharing_norms(decision, accepted, functools.partial(_zero_if, skipped)):
            inner_updates, inner_state = wrapped.update(
                accepted, state.skip_inner, params, **extra_args
            )
        again = _numerics.counted(old.skip_consecutive, skipped)
        finite = _numerics.counted(state.skip_finite, ~is_nonfinite)
        record = record._replace(
            skip_skipped=_numerics.counted(old.skip_skipped, skipped),
            skip_consecutive=jnp.where(skipped, again, jnp.zeros_like(again)),
        )
        return _zero_if(skipped, inner_updates), SkipState(
            _select_tree(skipped, state.skip_inner, inner_state),
            seen,
            memory,
            {watch.key: record},
            jnp.where(skipped, finite, jnp.zeros_like(finite)),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_record(record: SkipRecord, *, has_loss: bool) -> None:
    """Raise if the record is from a `skip` that differs in `max_loss`."""
    is_alike = (record.skip_loss is not None) == has_loss
    _validate.require(
        "state",
        record,
        is_alike,
        f"the state of a skip with{'' if has_loss else 'out'} max_loss",
        "Pass the state returned by this transformation's init.",
    )


def _unless_after(
    most: float | None, in_a_row: jax.Array, is_off: jax.Array
) -> jax.Array:
    """Return `is_off`, or False after `most` finite skips in a row."""
    return is_off if most in (None, math.inf) else is_off & (in_a_row < most)


def _is_above(step: ClipRecord) -> jax.Array:
    """Return whether a norm exceeds its threshold, or a threshold is NaN."""
    flags = jax.tree.leaves(step.clip_clipped)
    flags += [jnp.isnan(limit) for limit in jax.tree.leaves(step.clip_threshold)]
    return _any(flags)


def _any(flags: list[jax.Array]) -> jax.Array:
    flags = _placement.together(flags)
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), jnp.bool_)


def _select_tree(where: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    def selected(b: ArrayLike, a: ArrayLike) -> jax.Array:
        return jnp.where(_placement.beside(where, b), _numerics.as_counted_in(a, b), b)

    def select(a: ArrayLike, b: ArrayLike) -> ArrayLike:
        return a if a is b else _placement.computed(selected, b, a)

    return jax.tree.map(select, yes, no)


def _zero_if(where: jax.Array, tree: PyTree) -> PyTree:
    """Replace numbers, integers and bools by zeros; PRNG keys are unchanged."""

    def zeroed(x: LeafLike) -> LeafLike:
        _leaves.check_format((), x)
        if _leaves.is_sparse(x):
            return _leaf.with_data(x, zeroed(x.data))
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
            return x
        flag = _placement.beside(where, x)
        return _placement.computed(lambda x: jnp.where(flag, jnp.zeros_like(x), x), x)

    return jax.tree.map(zeroed, tree, is_leaf=_leaves.is_sparse)


# The tree structure of a loss, which is a scalar.
_ONE_LOSS = jax.tree.structure(0)

_WANTED = "the loss, a real scalar, because max_loss is set"


def loss_in(extra: dict[str, Any]) -> jax.Array:
    """Return the loss that was passed to `update`.

    Raises:
      ValueError: There is none.
    """
    loss: Any = passed_loss(extra, _WANTED)
    _validate.require("value", loss, loss is not None, _WANTED, LOSS_ADVICE)
    return loss


def _records_leaves(state: PyTree) -> bool:
    """Return whether clipping in a state records the norms of leaves."""
    records = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ClipRecord))
    return any(
        isinstance(x, ClipRecord) and x.clip_leaf_norm is not None for x in records
    )


def loss_threshold(
    rule: Rule,
    memory: PyTree,
    loss: jax.Array,
    step: jax.Array,
    updates: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[jax.Array, PyTree]:
    """Return the threshold of the loss and the new memory of its rule."""
    seen = Seen(
        norm=None,
        finite=None,
        keep=lambda norm, threshold: jnp.minimum(norm, threshold),
        measure=functools.partial(_raise_on_measure, rule),
        params=params,
        step=step,
        extra=extra,
        updates=updates,
        includes_norm=False,
    )
    thresholds, memory = learned_thresholds(
        "max_loss", rule, _ONE_LOSS, Batched.unstacked([loss]), memory, seen,
        of_loss=True,
    )  # fmt: skip
    # A single loss is never stacked, so its threshold comes in a list.
    (threshold,) = (
        thresholds.entries() if isinstance(thresholds, Batched) else thresholds
    )
    limit = jnp.asarray(threshold).astype(jnp.float32)
    _validate.require(
        "max_loss",
        limit,
        not limit.ndim,
        "one number per step",
        "Reduce it to a scalar: the loss is one number.",
    )
    return limit, memory


def _raise_on_measure(rule: Rule, tree: PyTree, **how: Any) -> PyTree:
    raise ValueError(
        _validate.must_be(
            "max_loss",
            "a rule that reads only norms, since a loss has no tree to measure",
            rule,
            "Try optclip.thresholds.mean_plus_std(6.0).",
        )
    )
