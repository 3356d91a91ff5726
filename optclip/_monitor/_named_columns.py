"""Name the columns of a history in a state, as bytes that each checkpoint keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._metrics import Metric

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


class Column(NamedTuple):
    """Name a quantity of the history.

    Attributes:
      key: Its key in `metrics`, or `LOSS` or `HAS_LOSS`.
      skips: Names of the `skip`s in whose skipped steps it was not computed.
    """

    key: str
    skips: tuple[str, ...] = ()


def of_metrics(metrics: Sequence[Metric]) -> list[Column]:
    """Return the columns of the loss, its flag, and these metrics."""
    columns = [Column(LOSS), Column(HAS_LOSS)]
    for metric in metrics:
        skips = metric.skips if metric.field in _OF_LAST_STEP else ()
        columns += [Column(key, skips) for key in metric.keys]
    return columns


def as_text(columns: Sequence[Column]) -> bytes:
    """Return the columns as JSON, a list of each key and its skips."""
    lists = [[column.key, *column.skips] for column in columns]
    return json.dumps(lists, separators=(",", ":")).encode()


def of_text(text: Any) -> list[Column]:
    """Return the columns from their text, an array of bytes."""
    lists = json.loads(np.asarray(text).astype(np.uint8).tobytes())
    return [Column(key, tuple(skips)) for key, *skips in lists]


def digest(text: bytes) -> str:
    """Return the key of the rows: the number of columns and a digest of the text."""
    return f"{len(json.loads(text))}_{hashlib.sha256(text).hexdigest()[:12]}"


def as_array(text: bytes) -> jax.Array:
    """Return the text as an array of bytes.

    It is added to zeros, since the type of a constant on an Explicit mesh would differ
    from the type of the result of `update`: each training step would compile twice.
    """
    return jnp.zeros((len(text),), jnp.uint8) + np.frombuffer(text, np.uint8)
