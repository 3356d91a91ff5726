"""Decide which losses and norms of a recorded run stand out from their neighbors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# A spike is this many times the median of as many norms before it, and after it.
_TIMES, _NEIGHBORS = 10, 10
# The most rows of a spike, and of one that no rows follow.
_LONGEST, _SUDDEN = 128, 16
# A rise of norms that lasts to the end: within a few rows, or over many.
_LEVEL, _SLOW_LEVEL = 16, 40
# The rule that the package recommends for losses: mean + 6 std of the last 64, or of
# fewer in a shorter run. In a heavy tail most windows have a small std, so that logs
# must lie nearly as far above.
_DEVIATIONS, _LOSSES, _FEWER, _IN_LOGS = 6, 64, 16, 1.25
# A rise of losses that lasts to the end, for at least so many rows: within a few rows,
# or over many. Before a slow one the losses have fallen.
_RISE, _SLOW_RISE, _FALL, _IF_NOT_FALLEN, _LASTS = 1.3, 2, 1.3, 20, 10
# A rise begins at this part of its logs, and is slow if more is before its first row.
_BEGINS, _SLOW = 0.05, 0.1
# Equal losses have no std, so that a fraction of them is the least. Losses this many
# median deviations (6 std) from the median are bursts, which no std contains.
_LEAST_STD, _FAR = 0.01, 9
# From this many rows on, rows share windows.
_LONG = 20_000
# The least number of rows.
_FEWEST = 5
# The most rows of a start. More would hide what has been found before.
_START = 50
# Outliers lie above all other rows by such a factor, and by so many times the mean
# excess in the tail of the others: if it is a power law, its gaps are exponential, and
# one as large has a chance of 0.004 (30 rows in the tail) to 0.02 (6 rows).
_GAP, _GAP_OF_LOSSES, _EXCESSES = 3, 1.5, 6
# So many outliers may be a regular part of a run, if they are no rare ones.
_FEW = 4


class Outliers(NamedTuple):
    """Hold what stands out in one series of a run.

    Attributes:
      rows: Whether each row stands out.
      usual: The usual number around each row; NaN where the series has none.
      rise: The row from which on the numbers rise, their level before it, and the last
        one; None if they have fallen again.
    """

    rows: np.ndarray
    usual: np.ndarray
    rise: tuple[int, float, float] | None


# The rows, the usual numbers, and a row after which numbers are above a level.
_Found = tuple[np.ndarray, np.ndarray, tuple[int, float] | None]


def stands_out(value: float, recorded: np.ndarray, *, is_loss: bool) -> bool:
    """Return whether a loss or a norm is unusually large after recorded ones.

    Args:
      value: The loss or the norm.
      recorded: The losses or norms before it, oldest first. Outliers, zeros and numbers
        that are not finite are ignored.
      is_loss: Whether they are losses: mean + 6 std of the last 64; otherwise ten times
        the median of the last 64.
    """
    usual = recorded[np.isfinite(recorded) & (recorded != 0)][-_LOSSES:]
    if len(usual) < _FEWEST:
        return False
    if not is_loss:
        return not value < _TIMES * np.median(usual)
    return not _deviations(np.array([value]), usual[None])[0] <= _DEVIATIONS


def outliers(
    series: np.ndarray,
    *,
    is_loss: bool,
    has_start: bool,
    rare: float = 0.05,
    explained: np.ndarray | None = None,
) -> Outliers:
    """Return the losses or norms of a run that stand out.

    NaN, inf and 0 are no neighbors: equal rewards have a loss of 0. The first tenth of
    a series is its start, in which larger numbers are usual, except of one that has
    begun before the first row. Explained rows do not hide others.
    """
    where = np.flatnonzero(np.isfinite(series) & (series != 0))
    x, rows, rise = series[where], np.zeros(len(series), bool), None
    usual = np.full(len(series), np.nan)
    if len(x) >= _FEWEST:
        start = start_of(len(x)) if has_start or where[0] > 0 else _FEW
        of = _high_losses if is_loss else _spikes
        is_other = np.ones(len(x), bool) if explained is None else ~explained[where]
        rows[where], usual[where], rise = of(x, start, rare, is_other)
    if rise is None:
        return Outliers(rows, usual, None)
    first, level = rise
    last = float(np.median(x[-_LASTS:]))
    before = _medians_before(x)[: first + 1]
    if level > 0 and before[first] > level * (last / level) ** _SLOW:
        # A slow rise has begun before its numbers stand out.
        lows = np.flatnonzero(before <= level * (last / level) ** _BEGINS)
        first = max(0, *lows - _NEIGHBORS // 2)
    return Outliers(rows, usual, (int(where[first]), level, last))


def start_of(count: int) -> int:
    """Return the number of rows of the start of a run, at most its first tenth."""
    return min(-(-count // 10), _START)


def _spikes(x: np.ndarray, start: int, rare: float, is_other: np.ndarray) -> _Found:
    """Return the norms above ten times their neighbors, and a rise that lasts."""
    if not 0 < _TIMES * x.min() <= x.max():
        return np.zeros(len(x), bool), x, None
    before, after = _medians_before(x), _medians_before(x[::-1])[::-1]
    # After the last rows there are none, so that those before decide.
    low = np.fmax(
        _least_before(before[:-1], _LONGEST),
        _least_before([0, *after[-2:0:-1]], _LONGEST)[::-1],
    )
    bursts, usual = [], np.fmax(before[:-1], after[1:])
    for first, end in spans((x >= _TIMES * low) & (np.arange(len(x)) >= start)):
        level = np.fmax(before[first], after[end])
        longest = _LONGEST if end < len(x) else _SUDDEN
        if end - first <= longest and x[first:end].max() >= _TIMES * level:
            bursts.append((first, end))
            usual[first:end] = level
    is_other = is_other & (np.arange(len(x)) >= start)
    rows = _apart(np.log(x / usual), bursts, is_other, _GAP, rare)
    return rows, usual, _rise_of_norms(x, before[:-1], start)


def _rise_of_norms(
    x: np.ndarray, before: np.ndarray, start: int
) -> tuple[int, float] | None:
    """Return a rise within some rows, or by more over many, that lasts to the end."""
    last, rows = np.median(x[-_NEIGHBORS:]), np.arange(len(x))
    is_high = x >= _TIMES * _least_before(before, _SUDDEN)
    for first, _ in spans(is_high & (rows >= start) & (rows <= len(x) - _LASTS)):
        level = float(before[first])
        is_rise = last >= _LEVEL * level
        if is_rise and np.mean(x[first:] >= _LEVEL / 4 * level) >= 0.9:
            return first, level
    # Norms rise in a warm-up too, but from no level that lasts a quarter of the run.
    level = float(_medians(x, max(_NEIGHBORS, len(x) // 4)).min())
    first = int(np.flatnonzero(x < _TIMES * level)[-1]) + 1
    is_rise = last >= _SLOW_LEVEL * level and len(x) - first >= _LASTS
    return (first, level) if is_rise else None


def _high_losses(
    x: np.ndarray, start: int, rare: float, is_other: np.ndarray
) -> _Found:
    """Return the losses above mean + 6 std of those before, and a rise that lasts."""
    count, size = len(x), min(_LOSSES, len(x) - 1, max(_FEWER, len(x) // 4))
    rows, start = np.arange(count), max(start, min(_FEWER // 2, count // 2))
    # Rows of a long log share windows.
    shared = 1 + count // _LONG
    windows = _windows_before(x, rows[::shared], size)
    # Below the last decimal of rounded losses no std is known.
    decimals = (k for k in range(9) if np.array_equal(x, np.round(x, k)))
    digit = 10.0 ** -next(decimals, 99)
    z = _deviations(x, windows, digit)
    usual = np.median(windows, axis=1)[rows // shared]
    is_high = (z > _DEVIATIONS) & (rows >= start)
    # The rows after it are neighbors too, where there are enough.
    is_burst, high_rows = is_high.copy(), np.flatnonzero(is_high)
    for ahead in range(0, 4 * size, size):
        # A burst that is longer, or recovers slowly, ends before later windows.
        last_rows = np.maximum(count - 1 - high_rows - ahead, 0)
        after = _windows_before(x[::-1], last_rows, size)
        is_low = _deviations(x[high_rows], after, digit) > _DEVIATIONS
        has_ended = is_burst[high_rows] | (is_low & (last_rows >= size))
        is_burst[high_rows] = has_ended if ahead else is_low
    bursts, rise, last = [], None, np.median(x[-_LASTS:])
    for first, end in spans(is_high):
        level = usual[first]
        highest = _RISE * level if level > 0 else x[start:first].max(initial=level)
        if rise is None and last > highest and count - first >= _LASTS:
            middle = (level + np.median(x[first:])) / 2
            if middle > (level + highest) / 2 and np.mean(x[first:] > middle) >= 0.9:
                rise = first, float(level)
        # Until enough rows follow, a burst may recover slowly.
        is_open = count - end < 2 * size and 0 < highest < x[first:end].max()
        if is_open or count - end < _FEWER // 2 or is_burst[first:end].any():
            bursts.append((first, end))
    rise = rise or _slow_rise(x, size)
    is_other = is_other & (rows >= start)
    score = np.log(np.maximum(z, 2))
    found = _apart(score, bursts, is_other, _GAP_OF_LOSSES, rare)
    if x.min() > 0:
        # Many std of noisy losses are close to each other, unlike their ratios.
        found |= _apart(np.log(x / usual), bursts, is_other, _GAP, rare)
    return found, usual, rise


def _slow_rise(x: np.ndarray, size: int) -> tuple[int, float] | None:
    """Return a rise over many rows that lasts to the end."""
    if x.min() <= 0:
        return None
    medians = _medians(x, size)
    level, last = float(medians.min()), float(np.median(x[-_LASTS:]))
    # Losses of reinforcement learning rise too: noisy ones that did not fall before.
    has_fallen = medians[: int(medians.argmin()) + 1].max() > _FALL * level
    deviations = _DEVIATIONS if has_fallen else _IF_NOT_FALLEN
    noise = np.median(np.abs(np.diff(np.log(x))))
    if np.log(last / level) < max(np.log(_SLOW_RISE), deviations * noise):
        return None
    first = int(np.flatnonzero(x < level + (last - level) / 4)[-1]) + 1
    # Others rise and fall again and again.
    before = _medians(x[:first], size)
    is_first = last / level > _RISE * np.max(before / np.minimum.accumulate(before))
    return (first, level) if is_first and len(x) - first >= _LASTS else None


def _medians(x: np.ndarray, size: int) -> np.ndarray:
    """Return the medians of windows of some rows."""
    windows = sliding_window_view(x, min(size, len(x)))
    return np.median(windows[:: max(1, size // 4)], axis=1)


def _deviations(x: np.ndarray, windows: np.ndarray, digit: float = 0.0) -> np.ndarray:
    """Return how many std numbers lie above the mean of their windows, in logs too."""
    least = _LEAST_STD * np.mean(np.abs(windows), axis=1, keepdims=True)
    z = _z(x, windows, np.maximum(least, digit))
    if min(windows.min(initial=1), x.min(initial=1)) <= 0:
        return z
    in_logs = _z(np.log(x), np.log(windows), np.full_like(least, _LEAST_STD))
    return np.minimum(z, _IN_LOGS * in_logs)


def _z(x: np.ndarray, windows: np.ndarray, least: np.ndarray) -> np.ndarray:
    distances = np.abs(windows - np.median(windows, axis=1, keepdims=True))
    spread = np.maximum(np.median(distances, axis=1, keepdims=True), least)
    is_usual = distances <= _FAR * spread
    mean = np.mean(windows, axis=1, where=is_usual)
    std = np.maximum(np.std(windows, axis=1, where=is_usual), least[:, 0])
    # The std of few is often too small.
    std *= np.cbrt(_LOSSES / windows.shape[1])
    window = np.arange(len(x)) // max(1, -(-len(x) // max(1, len(windows))))
    return (x - mean[window]) / std[window]


def _apart(
    score: np.ndarray,
    bursts: list[tuple[int, int]],
    is_other: np.ndarray,
    least: float,
    rare: float,
) -> np.ndarray:
    """Return the rows of the bursts above a gap in the scores, which are logs."""
    rows = np.zeros(len(score), bool)
    is_other = is_other.copy()
    for first, end in bursts:
        is_other[max(0, first - 1) : end + 1] = False
    others = np.sort(score[is_other])[::-1]
    size = min(len(others) // 2, max(_NEIGHBORS, int(np.sqrt(len(others)))))
    excess = np.mean(others[:size] - others[size]) if size else 0.0
    gap = max(np.log(least), _EXCESSES * excess)
    bursts = sorted(bursts, key=lambda burst: -score[slice(*burst)].max())
    peaks = [score[slice(*burst)].max() for burst in bursts]
    steps = -np.diff([*peaks, others.max(initial=0.0)])
    # The lowest gap is chosen above which bursts are rare and no alternation.
    for i in np.flatnonzero(steps >= gap)[::-1]:
        firsts = sorted(first for first, _ in bursts[: i + 1])
        distances = {*np.diff(firsts).tolist()}
        is_alternation = len(distances) == 1 and min(distances) <= _SUDDEN
        is_alternation &= len(firsts) >= _FEW
        if len(firsts) <= max(_FEW, rare * len(score)) and not is_alternation:
            for first, end in bursts[: i + 1]:
                rows[first:end] = True
            break
    return rows


def _medians_before(x: np.ndarray) -> np.ndarray:
    """Return the median of up to ten entries before each, and of the last ten."""
    padded = np.concatenate([np.full(_NEIGHBORS, np.nan), x])
    ordered = np.sort(sliding_window_view(padded, _NEIGHBORS), axis=1)
    rows = np.arange(len(ordered))
    return ordered[rows, np.clip(rows - 1, 0, _NEIGHBORS - 1) // 2]


def _least_before(x: np.ndarray | list[float], size: int) -> np.ndarray:
    """Return the least of as many entries up to each, a power of 2, without NaN."""
    least, shift = np.nan_to_num(x, nan=np.inf), 1
    while shift < size:
        least[shift:] = np.minimum(least[shift:], least[:-shift])
        shift *= 2
    return least


def _windows_before(x: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    """Return as many entries before each row; at the start some are after it."""
    index = np.maximum(rows - size, 0)[:, None] + np.arange(size)
    return x[index + (index >= rows[:, None])]


def spans(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return the first row of each run of flags, and the row after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]])))
    return [(int(i), int(j)) for i, j in edges.reshape(-1, 2)]
