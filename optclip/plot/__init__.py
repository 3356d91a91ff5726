"""Plot the history that `optclip.metrics` recorded.

Each takes the history of a run: a list of such dicts, one a step; one dict of arrays,
as `jax.lax.scan` stacks them; or the path of a file with one JSON object a line, as
`save` writes. Each returns the Matplotlib `Axes` it drew on. Matplotlib is imported by
the call, so that `import optclip` needs none: `pip install optclip[plot]`.

Example:
  >>> import jax.numpy as jnp, optclip
  >>> tx = optclip.clip_by_global_norm(2.0)
  >>> state, history = tx.init(jnp.zeros(1)), []
  >>> for size in (1.0, 3.0, 1.5):
  ...     _, state = tx.update(jnp.array([size]), state)
  ...     history.append(optclip.metrics(state))
  >>> ax = optclip.plot.norms(history)
  >>> print(ax.get_ylabel())
  norm of the updates
"""

from optclip.plot._distribution import distribution as distribution
from optclip.plot._heatmap import heatmap as heatmap
from optclip.plot._history import save as save
from optclip.plot._norm_plot import norms as norms
from optclip.plot._rate import rate as rate
from optclip.plot._runs import runs as runs

__all__ = ["distribution", "heatmap", "norms", "rate", "runs", "save"]
