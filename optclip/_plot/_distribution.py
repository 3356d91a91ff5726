"""Plot the distribution of norms and the threshold."""

from __future__ import annotations

import numpy as np

from .._monitor import percent
from .._typing import History
from . import _history, _style
from ._style import Axes


def distribution(
    history: History,
    *,
    clip: str | None = None,
    part: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot a histogram of the norms, with the median threshold and its quantile.

    For leaves, axes and elements it shows the most clipped norm of each step, without
    the threshold, which may differ between norms.

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

    Args:
      history: Output of `optclip.metrics` per step, in a form that `optclip.plot`
        describes.
      clip: Name of the transformation. Default: the only one, or the only `skip`.
      part: Label of a group or path of a leaf. Default: the only one.
      ax: Axes to draw on. Default: a new figure.

    Returns:
      The axes.

    Raises:
      ValueError: No norm is finite and above 0.
    """
    record = _history.clip_in(history, clip, part)
    norms = record.norm[np.isfinite(record.norm) & (record.norm > 0)]
    if not norms.size:
        raise ValueError(
            f"`history` has no finite norm above 0 in {len(record.norm)} steps. Record"
            " a run that trains."
        )
    ax = _style.new_axes(ax)
    # The bins are logarithmic, since norms span orders of magnitude.
    low, high = norms.min(), norms.max()
    edges = np.geomspace(low, high if high > low else 2 * low, 41)
    ax.hist(norms, bins=edges.tolist(), color=_style.AFTER, alpha=0.75)
    ax.set_xscale("log")
    _style.set_log_ticks(ax.xaxis, norms)
    limits = record.threshold[np.isfinite(record.threshold)]
    if limits.size and record.fraction is None:
        limit = float(np.median(limits))
        fraction = float(np.mean(norms < limit))
        label = f"threshold {limit:.3g}: above {percent(fraction)} of the norms"
        style = {"color": _style.THRESHOLD, "ls": "--", "lw": _style.MAIN}
        ax.axvline(limit, label=label, **style)
    x = (
        "norm of the updates"
        if record.fraction is None
        else "most clipped norm of each step"
    )
    return _style.finish(ax, x=x, y=record.steps.unit, title=record.title)
