"""Decide which losses and norms of a recorded run stand out from the others."""

from __future__ import annotations

import numpy as np

# The rule that the package recommends for losses, and the factor for norms.
_NEIGHBORS, _DEVIATIONS, _TIMES = 64, 6, 10


def stands_out(value: float, recorded: np.ndarray, *, is_loss: bool) -> bool:
    """Return whether a loss or a norm is unusually large after recorded ones.

    Args:
      value: The loss or the norm.
      recorded: The losses or norms before it, oldest first. NaN, infinite numbers and
        outliers among them are ignored.
      is_loss: Whether they are losses: mean + 6 std of the last 64; otherwise ten times
        the median of the last 64.
    """
    usual = recorded[np.isfinite(recorded)][-_NEIGHBORS:]
    if not usual.size:
        return False
    center = float(np.median(usual))
    if not is_loss:
        return not value < _TIMES * center
    usual = usual[np.abs(usual - center) <= _TIMES * np.median(np.abs(usual - center))]
    return not value <= np.mean(usual) + _DEVIATIONS * np.std(usual)
