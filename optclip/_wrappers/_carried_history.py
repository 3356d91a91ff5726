"""The rows of a history, moved to other columns or to another number of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._monitor import columns_in
from .._typing import HistoryState


def carried_history(old: HistoryState, new: HistoryState) -> HistoryState:
    """Return the new state with the newest rows of the old one.

    Columns are matched by name. Those that the old history lacks stay 0 in its rows.
    """
    (before,), (key,) = old.history_rows.values(), new.history_rows
    rows = new.history_rows[key]
    count = round(float(old.history_count))
    steps = np.arange(max(0, count - min(len(before), len(rows))), count)
    names, new_names = (_columns(x.history_names) for x in (old, new))
    pairs = [(names[n], j) for n, j in new_names.items() if n in names]
    if len(steps) and pairs:
        here, there = (np.array(x) for x in zip(*pairs, strict=True))
        kept = jnp.asarray(before)[steps % len(before)][:, here]
        places = (steps % len(rows))[:, None], there[None]
        rows = rows.at[places].set(kept.astype(rows.dtype))
    counted = jnp.asarray(count, new.history_count.dtype)
    return new._replace(history_rows={key: rows}, history_count=counted)


def _columns(text: Any) -> dict[str, int]:
    columns = columns_in(jax.device_get(text))
    return {column.key: i for i, column in enumerate(columns)}
