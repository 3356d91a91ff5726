"""Measure the spectral norm: the largest singular value of each matrix.

A power iteration estimates it by a few products with a vector from the previous step.
After k iterations from a unit vector at an angle t to the first singular vector, the
estimate s satisfies `sigma * cos(t) ** (1 / (2 k + 1)) <= s <= sigma`. This holds
because `s^2` is the quotient of the moments 2k + 1 and 2k of the eigenvalues of the
Gram matrix, weighted by the squares of the start. By Jensen's inequality it is at least
the root 2k + 1 of the former. No gap between singular values is required.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _placement, _validate
from .._arrays._batching import Batched
from .._arrays._numerics import root
from .._norms import (
    Block,
    Measured,
    Measurement,
    accumulator,
    declared_of,
    flush_small,
)
from ._matrix_algebra import adjoint, product, times
from ._matrix_blocks import (
    MatrixBlock,
    in_units,
    matrices_of,
    singular_values,
    with_vectors,
)


@dataclasses.dataclass(frozen=True)
class Spectral(Measurement):
    """Measure the spectral norm of each matrix: its largest singular value.

    The norm of a vector is its L2 norm. `"spectral"` is short for `Spectral()`. Use it
    with `over=optclip.matrices()`, or `"leaf"` if no leaf has more than two axes.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over="leaf", norm=optclip.norms.Spectral())
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]

    Args:
      method: `"exact"` (default, relative error at most 1e-5) or
        `"power_iteration"`; see `optclip.clip_by_spectral_norm`.
      steps: Number of power iterations per step. Default: 1.
    """

    method: Literal["exact", "power_iteration"] = "exact"
    steps: int = 1

    composes = True

    def __post_init__(self) -> None:
        _validate.choice("method", self.method, ("exact", "power_iteration"))
        object.__setattr__(self, "steps", _validate.length("steps", self.steps))
        # The power iteration starts from the vectors of the previous step.
        object.__setattr__(self, "remembers", self.method == "power_iteration")

    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the largest singular value of each matrix.

        The power iteration requires the memory of a step; without it, as for
        parameters, the norm is exact.
        """
        dtype = accumulator([jnp.asarray(x.array) for b in blocks for x in b.leaves])
        vectors = list(memory)

        def of_matrix(i: int) -> jax.Array:
            if not vectors:
                matrices = matrices_of(blocks[i], dtype)
                return _as_norm_of(blocks[i], singular_values(matrices)[..., -1:])
            matrices = matrices_of(blocks[i])
            if matrices.split:
                raise ValueError(
                    "method='power_iteration' requires whole matrices on each device"
                    f" inside shard_map, got one that is split over {matrices.split}."
                    " Pass method='exact', or clip it under jit."
                )
            norm, vectors[i] = iterated(matrices, vectors[i], self.steps)
            return _as_norm_of(blocks[i], norm)

        norms = with_vectors(blocks, of_matrix)
        batched = Batched(
            [norm.astype(dtype) for norm in norms], tuple(map(declared_of, blocks))
        )
        if flushed:
            batched = batched.map(flush_small)
        return Measured(batched, vectors)

    def init(self, blocks: Sequence[Block]) -> list[jax.Array]:
        """Return a vector of zeros for each matrix."""
        if not self.remembers:
            return []
        # A sum and not a slice, since arrays split on Explicit axes cannot be sliced.
        return [jnp.zeros_like(jnp.sum(matrices_of(b).x, -1)) for b in blocks]


def _as_norm_of(block: Block, norm: jax.Array) -> jax.Array:
    """Reshape `(..., 1)` to the norm of a block: with the leaf's axes, or a scalar."""
    if block.axis is None:
        return norm.reshape(())
    return jnp.expand_dims(norm[..., 0], block.axis)


def iterated(
    matrices: MatrixBlock, vectors: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Return the largest singular values, `(..., 1)`, and their vectors.

    `vectors` are the vectors of the smaller side from the previous step, `(..., p)`;
    zeros before the first step.
    """
    x = matrices.x
    if not x.shape[-2]:
        return jnp.zeros_like(matrices.size[..., 0]), vectors

    start = _start(lax.stop_gradient(x), lax.stop_gradient(vectors))
    start = _placement.placed_as(start, vectors)
    u = _turned(x, start[..., None], steps)
    image = product(adjoint(x), u)
    squares = jnp.sum(jnp.real(image * jnp.conj(image)), (-2, -1))[..., None]
    return in_units(matrices, root(squares)), u[..., 0].astype(vectors.dtype)


# The function is compiled, since an eager call would compile the loop each time.
@functools.partial(jax.jit, static_argnums=2)
def _turned(x: jax.Array, start: jax.Array, steps: int) -> jax.Array:
    """Return the unit vectors after `steps` iterations."""

    def step(_: int, u: jax.Array) -> jax.Array:
        longer = product(x, product(adjoint(x), u))
        squares = jnp.sum(jnp.real(longer * jnp.conj(longer)), -2, keepdims=True)
        # The root and the quotient have no finite derivative at 0; 1 replaces it. A
        # matrix of zeros keeps the previous vector.
        live = squares > 0
        size = jnp.sqrt(jnp.where(live, squares, jnp.ones_like(squares)))
        return _placement.placed_as(jnp.where(live, times(1 / size, longer), u), u)

    return lax.fori_loop(0, steps, step, start)


def _start(x: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return the previous vectors, or the largest row where its estimate is larger.

    The row detects a spike in a direction orthogonal to the previous vector.
    """
    rows = jnp.sum(jnp.real(x * jnp.conj(x)), -1)
    before = product(adjoint(x), vectors[..., None].astype(x.dtype))
    square_before = jnp.sum(jnp.real(before * jnp.conj(before)), (-2, -1))
    largest = jax.nn.one_hot(jnp.argmax(rows, -1), x.shape[-2], dtype=x.dtype)
    is_new = (jnp.max(rows, -1, initial=0) > square_before)[..., None]
    return jnp.where(is_new, largest, vectors.astype(x.dtype))
