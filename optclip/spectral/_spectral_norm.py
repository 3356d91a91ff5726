"""The spectral norm: the largest singular value of each matrix."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName
from optclip.norms._interface import (
    Block,
    Measured,
    Measurement,
    accumulator,
    declared_across,
    flush_small,
)
from optclip.spectral._matrix_blocks import (
    matrices_of,
    singular_values,
    with_vectors,
)
from optclip.spectral._power_iteration import iterated


@dataclasses.dataclass(frozen=True)
class Spectral(Measurement):
    r"""The spectral norm of a matrix, its largest singular value :math:`\sigma_1`.

    A vector is a matrix with one singular value, its L2 norm. `"spectral"` names it
    where a norm is asked for; give `over=optclip.matrices()` with it, or `"leaf"` where
    no leaf has more than two axes.

    Args:
      method: `"exact"` takes the largest eigenvalue of the Gram matrix of the smaller
        side, right to 1e-5; `"power_iteration"` starts from the singular vector of the
        step before and costs two products with a vector an iteration. What it finds is
        never above the norm; see `optclip.clip_by_spectral_norm`.
      steps: how many iterations `"power_iteration"` makes in each step.

    Raises:
      ValueError: there is no such method, or `steps` is below 1.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over="leaf", norm=optclip.norms.Spectral())
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]
    """

    method: Literal["exact", "power_iteration"] = "exact"
    steps: int = 1

    def __post_init__(self) -> None:
        _validate.choice("method", self.method, ("exact", "power_iteration"))
        _validate.length("steps", self.steps)

    @property
    def remembers(self) -> bool:
        """Whether it starts from the vectors of the step before."""
        return self.method == "power_iteration"

    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        axis_name: AxisName | None = None,
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the largest singular value of each matrix.

        The power iteration needs the memory of a step; without one, as for parameters,
        the norm is exact.
        """
        del guarded
        dtype = accumulator(
            [jnp.asarray(_leaves.unwrap(x)) for b in blocks for x in b.leaves]
        )
        vectors = list(memory)

        def of_matrix(i: int) -> jax.Array:
            if not vectors:
                matrices = matrices_of(blocks[i], dtype, axis_name)
                return _as_norm_of(blocks[i], singular_values(matrices)[..., -1:])
            matrices = matrices_of(blocks[i])
            if matrices.split:
                raise ValueError(
                    "A matrix must be whole on each device inside shard_map for"
                    f" method='power_iteration', got one that is split over"
                    f" {matrices.split}. Give method='exact', or clip it under jit."
                )
            norm, vectors[i] = iterated(matrices, vectors[i], self.steps)
            return _as_norm_of(blocks[i], norm)

        norms = with_vectors(blocks, of_matrix, axis_name)
        declared = tuple(map(declared_across, blocks))
        batched = Batched([norm.astype(dtype) for norm in norms], declared)
        if flushed:
            batched = batched.map(flush_small)
        return Measured(batched, vectors)

    def init(self, blocks: Sequence[Block]) -> list[jax.Array]:
        """Return a vector of zeros for each matrix."""
        if not self.remembers:
            return []
        # A sum, since on Explicit axes a split array cannot be sliced.
        return [jnp.zeros_like(jnp.sum(matrices_of(b).x, -1)) for b in blocks]


def _as_norm_of(block: Block, norm: jax.Array) -> jax.Array:
    """Reshape `(..., 1)` to the norm of a block: with the leaf's axes, or a scalar."""
    if block.axis is None:
        return norm.reshape(())
    return jnp.expand_dims(norm[..., 0], block.axis)
