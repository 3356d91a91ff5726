"""The scopes of matrices: a norm for each of them, or for each singular value."""

import dataclasses
from typing import Literal

from optclip._arrays import _validate
from optclip._arrays._types import KeyPath, Leaf
from optclip.norms import Block
from optclip.scopes._interface import PerLeaf, counted_from_zero

Method = Literal["eigh", "newton_schulz"]


@dataclasses.dataclass(frozen=True)
class Matrices(PerLeaf):
    """One norm for each matrix of each leaf. Use `matrices(...)`."""

    matrix_axes: tuple[int, ...]

    def block(self, path: KeyPath, leaf: Leaf) -> Block | None:
        rank = len(getattr(leaf, "shape", ()))
        if rank < 2:
            return Block([leaf], (0,)) if rank else None
        axis = counted_from_zero(self.matrix_axes, leaf, path, "matrix_axes")
        return Block([leaf], axis)


@dataclasses.dataclass(frozen=True)
class SingularValues(Matrices):
    """Each singular value of each matrix. Use `singular_values(...)`."""

    method: Method = "eigh"


def matrices(matrix_axes: tuple[int, int] = (-2, -1)) -> Matrices:
    """The scope of one norm for each matrix.

    A leaf of more than two axes is a batch of matrices; a vector is one row; a scalar
    is left alone.

    Args:
      matrix_axes: the two axes of a matrix, of which negative ones count from the end.
        A kernel `(layers, inputs, outputs)` that is stacked for a scan over layers is a
        batch of matrices as it is; one `(inputs, heads, features)` is one matrix for
        each head with `(0, 2)`.

    Returns:
      A scope for `clip_by(over=...)`; its norms have the leaf's shape with 1 at
      `matrix_axes`.

    Raises:
      TypeError: `matrix_axes` is not a tuple of ints.
      ValueError: `matrix_axes` has not two entries; at `init` and `update`, a leaf of
        two or more axes lacks one of them.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.matrices(), norm="spectral")
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]
    """
    return Matrices(_two(matrix_axes))


def singular_values(
    matrix_axes: tuple[int, int] = (-2, -1), *, method: Method = "eigh"
) -> SingularValues:
    """The scope of each singular value of each matrix, clipped by itself.

    A leaf of more than two axes is a batch of matrices; a vector has one singular
    value, its norm; a scalar is left alone.

    Args:
      matrix_axes: the two axes of a matrix, of which negative ones count from the end.
      method: `"eigh"` decomposes the Gram matrix of the smaller side, for any response
        and rule; `"newton_schulz"` has matrix products alone, for `"hard"` and
        `"smooth"`. `optclip.clip_by_singular_value` says what each is good for.

    Returns:
      A scope for `clip_by(over=...)`; its norms are `(..., p)`, the singular values of
      each matrix in ascending order; with `"newton_schulz"` `(..., 1)`, a bound on the
      largest.

    Raises:
      TypeError: `matrix_axes` is not a tuple of ints.
      ValueError: `matrix_axes` has not two entries, or there is no such `method`; at
        `init` and `update`, a leaf of two or more axes lacks one of them.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.singular_values())
      >>> kernel = jnp.array([[0.0, 4.0], [0.5, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.  1. ]
       [0.5 0. ]]
    """
    _validate.choice("method", method, ("eigh", "newton_schulz"))
    return SingularValues(_two(matrix_axes), method)


def _two(axis: tuple[int, int]) -> tuple[int, ...]:
    wanted = "a tuple of two ints"
    advice = "Negative ones count from the end: give (-2, -1) for the last two."
    is_valid = isinstance(axis, tuple)
    if not is_valid or not all(type(a) is int for a in axis):
        raise TypeError(_validate.must_be("matrix_axes", wanted, axis, advice))
    if len(axis) != 2:
        raise ValueError(_validate.must_be("matrix_axes", wanted, axis, advice))
    return axis
