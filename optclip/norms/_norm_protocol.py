"""Define the interface of norms."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import jax

from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName
from optclip.norms._block import Block


class Measured(NamedTuple):
    """Hold the norms of some blocks.

    Attributes:
      norms: One entry per block.
      memory: One array per block, from which the next measurement starts; empty if the
        norm has no memory.
      work: Other results for each block that the clipping action can use, such as a
        factorization of each matrix. Their type depends on the measurement.
    """

    norms: Batched
    memory: Sequence[jax.Array] = ()
    work: Sequence[object] = ()


class Measurement(abc.ABC):
    """Compute the norms of blocks.

    Attributes:
      is_entrywise: Whether rounding each element toward zero never increases the norm,
        which `strict` clipping relies on.
    """

    is_entrywise: bool = False

    @property
    def is_a_mean(self) -> bool:
        """Return whether the norm of leaves differs from the norm of their norms.

        It does if it is divided by a power of the number of elements. With
        `record="leaves"` the tree is then measured separately from its leaves.
        """
        return False

    @property
    def remembers(self) -> bool:
        """Return whether a measurement starts from the memory of the previous one."""
        return False

    @abc.abstractmethod
    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        axis_name: AxisName | None = None,
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the norm of each block.

        Unless `guarded`, a norm reads inf if the sum of its squares overflows. Unless
        `flushed`, a norm below 2**-60 is returned unchanged, for use in another norm.
        """

    def init(self, blocks: Sequence[Block]) -> Sequence[jax.Array]:
        """Return the memory before the first measurement."""
        del blocks
        return ()
