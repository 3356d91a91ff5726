"""Steps left out whole: the optimizer does not notice that there was one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optclip import norms, responses, scopes
from optclip._arrays import _axis_names, _leaves, _numerics, _sparse, _validate
from optclip._arrays._types import PyTree
from optclip._clip._clip import ScalingClip
from optclip.thresholds import _memory
from optclip.thresholds._rule import Rule, Seen, as_rules, one_rule
from optclip.transforms._clip_by import Engine
from optclip.transforms._state import ClipRecord, ClipState, SkipRecord
from optclip.typing import AxisName, Mask, Threshold, ThresholdTree
from optclip.wrappers._inner import transformation


class SkipState(NamedTuple):
    """The state of `skip`.

    Attributes:
      skip_inner: the state of the optimizer, as it was if the last step was skipped.
      skip_norm: what watches the norm.
      skip_value: the memory of the rule that watches `value`; empty without one.
      skip_record: a dict from the name to a `SkipRecord`.
    """

    skip_inner: Any
    skip_norm: ClipState
    skip_value: Any
    skip_record: dict[str, SkipRecord]


def skip(
    inner: optax.GradientTransformation,
    *,
    when: ThresholdTree = math.inf,
    value_when: Threshold | None = None,
    over: scopes.Scope = scopes.TREE,
    norm: norms.Norm = norms.L2,
    max_consecutive: int | None = None,
    learn_skipped: bool = True,
    norm_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    name: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Leave out steps whose norm or loss is off, or not finite.

    In such a step the updates are zero and the state of `inner` stays as it was:
    moments, counts, schedules. (A clip to zero before it would let the moments decay
    and the weights too.) NaN and inf in the updates are always off.

    Args:
      inner: the optimizer to leave out, such as a chain of a clip and Adam.
      when: the norm above which a step is skipped: whatever `clip_by` takes for a
        threshold; of several norms one is enough.
      value_when: likewise for the loss, the extra argument `value` of `update`: a
        number, a schedule or a rule; None does not look at it.
      over: what shares a norm, as in `clip_by`.
      norm: as in `clip_by`.
      max_consecutive: after so many skips without a break the next step is taken
        whatever it is, NaN included: loud, where training stands still otherwise. None
        is never.
      learn_skipped: whether the rules of `when` and `value_when` learn from steps that
        were skipped (never from what is not finite; `ema`, which learns from what is
        left, from none of them). True follows a shift of level, but a huge spike then
        hides the next ones as long as the window remembers it; False sees those, but
        after a shift skips for ever: give `max_consecutive` with it.
      norm_mask: which leaves are looked at, as in `clip_by`.
      axis_name: as in `clip_by`.
      name: what `optclip.metrics` calls it: it gives `skip/norm`, `skip/threshold`,
        `skip/skipped` and `skip/consecutive`, `skip/rate`, the fraction of steps whose
        norm was above the threshold, and with `value_when` also `skip/value` and
        `skip/value_threshold`. What `inner` records it records of steps taken.

    Returns:
      A transformation that ends a chain: what follows it sees zeros in a skipped step.

    Raises:
      ValueError: `value_when` is given, and at `update` `value` is not.

    ========================== ======================================================
    edge                       what happens
    ========================== ======================================================
    NaN or inf in the updates  skipped; it never enters a rule's memory
    NaN or inf as `value`      skipped, if `value_when` is given; likewise
    norm equal to `when`       taken
    `when` that is NaN         skipped
    ========================== ======================================================

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optclip.skip(optax.sgd(1.0, momentum=0.9), when=10.0)
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
    clip = ScalingClip(
        over, norm, responses.detached("drop"),
        norm_mask=norm_mask, axis_name=axis_name,
    )  # fmt: skip
    watch = Engine(clip, {"when": as_rules("when", when)}, True, name)
    value_rule = None if value_when is None else one_rule("value_when", value_when)
    if max_consecutive is not None:
        _validate.length("max_consecutive", max_consecutive)
    _validate.flag("learn_skipped", learn_skipped)

    def init_fn(params: PyTree) -> SkipState:
        zero = jnp.zeros((), jnp.float32)
        memory = (
            () if value_rule is None else _memory.init("value_when", value_rule, zero)
        )
        # Two, not one twice, which could not be donated.
        record = SkipRecord(*jnp.zeros((2,), jnp.int32))
        if value_rule is not None:
            value, limit = jnp.zeros((2,), jnp.float32)
            record = record._replace(skip_value=value, skip_value_threshold=limit)
        return SkipState(
            wrapped.init(params), watch.init(params), memory, {name: record}
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[Any, SkipState]:
        # All devices are to skip together, or none.
        step = watch.decide(
            updates, state.skip_norm, params, extra_args,
            in_common=bool(_axis_names.untyped_axes()),
        )  # fmt: skip
        found = watch.recorded(step, clip.coefficients(step.measured, step.limits))
        seen = watch.after(state.skip_norm, step, found)
        is_off = _is_off(found)
        memory, old = state.skip_value, state.skip_record[name]
        record = old
        if value_rule is not None:
            value = _loss_in(extra_args)
            limit, memory = _judged(
                value_rule, memory, value, seen, updates, params, extra_args
            )
            # Not above: a NaN threshold is off too.
            is_off = is_off | ~jnp.isfinite(value) | ~(value <= limit)
            record = record._replace(skip_value=value, skip_value_threshold=limit)
        skipped = is_off
        if max_consecutive is not None:
            skipped = is_off & (old.skip_consecutive < max_consecutive)
        if not learn_skipped:
            kept = _choose(skipped, state.skip_norm.clip_memory, seen.clip_memory)
            seen = seen._replace(clip_memory=kept)
            memory = _choose(skipped, state.skip_value, memory)
        # Zeros, so that a NaN raises nothing in there, nor poisons a derivative.
        given = _zero_if(skipped, updates)
        taken, inner_state = wrapped.update(
            given, state.skip_inner, params, **extra_args
        )
        again = _numerics.counted(old.skip_consecutive, skipped)
        record = record._replace(
            skip_skipped=_numerics.counted(old.skip_skipped, skipped),
            skip_consecutive=jnp.where(skipped, again, jnp.zeros_like(again)),
        )
        return _zero_if(skipped, taken), SkipState(
            _choose(skipped, state.skip_inner, inner_state),
            seen,
            memory,
            {name: record},
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _loss_in(extra: dict[str, Any]) -> jax.Array:
    """The extra argument `value`."""
    value = extra.get("value")
    if value is None or not _validate.is_number(value) or jnp.shape(value):
        wanted = "a real scalar, the loss, which this skip looks at"
        advice = (
            "Give it: tx.update(updates, state, params, value=loss), which Flax's"
            " TrainState.apply_gradients does not pass on; or do not look at it, by"
            " value_when=None, for olmo_skip use_value=False."
        )
        raise ValueError(_validate.must_be("value", wanted, value, advice))
    loss = jnp.asarray(value).astype(jnp.float32)
    _axis_names.check_one("value", loss)
    return loss


def _judged(
    rule: Rule,
    memory: PyTree,
    value: jax.Array,
    seen: ClipState,
    updates: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[jax.Array, Any]:
    """What the loss is compared with, and what the rule remembers of it."""
    shown = Seen(
        norm=value,
        finite=None,
        keep=lambda norm, threshold: jnp.minimum(norm, threshold),
        measure=_nothing_to_measure,
        params=params,
        step=seen.clip_step - 1,
        extra=extra,
        updates=updates,
    )
    bad = ~jnp.isfinite(value)
    threshold, memory = _memory.update("value_when", rule, shown, memory, bad)
    return jnp.asarray(threshold).astype(jnp.float32), memory


def _nothing_to_measure(tree: PyTree, **how: Any) -> Any:
    del tree, how
    raise ValueError(
        "`value_when` must be a rule of norms alone, such as"
        " optclip.thresholds.mean_plus_std(6.0), got one that measures a tree: a loss"
        " is a number."
    )


def _is_off(step: ClipRecord) -> jax.Array:
    """Whether a norm is past its threshold, or not finite, or the threshold is NaN."""
    flags = jax.tree.leaves((step.clip_clipped, step.clip_nonfinite))
    flags += [jnp.isnan(limit) for limit in jax.tree.leaves(step.clip_threshold)]
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), jnp.bool_)


def _choose(where: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(_selected(where), yes, no)


def _zero_if(where: jax.Array, tree: PyTree) -> Any:
    """The tree with zeros for its numbers, whole ones too; keys stay."""

    def zeroed(x: Any) -> Any:
        if _leaves.is_sparse(x):
            return _sparse.with_data(x, zeroed(x.data))
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
            return x
        return jnp.where(where, jnp.zeros_like(x), x)

    return jax.tree.map(zeroed, tree, is_leaf=_leaves.is_sparse)


def _selected(where: jax.Array) -> Callable[[Any, Any], Any]:
    return lambda a, b: a if a is b else jnp.where(where, a, b)
