"""Scope norms to matrices, or to each singular value."""

from __future__ import annotations

import dataclasses
from types import EllipsisType
from typing import Any, Literal

from .._arrays import _leaves, _validate
from .._arrays._leaf import counted_from_zero
from .._arrays._types import KeyPath, LeafLike, Number
from .._clip import ActingScope, Action
from .._norms import Block, Measurement
from .._responses import BaseResponse
from .._scopes import PerLeaf
from ._matrix_blocks import FlattenedBlock, Sides
from ._singular_values import parts_of_singular_values

Method = Literal["eigh", "newton_schulz"]
Side = int | tuple[int, ...] | EllipsisType
MatrixAxes = tuple[Side, Side]
"""The axes of the rows and of the columns; `...` for all other axes."""


@dataclasses.dataclass(frozen=True)
class Matrices(PerLeaf):
    """Measure one norm per matrix of each leaf. Use `matrices(...)`."""

    matrix_axes: MatrixAxes

    def block(self, path: KeyPath, leaf: LeafLike) -> Block | None:
        rank = len(getattr(leaf, "shape", ()))
        if rank < 2:
            return Block([leaf], (0,)) if rank else None
        sides = self.sides(leaf, path)
        axis = tuple(sorted(sides[0] + sides[1]))
        if len(axis) == 2:
            return Block([leaf], axis)
        return FlattenedBlock([leaf], axis, sides=sides)

    def sides(self, leaf: LeafLike, path: KeyPath) -> Sides:
        """Return the axes of the rows and of the columns of a leaf, counted from 0.

        Raises:
          ValueError: The leaf lacks an axis, or an axis is repeated.
        """
        listed = [_validate.as_ints(side) or () for side in self.matrix_axes]
        name, passed = "matrix_axes", self.matrix_axes
        used = counted_from_zero((*listed[0], *listed[1]), leaf, path, name, passed)
        others = tuple(a for a in range(leaf.ndim) if a not in used)
        rows, columns = (
            tuple(sorted(a % leaf.ndim for a in axes)) or others for axes in listed
        )
        if not (rows and columns):
            raise ValueError(
                f"`matrix_axes` must leave an axis for ..., got {passed} for"
                f" {_leaves.named(path)} of shape {leaf.shape}. Exclude such leaves"
                " with mask=."
            )
        return rows, columns


@dataclasses.dataclass(frozen=True)
class SingularValues(Matrices, ActingScope):
    """Measure each singular value of each matrix. Use `singular_values(...)`."""

    method: Method = "eigh"

    def parts(
        self, norm: Measurement, response: BaseResponse, eps: Number
    ) -> tuple[Measurement, Action]:
        return parts_of_singular_values(self.method, norm, response, eps)


def matrices(matrix_axes: MatrixAxes = (-2, -1)) -> Matrices:
    """Measure one norm per matrix.

    Axes that `matrix_axes` does not name are batch axes, a vector is one row, and
    scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.matrices(), norm="spectral")
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]

    Args:
      matrix_axes: Axes of the rows and of the columns; several are flattened. Default:
        the last two, as for stacked kernels `(layers, inputs, outputs)`. With
        `(..., -1)` all axes but the last are rows: a convolution kernel is the matrix
        `(height * width * inputs, outputs)`, and a dense kernel itself. With `(0, 2)` a
        kernel `(inputs, heads, features)` is one matrix per head, with `(0, (1, 2))`
        one matrix.

    Returns:
      A scope for `clip_by(over=...)`. Its norms have the shape of the leaf with 1 at
      `matrix_axes`.
    """
    return Matrices(_as_sides(matrix_axes))


def singular_values(
    matrix_axes: MatrixAxes = (-2, -1), *, method: Method = "eigh"
) -> SingularValues:
    """Clip each singular value of each matrix separately.

    Axes that `matrix_axes` does not name are batch axes, a vector has one singular
    value, its L2 norm, and scalars are unchanged.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.singular_values())
      >>> kernel = jnp.array([[0.0, 4.0], [0.5, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.  1. ]
       [0.5 0. ]]

    Args:
      matrix_axes: Axes of the rows and of the columns, as in `optclip.matrices`.
        Default: the last two.
      method: `"eigh"` (default) or, for the responses `"hard"`, `"smooth"` and
        `"normalize"`, `"newton_schulz"`; see `optclip.clip_by_singular_value`.

    Returns:
      A scope for `clip_by(over=...)`. Its norms are `(..., p)`, the ascending singular
      values of each matrix; with `"newton_schulz"` `(..., 1)`, a bound on the largest.
    """
    _validate.choice("method", method, ("eigh", "newton_schulz"))
    return SingularValues(_as_sides(matrix_axes), method)


def _as_sides(passed: Any) -> MatrixAxes:
    wanted = "a tuple of rows and columns, each an int, a tuple of ints or ..."
    advice = (
        "Negative ones count from the end: pass (-2, -1) for the last two axes, or"
        " (..., -1) to flatten all but the last."
    )
    entries = passed if isinstance(passed, tuple) else (None,)
    sides = [side for x in entries if (side := _as_side(x)) is not None]
    _validate.require(
        "matrix_axes", passed, len(sides) == len(entries), wanted, advice, TypeError
    )
    is_pair = len(sides) == 2 and sides != [..., ...]
    _validate.require("matrix_axes", passed, is_pair, wanted, advice)
    return sides[0], sides[1]


def _as_side(side: Any) -> Side | None:
    """Return an int, several ints as a tuple or `...`, None for other values."""
    if side is ...:
        return ...
    axes = _validate.as_ints(side) or None
    return axes[0] if axes is not None and len(axes) == 1 else axes
