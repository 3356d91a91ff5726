"""Hold diagnostics of each example whose gradient was clipped."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .._arrays._types import PyTree


class ExampleInfo(NamedTuple):
    """Hold per-example diagnostics, which are sensitive.

    The privacy guarantee does not cover them, since a norm reveals information about
    its example. Arrays have the batch axis first and, except `aux`, are zero at
    padding.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, strict=False)
      >>> batch = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> _, info = f(jnp.ones(2), batch, padding=jnp.array([False, True]))
      >>> print(info.values, info.norms, info.coefficients)
      [7. 0.] [5. 0.] [0.2 0. ]

    Args:
      values: Loss of each example; None from `clipped_sum`.
      norms: Norm of each example before clipping: `(batch,)`, or a dict or tree of
        these for groups or leaves.
      coefficients: Factor that clips each gradient, like `norms`; excludes the
        divisions of `"unit"` and `normalize_by`.
      nonfinite: Whether each norm is non-finite, like `norms`.
      padding: Bools `(batch,)` that mark padding.
      aux: Auxiliary output of the loss; None without `has_aux`.
    """

    values: jax.Array | None
    norms: PyTree
    coefficients: PyTree
    nonfinite: PyTree
    padding: jax.Array
    aux: Any = None
