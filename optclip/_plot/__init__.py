"""Plots of recorded metrics, one per file.

`_history` reads the records, and `_style` draws what the plots share.
"""

from ._distribution import distribution
from ._heatmap import heatmap
from ._history import clip_in, steps_in
from ._norm_plot import norms
from ._rate import rate
