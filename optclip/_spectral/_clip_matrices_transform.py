"""Clip matrices by their singular values, or scale them by their shape, in optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import optax

from .._arrays import _axis_names, _leaves, _validate
from .._arrays._call_errors import explains_call
from .._arrays._leaf import Leaf
from .._arrays._types import Held, PyTree
from .._clip import lay_out
from .._responses import ResponseLike
from .._thresholds import Named
from .._transforms import clip_by
from .._typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    Record,
    ThresholdTree,
)
from ._matrix_scopes import Matrices, MatrixAxes, Method, matrices, singular_values
from ._spectral_norm import Spectral


@explains_call
def clip_by_spectral_norm(
    max_norm: ThresholdTree,
    *,
    matrix_axes: MatrixAxes = (-2, -1),
    method: Literal["exact", "power_iteration"] = "exact",
    steps: int | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    """Clip each matrix by its spectral norm.

    Each matrix is multiplied by `min(1, max_norm / norm)`, where the norm is its
    largest singular value. The norm of a vector is its L2 norm; scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_spectral_norm(1.0)
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]

    Args:
      max_norm: Threshold: a number, optax schedule, `optclip.thresholds` rule, or
        prefix tree of these with None for unclipped.
      matrix_axes: Axes of the rows and of the columns, `(..., -1)` for convolutions;
        see `optclip.matrices`. Default: the last two.
      method: `"exact"` (default, relative error at most 1e-5) or
        `"power_iteration"`, which starts from the singular vectors of the previous
        step, stored in the state.
      steps: Number of iterations per step of `"power_iteration"`. Default: 1.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves, each matrix along one side only.
        Default: read from their types.
      record: Whether to record each step; `"leaves"` records the norms of each leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation.

    Raises:
      ValueError: `steps` is passed with `method="exact"`.

    Guarantees:
      The estimate of `"power_iteration"` never exceeds the norm, so a matrix may be
      clipped too little. After k iterations from a vector at an angle t to the first
      singular vector it is at least `norm * cos(t) ** (1 / (2 * k + 1))`. It is also at
      least the largest norm of a row of the smaller side, so a spike in a new direction
      is detected in its first step.

    References:
      Kuczynski and Wozniakowski, "Estimating the Largest Eigenvalue by the Power and
      Lanczos Algorithms with a Random Start", 1992.
    """
    norm = Spectral(method=method, steps=1 if steps is None else steps)
    _validate.require(
        "steps",
        steps,
        steps is None or method != "exact",
        "omitted with method='exact', which takes no steps",
    )
    return clip_by(
        Named("max_norm", max_norm, "clip_by_spectral_norm"),
        over=matrices(matrix_axes), norm=norm, response=response, eps=eps,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


@explains_call
def clip_by_singular_value(
    max_value: ThresholdTree,
    *,
    response: ResponseLike = "hard",
    matrix_axes: MatrixAxes = (-2, -1),
    method: Method = "eigh",
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    """Cap each singular value of each matrix.

    Each singular value s becomes `min(s, max_value)`; the singular vectors are
    unchanged. A vector has one singular value, its L2 norm; scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_singular_value(1.0)
      >>> kernel = jnp.array([[0.0, 4.0], [0.5, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.  1. ]
       [0.5 0. ]]

    Args:
      max_value: Threshold: a number, optax schedule, `optclip.thresholds` rule, or
        prefix tree of these with None for unclipped.
      response: `"hard"` (default), `"smooth"` for `s / sqrt(1 + (s / max_value) ** 2)`,
        `"normalize"` for `max_value` instead of s (orthogonalization, as in Muon), or
        with `"eigh"` any other response. Values below 0.01 of the threshold and of the
        largest are enlarged accurately only by one with `signed = True`, see `clip_by`.
      matrix_axes: Axes of the rows and of the columns, `(..., -1)` for convolutions;
        see `optclip.matrices`. Default: the last two.
      method: `"eigh"` (default) decomposes the smaller Gram matrix; `"newton_schulz"`
        computes about 65 products of that size for `"hard"` and `"smooth"`, and 21 for
        `"normalize"`.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves, each matrix along one side only.
        Default: read from their types.
      record: Whether to record each step; `"leaves"` records the values of each leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation. Its record contains singular values; with
      `"newton_schulz"` a bound on the largest, too large by a factor of at most the
      fourth root of the smaller side, so that unclipped steps may count as clipped.

    Raises:
      ValueError: `method` does not support the response.

    Guarantees:
      The same as those of `optclip.functional.clip_by_singular_value`.

    References:
      Jiang, Semenov and Stich, "Enhancing LLM Training via Spectral Clipping", 2026,
      arXiv:2603.14315, for the smooth cap.

      Amsel, Persson, Musco and Gower, "The Polar Express: Optimal Matrix Sign Methods
      and Their Application to the Muon Algorithm", 2025, arXiv:2505.16932, for
      orthogonalization.
    """
    return clip_by(
        Named("max_value", max_value, "clip_by_singular_value"),
        over=singular_values(matrix_axes, method=method), response=response,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


def scale_by_shape(
    matrices: Matrices,
    transposed: Callable[[str], bool] | None,
    mask: Mask | None,
    axis_name: AxisName | None,
) -> optax.GradientTransformation:
    """Multiply each matrix by `sqrt(max(1, outputs / inputs))`.

    The axes of `matrices` are inputs and outputs, in reverse order if `transposed`
    returns True for the path of a leaf.
    """
    held = Held((mask, axis_name))

    def update_fn(updates: PyTree, params: PyTree = None) -> PyTree:
        mask, axis_name = held.value
        layout = lay_out(matrices, updates, (mask, None, None), axis_name)
        names = _leaves.names_of(layout.flat.paths)
        out = {}
        for i, leaf, _ in layout.scaled:
            if leaf.ndim < 2:
                continue
            sides = matrices.sides(leaf, leaf.path)
            inputs, outputs = (_length(leaf, side) for side in sides)
            if transposed is not None and transposed(names[i]):
                inputs, outputs = outputs, inputs
            # A matrix without elements may have no inputs.
            out[i] = leaf.value * max(1.0, outputs / max(inputs, 1)) ** 0.5
        return layout.rebuild(out)

    return optax.stateless(update_fn)


def _length(leaf: Leaf, side: tuple[int, ...]) -> int:
    """Return the length of a side, over all devices that split it."""
    split = _axis_names.split_axes_of_slices(
        leaf.array, leaf.shape, side, leaf.axis_name
    )
    return math.prod(leaf.shape[a] for a in side) * _axis_names.axes_size(split)
