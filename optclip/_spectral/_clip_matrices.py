"""Clip matrices by their largest singular value, or each singular value."""

from __future__ import annotations

from .._arrays._call_errors import explains_call
from .._functional import clip_by
from .._responses import ResponseLike
from .._thresholds import Named
from .._typing import AxisName, Mask, Nonfinite, Number, PyTree
from ._matrix_scopes import MatrixAxes, Method, matrices, singular_values


@explains_call
def clip_by_spectral_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    matrix_axes: MatrixAxes = (-2, -1),
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each matrix by its spectral norm.

    Each matrix is multiplied by `min(1, max_norm / norm)`, where the norm is its
    largest singular value. The norm of a vector is its L2 norm; scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import functional
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(functional.clip_by_spectral_norm(kernel, 1.0))
      [[0.   1.  ]
       [0.25 0.  ]]

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number, array that broadcasts to the norms (shape of the
        leaf with 1 at `matrix_axes`), or prefix tree of these with None for unclipped.
      matrix_axes: Axes of the rows and of the columns, `(..., -1)` for convolutions;
        see `optclip.matrices`. Default: the last two.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves, each matrix along one side only.
        Default: read from their types.

    Returns:
      The clipped tree. Matrices within the threshold are bit-identical.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), norm="spectral",
        over=matrices(matrix_axes), response=response, eps=eps,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip


@explains_call
def clip_by_singular_value(
    tree: PyTree,
    max_value: Number | PyTree,
    *,
    response: ResponseLike = "hard",
    matrix_axes: MatrixAxes = (-2, -1),
    method: Method = "eigh",
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Cap each singular value of each matrix.

    Each singular value s becomes `min(s, max_value)`; the singular vectors are
    unchanged. A vector has one singular value, its L2 norm; scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import functional
      >>> kernel = jnp.array([[0.0, 4.0], [0.5, 0.0]])
      >>> print(functional.clip_by_singular_value(kernel, 1.0))
      [[0.  1. ]
       [0.5 0. ]]

    Args:
      tree: Pytree of arrays.
      max_value: Threshold: a number, an array that broadcasts to the ascending singular
        values `(..., p)`, or a prefix tree of these with None for unclipped.
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

    Returns:
      The clipped tree.

    Raises:
      ValueError: `method` does not support the response.

    Guarantees:
      A matrix is bit-identical if `"hard"` with `"eigh"` changes none of its singular
      values, or with `"newton_schulz"` if its Frobenius norm is at most
      `max_value * (1 - 1e-6)`. In float32 singular values are at most
      `max_value * (1 + 1e-5)`. The error of the result is at most 1e-4 of its Frobenius
      norm, and `2e-4 * max_value` in the spectral norm, for sides up to 128 and
      singular values up to 1000 times the threshold (100 times with `"newton_schulz"`).
      It grows with the largest singular value and the square root of the side: with
      `"eigh"` it doubles for 1024 by 1024.

      With `"normalize"` and `"newton_schulz"`, singular values of at least 1e-3 of the
      largest become `max_value` to within 3e-5 of it, for a smaller side of up to 1024.
      Smaller ones grow less, those of 1e-5 to at least `0.02 * max_value`. Zeros
      become at most `2e-3 * max_value`. A matrix of zeros is unchanged.

    References:
      Jiang, Semenov and Stich, "Enhancing LLM Training via Spectral Clipping", 2026,
      arXiv:2603.14315, for the smooth cap.

      Amsel, Persson, Musco and Gower, "The Polar Express: Optimal Matrix Sign Methods
      and Their Application to the Muon Algorithm", 2025, arXiv:2505.16932, for
      orthogonalization.
    """
    return clip_by(
        tree, Named("max_value", max_value),
        over=singular_values(matrix_axes, method=method), response=response,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip
