"""The clips of matrices: by the largest singular value, and each of them."""

from __future__ import annotations

from typing import Literal

import optax

from optclip.responses._interface import ResponseLike
from optclip.spectral._matrix_scopes import Method, matrices, singular_values
from optclip.spectral._spectral_norm import Spectral
from optclip.thresholds._interface import Named
from optclip.transforms._interface import checks_positions, clip_by
from optclip.typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    Record,
    ThresholdTree,
)


@checks_positions()
def clip_by_spectral_norm(
    max_norm: ThresholdTree,
    *,
    matrix_axes: tuple[int, int] = (-2, -1),
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
    r"""Scale each matrix by its spectral norm, :math:`x \min(1, c / \sigma_1)`.

    Args:
      max_norm: the largest spectral norm that is let through, c in the formula: a
        number, an optax schedule, a rule of `optclip.thresholds`, or a prefix tree of
        these with None for what is not clipped. 0 clips to zero; inf measures and clips
        nothing.
      matrix_axes: the two axes of a matrix, of which negative ones count from the end;
        a leaf with more of them is a batch of matrices. A vector is a matrix with one
        singular value, its L2 norm; scalars are left alone.
      method: how :math:`\sigma_1` is found: `"exact"` from the Gram matrix of the
        smaller side, right to 1e-5, or `"power_iteration"`, which starts from what it
        found the step before and keeps that in its state.
      steps: how many iterations `"power_iteration"` makes in each step; None is one.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the updates, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over inside `shard_map`, a
        `PartitionSpec` or a tree of these; None reads them off the type of each leaf,
        where it says enough. A matrix may be split on one of its sides.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it for each leaf. False keeps nothing of it.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation.

      With `"power_iteration"` the norm s that is found is never above
      :math:`\sigma_1`, so that a matrix may be clipped too little. It is at least
      :math:`\sigma_1 (\cos\theta)^{1/(2k+1)}` after k iterations from a vector at an
      angle :math:`\theta` to the first singular vector, whatever the gap to the second;
      and never below the norm of the largest row of the smaller side, so that a spike
      in a new direction is seen in the step that brings it.

    Raises:
      ValueError: a concrete `max_norm` is negative or NaN; there is no such `method`;
        at `init` and `update`, a leaf lacks `matrix_axes`, or a tree of thresholds or a
        mask does not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_spectral_norm(1.0)
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]

    Source: Kuczynski and Wozniakowski, *Estimating the Largest Eigenvalue by the Power
    and Lanczos Algorithms with a Random Start*, 1992, for iterations without a gap.
    """
    norm = Spectral(method=method, steps=1 if steps is None else steps)
    return clip_by(
        Named("max_norm", max_norm, "clip_by_spectral_norm"),
        over=matrices(matrix_axes), norm=norm, response=response, eps=eps,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name, record=record, name=name,
    )  # fmt: skip


@checks_positions()
def clip_by_singular_value(
    max_value: ThresholdTree,
    *,
    response: ResponseLike | Literal["soft"] = "hard",
    matrix_axes: tuple[int, int] = (-2, -1),
    method: Method = "eigh",
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Cap each singular value of each matrix, :math:`u \min(\sigma, c)\, v^*`.

    Args:
      max_value: the largest singular value that is let through, c in the formula: a
        number, an optax schedule, a rule of `optclip.thresholds`, or a prefix tree of
        these with None for what is not clipped. 0 clips to zero; inf measures and clips
        nothing.
      response: what happens to a singular value: `"hard"` caps it at c; `"soft"`, which
        is `"smooth"`, makes it :math:`\sigma / \sqrt{1 + (\sigma / c)^2}`, as SPECTRA
        does; with `"eigh"` any other of `optclip.responses` that looks at one at a
        time and makes none larger.
      matrix_axes: the two axes of a matrix, of which negative ones count from the end;
        a leaf with more of them is a batch of matrices. A vector is a matrix with one
        singular value, its L2 norm; scalars are left alone.
      method: `"eigh"` decomposes the Gram matrix of the smaller side. `"newton_schulz"`
        has matrix products alone, about 65 of the smaller side, which accelerators
        prefer to a decomposition; for `"hard"` and `"soft"`.
      nonfinite: what a NaN or an inf does: `"propagate"` makes its matrix NaN; `"zero"`
        makes its matrix zero; `"raise"` raises an error under `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the updates, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over inside `shard_map`, a
        `PartitionSpec` or a tree of these; None reads them off the type of each leaf,
        where it says enough. A matrix may be split on one of its sides.
      record: whether the state keeps what happened, for `optclip.metrics`; `"leaves"`
        keeps it for each leaf. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation. A matrix without a singular value above c is kept to the bit by
      `"hard"` with `"eigh"`; with `"newton_schulz"` one whose Frobenius norm is at most
      c (1 - 1e-6) is. What is recorded are the singular values; with `"newton_schulz"`
      a bound on the largest of each matrix, which is above it by up to the fourth root
      of the smaller side, so that steps count as clipped in which nothing was.

      In float32 the result has singular values of at most c (1 + 1e-5). Its difference
      from the exact cap is at most 1e-4 of the cap in the Frobenius norm and 2e-4 c in
      the spectral norm, for sides up to 128 and a largest singular value up to 1000 c
      with `"eigh"`, 100 c with `"newton_schulz"`. Beyond, it grows with the largest,
      of which float32 rounds 6e-8 away, and with the root of the side: with `"eigh"`
      about 2e-4 and 4e-4 c for 1024 by 1024.

    Raises:
      ValueError: a concrete `max_value` is negative or NaN; there is no such `method`,
        or it does not know the response; at `init` and `update`, a leaf lacks
        `matrix_axes`, or a tree of thresholds or a mask does not match.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_singular_value(1.0)
      >>> kernel = jnp.array([[0.0, 4.0], [0.5, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.  1. ]
       [0.5 0. ]]

    Source: Jiang, Semenov and Stich, *Enhancing LLM Training via Spectral Clipping*,
    2026, arXiv:2603.14315, for the soft cap.
    """
    return clip_by(
        Named("max_value", max_value, "clip_by_singular_value"),
        over=singular_values(matrix_axes, method=method),
        response="smooth" if response == "soft" else response,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name, record=record, name=name,
    )  # fmt: skip
