"""The rows of a history, moved to other columns or to another number of rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._monitor import columns_in


def carried_history(old: list[Any], new: list[Any]) -> Any:
    """Return the rows of a new history with the newest ones of the old; None if equal.

    Both are the rows, the count and the names. Columns are matched by name. Those that
    the old history lacks stay 0 in its rows.
    """
    (before, count, old_names), (blank, _, names) = old, new
    if before.shape == blank.shape and np.array_equal(old_names, names):
        return None
    before, rows, number = np.asarray(before), np.array(blank), round(float(count))
    steps = np.arange(max(0, number - min(len(before), len(rows))), number)
    columns, new_columns = (
        {column.key: i for i, column in enumerate(columns_in(jax.device_get(text)))}
        for text in (old_names, names)
    )
    pairs = [(columns[n], j) for n, j in new_columns.items() if n in columns]
    if len(steps) and pairs:
        here, there = (np.array(x) for x in zip(*pairs, strict=True))
        kept = before[steps % len(before)][:, here]
        rows[(steps % len(rows))[:, None], there[None]] = kept
    return rows
