"""Compute the coefficient that a norm and its threshold give.

A response is any object with `coefficient(norm, threshold)`, or a plain function of
that signature. Both arguments are float32 or float64 arrays of one shape, `norm`
finite and above 0, `threshold` at least 0 and possibly inf; the result multiplies the
updates. Exactly 1 leaves them untouched, to the bit: return it below the threshold. A
response is not asked about a zero norm: zeros stay zeros. The smallest norm that it is
shown is 2**-60 (2**-500 in float64), and so is the smallest threshold but 0.

================ ==================================== ================================
response         what is left of a norm n             made for
================ ==================================== ================================
`"hard"`         min(n, c)                            everything
`"smooth"`       n / sqrt(1 + (n/c)^2); `Smooth(s)`   no kink at the threshold
`"normalize"`    c                                    updates of one length
`"drop"`         n up to c, else 0                    outliers
`band(low)`      n within [low c, c]                  groups whose gradients vanish
`"softsign"`     n / (1 + n/c), `Smooth(1.0)`         elements, with `clip_by_value`
`"tanh"`         c tanh(n/c)                          elements
`"proportional"` n c / max n past c, else n           elements of each leaf
================ ==================================== ================================

Example:
  A response of your own, which leaves the square root of the excess:

  >>> import jax.numpy as jnp
  >>> import optclip
  >>> def root_capper(norm, threshold):
  ...     return jnp.where(norm > threshold, jnp.sqrt(threshold / norm), 1.0)
  >>> tx = optclip.clip_by_global_norm(1.0, response=root_capper)
  >>> updates = jnp.array([0.0, 16.0])
  >>> print(tx.update(updates, tx.init(updates))[0])
  [0. 4.]
"""

from optclip.responses._band import Band as Band
from optclip.responses._band import band as band
from optclip.responses._element_responses import Proportional as Proportional
from optclip.responses._element_responses import Tanh as Tanh
from optclip.responses._norm_responses import Drop as Drop
from optclip.responses._norm_responses import Hard as Hard
from optclip.responses._norm_responses import Normalize as Normalize
from optclip.responses._norm_responses import Response as Response
from optclip.responses._norm_responses import Smooth as Smooth
from optclip.responses._response_argument import Detached as Detached
from optclip.responses._response_argument import ResponseLike as ResponseLike
from optclip.responses._response_argument import detached as detached

__all__ = [
    "Band",
    "Detached",
    "Drop",
    "Hard",
    "Normalize",
    "Proportional",
    "Response",
    "Smooth",
    "Tanh",
    "band",
    "detached",
]
