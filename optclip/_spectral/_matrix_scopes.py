"""Scope norms to matrices, or to each singular value."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .._arrays import _validate
from .._arrays._leaf import counted_from_zero
from .._arrays._types import KeyPath, LeafLike, Number
from .._clip import ActingScope, Action
from .._norms import Block, Measurement
from .._responses import BaseResponse
from .._scopes import PerLeaf
from ._singular_values import parts_of_singular_values

Method = Literal["eigh", "newton_schulz"]


@dataclasses.dataclass(frozen=True)
class Matrices(PerLeaf):
    """Measure one norm per matrix of each leaf. Use `matrices(...)`."""

    matrix_axes: tuple[int, ...]

    def block(self, path: KeyPath, leaf: LeafLike) -> Block | None:
        rank = len(getattr(leaf, "shape", ()))
        if rank < 2:
            return Block([leaf], (0,)) if rank else None
        axis = counted_from_zero(self.matrix_axes, leaf, path, "matrix_axes")
        return Block([leaf], axis)


@dataclasses.dataclass(frozen=True)
class SingularValues(Matrices, ActingScope):
    """Measure each singular value of each matrix. Use `singular_values(...)`."""

    method: Method = "eigh"

    def parts(
        self, norm: Measurement, response: BaseResponse, eps: Number
    ) -> tuple[Measurement, Action]:
        return parts_of_singular_values(self.method, norm, response, eps)


def matrices(matrix_axes: tuple[int, int] = (-2, -1)) -> Matrices:
    """Measure one norm per matrix.

    A leaf with more than two axes is a batch of matrices, a vector is one row, and
    scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.matrices(), norm="spectral")
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]

    Args:
      matrix_axes: The two axes of a matrix. Default: the last two, as for stacked
        kernels `(layers, inputs, outputs)`. With `(0, 2)` a kernel
        `(inputs, heads, features)` is one matrix per head.

    Returns:
      A scope for `clip_by(over=...)`. Its norms have the shape of the leaf with 1 at
      `matrix_axes`.
    """
    return Matrices(_two(matrix_axes))


def singular_values(
    matrix_axes: tuple[int, int] = (-2, -1), *, method: Method = "eigh"
) -> SingularValues:
    """Clip each singular value of each matrix separately.

    A leaf with more than two axes is a batch of matrices, a vector has one singular
    value, its L2 norm, and scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.singular_values())
      >>> kernel = jnp.array([[0.0, 4.0], [0.5, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.  1. ]
       [0.5 0. ]]

    Args:
      matrix_axes: The two axes of a matrix; others are batch axes. Default: the last
        two.
      method: `"eigh"` (default) or, for the responses `"hard"`, `"smooth"` and
        `"normalize"`, `"newton_schulz"`; see `optclip.clip_by_singular_value`.

    Returns:
      A scope for `clip_by(over=...)`. Its norms are `(..., p)`, the ascending singular
      values of each matrix; with `"newton_schulz"` `(..., 1)`, a bound on the largest.
    """
    _validate.choice("method", method, ("eigh", "newton_schulz"))
    return SingularValues(_two(matrix_axes), method)


def _two(axis: tuple[int, int]) -> tuple[int, ...]:
    wanted = "a tuple of two ints"
    advice = "Negative ones count from the end: pass (-2, -1) for the last two."
    axes = _validate.as_ints(axis) if isinstance(axis, tuple) else None
    if axes is None:
        raise TypeError(_validate.must_be("matrix_axes", wanted, axis, advice))
    _validate.require("matrix_axes", axis, len(axes) == 2, wanted, advice)
    return axes
