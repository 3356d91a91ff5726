"""Plot recorded clipping metrics with Matplotlib.

Each function plots a history: the dicts that `optclip.metrics` returned, one per step;
a dict of arrays, as `jax.lax.scan` stacks them; or the path of a file that `save`
wrote, with one JSON object per line. The x axis is the logged key `step` if there is
one, otherwise `clip/steps` minus 1, so that the first step is 0. Each returns the
Matplotlib `Axes`. Matplotlib is imported at the first call and installed by
`pip install '.[plot]'`.

Example:
  >>> import jax.numpy as jnp, optclip
  >>> tx = optclip.clip_by_global_norm(2.0)
  >>> state, history = tx.init(jnp.zeros(1)), []
  >>> for size in (1.0, 3.0, 1.5):
  ...     _, state = tx.update(jnp.array([size]), state)
  ...     history.append(optclip.metrics(state))
  >>> ax = optclip.plot.norms(history)
  >>> print(ax.get_ylabel())
  norm
"""

from ._plot._heatmap import heatmap
from ._plot._history import save
from ._plot._norm_plots import distribution, norms, rate

__all__ = ["distribution", "heatmap", "norms", "rate", "save"]
