"""Measure the spectral norm: the largest singular value of each matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from .._arrays import _validate
from .._arrays._batching import Batched
from .._norms import (
    Block,
    Measured,
    Measurement,
    accumulator,
    declared_of,
    flush_small,
)
from ._matrix_blocks import (
    matrices_of,
    singular_values,
    with_vectors,
)
from ._power_iteration import iterated


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
        del guarded
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
        declared = tuple(map(declared_of, blocks))
        batched = Batched([norm.astype(dtype) for norm in norms], declared)
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
