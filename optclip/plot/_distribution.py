"""How large norms are, and where among them the threshold lies."""

from __future__ import annotations

import numpy as np

from optclip.monitor._interface import percent
from optclip.plot import _history, _style
from optclip.plot._style import Axes
from optclip.typing import History


def distribution(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how many steps had which norm; the median threshold, and its quantile.

    Per leaf, axis or element it draws the largest of the norms and no threshold, since
    the smallest threshold may be of another norm.

    Args:
      history: what `optclip.metrics` returned in a run: a list of dicts, one a step, a
        dict of arrays, or the path of a file that `optclip.plot.save` wrote.
      clip: the name of the clip; the only one if None.
      part: a group's label or a leaf's path, for clips that record these.
      ax: axes to draw on; those of a new figure if None.

    Returns:
      The axes.

    Raises:
      ImportError: Matplotlib is not installed.
      ValueError: there is no such clip or part, or several and none is named; no norm
        is finite and above 0.

    Example:
      >>> import numpy as np, optclip
      >>> norms = np.linspace(1.0, 5.0, 101)
      >>> history = {
      ...     "clip/norm": norms, "clip/threshold": np.full(101, 4.0),
      ...     "clip/coefficient": np.minimum(1, 4.0 / norms),
      ... }
      >>> ax = optclip.plot.distribution(history)
      >>> print(ax.get_legend_handles_labels()[1])
      ['threshold 4: above 74% of the norms']
    """
    record = _history.clip_in(history, clip, part)
    norms = record.norm[np.isfinite(record.norm) & (record.norm > 0)]
    if not norms.size:
        raise ValueError(
            "`history` must have a norm that is finite and above 0, got none among"
            f" {len(record.norm)}. Record a run that trains."
        )
    ax = _style.new_axes(ax)
    # Bins have equal ratios, since norms spread over orders of magnitude.
    low, high = norms.min(), norms.max()
    edges = np.geomspace(low, high if high > low else 2 * low, 41)
    ax.hist(norms, bins=edges.tolist(), color=_style.AFTER, alpha=0.75)
    _style.set_log_ticks(ax)
    limits = record.threshold[np.isfinite(record.threshold)]
    if limits.size and record.fraction is None:
        limit = float(np.median(limits))
        fraction = float(np.mean(norms < limit))
        label = f"threshold {limit:.3g}: above {percent(fraction)} of the norms"
        ax.axvline(limit, color=_style.THRESHOLD, ls="--", label=label)
    x = "norm of the updates" if record.fraction is None else "largest norm of all"
    return _style.finish(ax, x=x, y="steps", title=record.title)
