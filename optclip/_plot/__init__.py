"""Plots of recorded metrics.

`_history` reads the records, and `_style` draws what the plots share.
"""

from ._heatmap import heatmap
from ._history import clip_in, steps_in
from ._norm_plots import distribution, losses, norms, rate
