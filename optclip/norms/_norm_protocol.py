"""What each kind of norm offers to a clip."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName
from optclip.norms._block import Block


class Measured(NamedTuple):
    """The norms of some blocks.

    Attributes:
      norms: one entry per block.
      memory: one array per block, from which the next measurement starts; empty if the
        norm remembers nothing.
      work: what else was computed for each block and the clipping action can use, such
        as a factorization of each matrix.
    """

    norms: Batched
    memory: Sequence[jax.Array] = ()
    work: Sequence[Any] = ()  # Each measurement has a type of its own, or none.


class Measurement(abc.ABC):
    """How the norms of blocks are computed.

    Attributes:
      is_entrywise: whether rounding each element toward zero never increases the norm,
        which `strict` clipping relies on.
    """

    is_entrywise: bool = False

    @property
    def is_a_mean(self) -> bool:
        """Whether the norm is divided by the number of elements.

        Then the norm of some blocks together is not the norm of their norms.
        """
        return False

    @property
    def remembers(self) -> bool:
        """Whether a measurement starts from the memory of the one before."""
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

        Unless `guarded`, a norm reads inf where the sum of its squares overflows.
        Unless `flushed`, a norm below 2**-60 is returned as it is, since it will be
        part of another.
        """

    def init(self, blocks: Sequence[Block]) -> Sequence[jax.Array]:
        """Return the memory before the first measurement."""
        del blocks
        return ()
