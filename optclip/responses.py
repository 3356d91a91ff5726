"""Choose what happens at a threshold: a coefficient for each norm.

A response is a name, an object with `coefficient(norm, threshold)`, or a function of
these two, by whose result the updates are multiplied. Both arguments are float32 or
float64 arrays of one shape. They may be traced, also outside of jit, so choose by
`jnp.where`. Norms are finite and at least 2**-60 (2**-500 in float64); thresholds are
0, in the same range, or inf. Return exactly 1 below the threshold to keep updates
bit-identical. The response is not called for zero norms, which stay zero.

An object with `signed = True` reads its threshold as a parameter, such as an exponent:
negative numbers are passed on, which otherwise raise, or count as 0 if traced. Singular
values below 2e-6 of the largest (4e-15 in float64) then become 0.

For a norm n and a threshold c:

================ ================================== ================================
response         norm after clipping                use
================ ================================== ================================
`"hard"`         min(n, c)                          the default
`"smooth"`       n / sqrt(1 + (n/c)^2)              no kink at the threshold
`"normalize"`    c                                  updates of constant norm
`"drop"`         n up to c, else 0                  outliers
`band(low)`      n within [low c, c]                groups with vanishing gradients
`"softsign"`     n / (1 + n/c)                      elements (`clip_by_value`)
`"tanh"`         c tanh(n/c)                        elements
`"proportional"` n c / max(n) above c, else n       elements of each leaf
================ ================================== ================================

Example:
  A custom response that replaces the ratio of norm and threshold by its root:

  >>> import jax.numpy as jnp
  >>> import optclip
  >>> def root_capper(norm, threshold):
  ...     return jnp.where(norm > threshold, jnp.sqrt(threshold / norm), 1.0)
  >>> tx = optclip.clip_by_global_norm(1.0, response=root_capper)
  >>> updates = jnp.array([0.0, 16.0])
  >>> print(tx.update(updates, tx.init(updates))[0])
  [0. 4.]
"""

from ._responses._response_argument import detached
from ._responses._responses import Response, band

__all__ = ["Response", "band", "detached"]
