"""Name and read the steps that `with_history` keeps in an optimizer state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves, _validate
from .._typing import PyTree
from ._metrics import Metric, has_field, read_field

# The loss has a flag of its own, since a missing loss is no NaN: `jax_debug_nans` would
# raise an error for the first state.
LOSS, HAS_LOSS = "loss", "has_loss"

# Fields that describe the last step; the others are counts over all steps.
_OF_LAST_STEP = {
    "norm",
    "threshold",
    "coefficient",
    "fraction",
    "leaf_norm",
    "loss",
    "loss_threshold",
}


def history(opt_state: PyTree) -> dict[str, np.ndarray]:
    """Read the last steps from the state of an optimizer in `with_history`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> tx = optclip.with_history(tx)
      >>> _, state = tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)), value=0.5)
      >>> for key, numbers in optclip.history(state).items():
      ...     print(key, numbers)
      step [0]
      clip/norm [3.]
      clip/threshold [1.]
      clip/coefficient [0.33333334]
      clip/clipped [1.]
      clip/rate [1.]
      clip/nonfinite [0.]
      clip/steps [1.]
      loss [0.5]

    Args:
      opt_state: State of an optimizer, live or restored, also as plain dicts and
        without the optimizer that made it.

    Returns:
      A dict of arrays of shape `(rows,)`, oldest step first, which `optclip.plot`,
      `suggest`, `summary` and `explain` accept. `step` is int64, the number of recorded
      updates before the row. The others are the keys of `metrics` and `loss`, float32.
      `loss` is NaN in steps without one, and missing if no step has one.

      In a step that `skip` skipped or `optax.apply_if_finite` rejected, the numbers of
      the transformations inside are NaN, except counts, since they were not computed.

    Raises:
      TypeError: Called inside `jax.jit`.
      ValueError: The state has no history, or several, or is of an ensemble.
    """
    state = _history_in(opt_state)
    fields = "history_rows", "history_count", "history_names"
    rows, count, text = jax.tree.leaves([read_field(state, field) for field in fields])
    advice = "Return the state from the jitted step, and pass that."
    for x in (rows, count, text):
        _validate.outside_jit("opt_state", x, advice)
    if np.ndim(rows) != 2:
        raise ValueError(
            "`opt_state` must have one history, got the state of an ensemble (jax.vmap)"
            f" or of several steps, whose rows have the shape {np.shape(rows)}. Index"
            " it first: jax.tree.map(lambda x: x[0], opt_state)."
        )
    columns, rows = columns_in(text), np.asarray(rows, np.float32)
    total = round(float(count))
    steps = np.arange(max(0, total - len(rows)), total)
    series = rows[steps % len(rows)].T
    numbers = {x.key: y.copy() for x, y in zip(columns, series, strict=True)}
    # What was not computed is NaN.
    for column in columns:
        for skip in column.skips:
            numbers[column.key][numbers[f"{skip}/consecutive"] > 0] = np.nan
    has_loss, loss = numbers.pop(HAS_LOSS) > 0, numbers.pop(LOSS)
    if has_loss.any():
        numbers[LOSS] = np.where(has_loss, loss, np.float32(np.nan))
    return {"step": steps, **numbers}


def _history_in(opt_state: PyTree) -> Any:
    """Return the only state of `with_history` in a state."""

    def is_history(x: Any) -> bool:
        return has_field(x, "history_rows")

    leaves = jax.tree.leaves_with_path(opt_state, is_leaf=is_history)
    states = [(path, x) for path, x in leaves if is_history(x)]
    if len(states) == 1:
        return states[0][1]
    _validate.require(
        "opt_state", opt_state, bool(states),
        "the state of an optimizer in with_history",
        "Wrap the optimizer: optclip.with_history(tx, steps=1000).",
    )  # fmt: skip
    names = [_leaves.path_str(path) for path, _ in states]
    raise ValueError(
        f"`opt_state` must have one history, got {len(states)}, at {names}. Pass the"
        " part of the state that has one."
    )


class Column(NamedTuple):
    """Name a quantity of the history.

    Attributes:
      key: Its key in `metrics`, or `LOSS` or `HAS_LOSS`.
      skips: Names of the `skip`s in whose skipped steps it was not computed.
    """

    key: str
    skips: tuple[str, ...] = ()


def columns_of(metrics: Sequence[Metric]) -> list[Column]:
    """Return the columns of the loss, its flag, and these metrics."""
    columns = [Column(LOSS), Column(HAS_LOSS)]
    for metric in metrics:
        skips = metric.skips if metric.field in _OF_LAST_STEP else ()
        columns += [Column(key, skips) for key in metric.keys]
    return columns


def text_of(columns: Sequence[Column]) -> bytes:
    """Return the columns as JSON, a list of each key and its skips."""
    lists = [[column.key, *column.skips] for column in columns]
    return json.dumps(lists, separators=(",", ":")).encode()


def columns_in(text: Any) -> list[Column]:
    """Return the columns from their text, an array of bytes."""
    lists = json.loads(np.asarray(text).astype(np.uint8).tobytes())
    return [Column(key, tuple(skips)) for key, *skips in lists]


def key_of_rows(text: bytes) -> str:
    """Return the key of the rows: the number of columns and a digest of the text."""
    return f"{len(json.loads(text))}_{hashlib.sha256(text).hexdigest()[:12]}"


def array_of(text: bytes) -> jax.Array:
    """Return the text as an array of bytes.

    It is added to zeros, since the type of a constant on an Explicit mesh would differ
    from the type of the result of `update`: each training step would compile twice.
    """
    return jnp.zeros((len(text),), jnp.uint8) + np.frombuffer(text, np.uint8)
