"""An optimizer that keeps the metrics of its last steps in its state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from .._arrays import _leaves, _placement, _validate
from .._arrays._numerics import as_count, counted
from .._arrays._types import PyTree
from .._monitor import (
    Column,
    Metric,
    array_of,
    columns_in,
    columns_of,
    key_of_rows,
    metrics_of,
    states_in,
    text_of,
)
from .._transforms import is_placeholder
from .._typing import ClipRecord, HistoryState, SkipRecord
from ._checks import check_state, passed_loss, transformation

_RECORDS = ClipRecord, SkipRecord


def with_history(
    inner: optax.GradientTransformation, steps: int = 1000
) -> optax.GradientTransformationExtraArgs:
    """Keep the metrics of the last steps of an optimizer in its state.

    After each update, all numbers that `optclip.metrics` returns for the state of
    `inner` are written over the oldest of `steps` rows, on the device. Each checkpoint
    contains them. `optclip.history(opt_state)` reads them.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> tx = optclip.with_history(tx, steps=3)
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 2.0, 300.0, 4.0):
      ...     _, state = tx.update(jnp.array([size]), state)
      >>> recorded = optclip.history(state)
      >>> print(recorded["step"], recorded["clip/norm"])
      [1 2 3] [  2. 300.   4.]

    Args:
      inner: The optimizer to wrap, with a transformation of optclip that records.
      steps: Number of steps to keep, at least 1; float32 `(steps, quantities)`. For 300
        leaves and 1,000 steps, global-norm clipping with `record="leaves"` takes 1.2
        MB. A restored state keeps its own number of rows. Default: 1000.

    Returns:
      A transformation. Pass the loss to `update` as `value` or `loss` to keep it too.

      Place it outside of `skip`, so that a skipped step has a row, and inside of
      `optax.MultiSteps`, so that each full update has one. Donate the state to the
      compiled step (`jax.jit(step, donate_argnums=...)`): otherwise each step copies
      all rows.

    Raises:
      ValueError: In `init` or `update`: `inner` records nothing, or the state has other
        quantities.

    Edge cases:
      - The gradients of `cotangent_probe` are not in the state, so not in the history.
      - Step that `optax.apply_if_finite` inside rejects: the row is NaN, except counts.
        Around `with_history` it calls nothing, so the step has no row, and `step` of
        `history` counts the recorded updates.
      - Step in which `optax.MultiSteps` or `conditionally_transform` inside does not
        call its optimizer: the row repeats the last numbers, `clip/steps` too.
      - Counts are exact up to 16,777,216, as float32.
      - A loss that differs between mapped devices: the largest is kept, as in `skip`.
    """
    wrapped = transformation("inner", inner)
    steps = _validate.length("steps", steps)

    def init_fn(params: PyTree) -> HistoryState:
        inner_state = wrapped.init(params)
        # Each count has its own array, since an array used twice cannot be donated.
        count = jnp.zeros((), jnp.int32)
        if is_placeholder(params):
            # A prefix of the true state, since the key of the rows is unknown.
            prefix: Any = jnp.zeros(())
            return HistoryState(inner_state, prefix, count, prefix)
        columns = columns_of(_metrics_in(inner_state))
        text = text_of(columns)
        return HistoryState(
            inner_state,
            {key_of_rows(text): jnp.zeros((steps, len(columns)), jnp.float32)},
            count,
            array_of(text),
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, HistoryState]:
        check_state(state, HistoryState)
        new_updates, inner_state = wrapped.update(
            updates, state.history_inner, params, **extra_args
        )
        metrics = _metrics_in(_without_rejected(inner_state, state.history_inner))
        _check_columns(state, columns_of(metrics))
        ((key, rows),) = state.history_rows.items()
        loss = passed_loss(extra_args)
        pair = (0.0, 0.0) if loss is None else (loss, 1.0)
        # The layers of a stack stay one array, so that the program does not grow with
        # them.
        numbers = [*pair, *(metric.value for metric in metrics)]
        arrays = [jnp.atleast_1d(jnp.asarray(x).astype(jnp.float32)) for x in numbers]
        row = jnp.concatenate(_placement.together(arrays)).astype(rows.dtype)[None]
        rows = _placement.placed_as(jnp.asarray(rows), row)
        count = as_count(state.history_count)
        at = count % rows.shape[0]
        # One slice is written in place, so that the other rows are neither read nor
        # copied.
        rows = lax.dynamic_update_slice(rows, row, (at, jnp.zeros_like(at)))
        return new_updates, HistoryState(
            inner_state, {key: rows}, counted(count), state.history_names
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _metrics_in(inner_state: PyTree) -> list[Metric]:
    """Return the numbers to keep of a state."""
    metrics = metrics_of(states_in(inner_state))
    if not metrics:
        raise ValueError(
            "`inner` must be an optimizer with a transformation of optclip that"
            " records, got one that records nothing. Add one, such as"
            " optclip.clip_by_global_norm(inf), with record=True."
        )
    return metrics


def _without_rejected(new: PyTree, old: PyTree) -> PyTree:
    """Return a state with NaN for the numbers of a step that optax rejected.

    `optax.apply_if_finite` then keeps the state of its inner optimizer, and a row would
    repeat the numbers of the step before.
    """

    def replaced(new: Any, old: Any) -> Any:
        if not isinstance(new, optax.ApplyIfFiniteState):
            return new
        pairs = zip(states_in(new), states_in(old), strict=True)
        is_same = [a.state.clip_step == b.state.clip_step for a, b in pairs]
        # After too many rejected steps in a row, one that is not finite is applied.
        is_rejected = functools.reduce(jnp.logical_and, is_same, ~new.last_finite)

        def number(x: jax.Array) -> jax.Array:
            flag = _placement.beside(is_rejected, x)
            return jnp.where(flag, jnp.nan, x) if _leaves.is_floating(x) else x

        return jax.tree.map(
            lambda x: jax.tree.map(number, x) if isinstance(x, _RECORDS) else x,
            new,
            is_leaf=lambda x: isinstance(x, _RECORDS),
        )

    return jax.tree.map(
        replaced, new, old, is_leaf=lambda x: isinstance(x, optax.ApplyIfFiniteState)
    )


def _check_columns(state: HistoryState, columns: list[Column]) -> None:
    """Raise unless the state has rows of these columns."""
    key = key_of_rows(text_of(columns))
    if list(state.history_rows) == [key]:
        return
    names = {column.key for column in columns}
    advice = (
        "Pass the state of this transformation's init. After a change of the model or"
        " of the transformations, move the state with optclip.carry_over."
    )
    if isinstance(state.history_names, Tracer):
        raise ValueError(
            "`state` must have a history of the metrics that `inner` records now, got"
            f" the key {sorted(state.history_rows)} in place of {key!r} (number of"
            f" quantities and digest of their names). {advice} Call update outside of"
            " jax.jit for the names."
        )
    old = {column.key for column in columns_in(state.history_names)}
    raise ValueError(
        "`state` must have a history of the metrics that `inner` records now. It lacks"
        f" {sorted(names - old)[:5]}, and has the unknown {sorted(old - names)[:5]}."
        f" {advice}"
    )
