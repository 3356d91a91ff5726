"""Attribute the gradient of a step to leaves, rows, examples and positions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from .._arrays import _validate
from .._typing import History, PyTree
from . import _attribution, _findings
from ._attribution import step_of
from ._comparison import compared, usual_of
from ._explanation import Explanation, entries_of
from ._leaf_sizes import leaves_of, outliers_of, sizes_of
from ._recorded import LEAF, recorded_in


def explain(
    losses: Callable[..., jax.Array],
    params: PyTree,
    *args: PyTree,
    top: int = 3,
    microbatch_size: int | None = None,
    history: History | PyTree = None,
    step: int | None = None,
) -> Explanation:
    """Find the leaf, row, example and position that dominate the gradient of a step.

    With g the gradient of the mean loss, the fraction of a loss is
    `<g_i, g> / (|g|^2 * number of losses)`, computed by one directional derivative.
    Pass the parameters from before the update, so keep a copy if they are donated:
    `jax.tree.map(jnp.copy, params)`, or `nnx.clone(model)` of a Flax NNX model, whose
    `nnx.state` follows it.

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
      history: Output of `optclip.history`, another history that `optclip.plot` accepts,
        or the state of an optimizer in `with_history`. The mean loss and the L2 norm of
        the gradient are compared with the rows. Each leaf that has norms is compared
        with its own median, and leaves are in order of this ratio. Default: None.
      step: Number of the row that `params` and `args` belong to. Its loss and norm are
        compared with the recomputed ones, and only the rows before it are usual.
        Default: None.

    Returns:
      An `Explanation`. A sentence names the whole batch if its mean loss exceeds mean +
      6 std of the 64 steps before, or its norm 10 times their median; an example,
      position or slice only if it has over half of the gradient, or an example or one
      of its positions also over a tenth and a loss above mean + 6 std of the others;
      and a leaf only if it has over 90% or, with a history, over 10 times its median
      norm. These are findings, not causes.

      A step is reproduced if the norm differs by at most 2%, and the norm of each leaf
      by 5% of itself or of a tenth of the norm; if the loss differs by over 0.5%, norms
      by a tenth of this: the run computed this gradient from these parameters and this
      batch. Otherwise hardware may have failed, unless the step had other parameters,
      another batch, dropout key or mode, another loss, or a recorded norm other than
      the L2 norm of this gradient: another norm, a mask, or a transformation before the
      clipping. If the loss and large leaves are reproduced, hardware is likely. Bind
      the key of the step to the losses with `functools.partial`; pass all microbatches
      of an accumulated step.

    Raises:
      TypeError: Called inside `jax.jit`, or the losses are not one array of floats.
      ValueError: The losses are already reduced, or have more than two axes; the batch
        cannot be split; an array was donated; the history has neither norms nor a loss;
        or it lacks the step.
    """
    top = _validate.length("top", top)
    given = step_of(losses, params, args, microbatch_size)
    if step is not None and history is None:
        raise ValueError("`step` needs `history`, the run that recorded this step.")
    rows = ({}, {}) if history is None else recorded_in(history, given.names, step)
    values, grads = _attribution.gradient(given)
    sizes, of_params = (sizes_of(given.names, x) for x in (grads, given.leaves))
    leaves = leaves_of(sizes, usual_of(rows[0]))
    bad_losses = [tuple(map(int, place)) for place in np.argwhere(~np.isfinite(values))]
    bad_leaves, bad_params = (
        [size.name for size in each if not np.isfinite(size.norm)]
        for each in (sizes, of_params)
    )
    bad_examples, fractions, method = [], None, "derivative"
    if bad_losses or bad_leaves:
        bad_examples = _attribution.nonfinite_examples(given, bad_losses)
    elif any(size.norm > 0 for size in sizes):
        fractions, method = _attribution.contributions(given, grads)
    entries = entries_of(fractions, values)
    outliers = outliers_of(of_params)
    bad = bad_losses, bad_examples, bad_leaves, bad_params
    norms = {(LEAF, leaf.name): leaf.norm for leaf in leaves}
    of_run, reproduced = compared(*rows, step, values, norms)
    findings = [
        *of_run,
        *_findings.of_nonfinite(*bad, len(values)),
        *_findings.of_outliers(outliers),
        *_findings.of_contributions(entries, method),
        *_findings.of_leaves(leaves),
        *(_findings.of_history(leaves) if reproduced is not False else []),
    ]
    by_loss, by_example, by_position = (each[:top] for each in entries)
    return Explanation(
        findings, float(np.hypot.reduce([size.norm for size in sizes])), leaves[:top],
        by_example, by_position, by_loss, method,
        outliers[:top], *bad, float(np.mean(values)), reproduced,
    )  # fmt: skip
