"""Attribute the gradient of a step to leaves, rows, examples and positions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from .._arrays import _validate
from .._typing import History, PyTree
from . import _attribution, _findings, _nonfinite
from ._contributions import tables_of
from ._explanation import Explanation
from ._largest_leaves import leaves_of, medians_of
from ._outliers import outliers_of
from ._sizes import sizes_of
from ._step import step_of


def explain(
    losses: Callable[..., jax.Array],
    params: PyTree,
    *args: PyTree,
    top: int = 3,
    microbatch_size: int | None = None,
    history: History | None = None,
) -> Explanation:
    """Find the leaf, row, example and position that dominate the gradient of a step.

    With g the gradient of the mean loss, the fraction of a loss is
    `<g_i, g> / (|g|^2 * number of losses)`, computed by one directional derivative.
    Pass the parameters from before the update, so keep a copy if they are donated.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> losses = lambda w, x: jnp.square(x @ w - 1.0)
      >>> batch = jnp.eye(4).at[2].mul(30.0)
      >>> print(optclip.explain(losses, jnp.ones(4), batch, top=2))
      100.0% of the gradient is example 2.
      100.0% of the squared norm of the gradient is element 2 of the array.
      gradient: norm 435
         100.0%  435       element 2 has 100.0% of it
      examples:
         100.0%  loss 841      example 2
           0.0%  loss 0        example 0

    Args:
      losses: Function `losses(params, *args)` that returns unreduced losses, `(batch,)`
        or `(batch, positions)`, as before their mean. Multiply weights into them.
      params: Parameters; floating-point leaves are differentiated.
      *args: Arguments of the losses, usually the batch.
      top: Number of entries per list of the result. Default: 3.
      microbatch_size: Number of examples differentiated at a time. Each array in `args`
        must then have an axis of examples first. Default: None, all.
      history: Output of `optclip.history` with norms of leaves, or another history
        that `optclip.plot` accepts. Each leaf is compared with its own median, and
        leaves are in order of this ratio. Default: None.

    Returns:
      An `Explanation`. A sentence names an example, position or slice only if it has
      over half of the gradient, a leaf only if it has over 90% or, with a history,
      over 10 times its median norm. These are findings, not causes.

    Raises:
      TypeError: Called inside `jax.jit`, or the losses are not one array of floats.
      ValueError: The losses are already reduced, or have more than two axes; the batch
        cannot be split; an array was donated; or the history has no norms of leaves.
    """
    top = _validate.length("top", top)
    step = step_of(losses, params, args, microbatch_size)
    medians = None if history is None else medians_of(history, step.names)
    values, grads = _attribution.gradient(step)
    sizes, sizes_of_params = sizes_of(grads), sizes_of(step.leaves)
    leaves = leaves_of(step.names, sizes, medians)
    bad = _nonfinite.found_in(step, values, sizes, sizes_of_params)
    fractions, method = None, "derivative"
    if not bad.is_in_gradient and any(size.norm > 0 for size in sizes):
        fractions, method = _attribution.contributions(step, grads)
    tables = tables_of(fractions, values)
    outliers = outliers_of(step.names, sizes_of_params)
    findings = [
        *_findings.of_nonfinite(bad, values.shape[0]),
        *_findings.of_outliers(outliers),
        *_findings.of_contributions(tables, method),
        *_findings.of_leaves(leaves),
        *_findings.of_history(leaves),
    ]
    norm = float(np.hypot.reduce([size.norm for size in sizes]))
    by_example, by_position = (t.largest(top) for t in tables[1:])
    return Explanation(
        findings, norm, leaves[:top],
        by_example, by_position, tables.losses.largest(top), method,
        outliers[:top], *bad,
    )  # fmt: skip
