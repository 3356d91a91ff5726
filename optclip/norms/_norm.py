"""Which norm: `Norm` for those over elements, and what each kind of norm offers."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from optclip._arrays import _validate
from optclip._arrays._batching import Batched
from optclip._arrays._types import AxisName
from optclip.norms._block import Block
from optclip.norms._entrywise import entrywise_norms


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


@dataclasses.dataclass(frozen=True)
class Norm(Measurement):
    r"""An entrywise norm, :math:`(\sum_i |x_i|^p)^{1/p} / n^k` over n elements.

    Where a norm is asked for, a name or an order does: `"l1"`, `"l2"`, `"inf"`,
    `"rms"` (`Norm(2.0, 0.5)`), `"average"` (`Norm(2.0, 1.0)`), or p, any number.

    Args:
      ord: p, a Python number above 0, or inf for the largest modulus. Below 0.5
        norms grow as a high power of n and soon read inf.
      per_count: k; 0.5 makes an L2 norm the root mean square, 1 makes it TensorFlow's
        average norm. What is divided reads inf above the largest float.

    Raises:
      TypeError: `ord` is not a Python number, or `per_count` not a number.
      ValueError: `ord` is not above 0, or `per_count` is not from 0 to 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> tx = optclip.clip_by(1.0, norm=optclip.norms.Norm(3.0))
      >>> updates = jnp.array([3.0, 4.0, 5.0])
      >>> _, state = tx.update(updates, tx.init(updates))
      >>> print(optclip.metrics(state)["clip/norm"])
      6.0
    """

    ord: float = 2.0
    per_count: float = 0.0

    is_entrywise = True

    def __post_init__(self) -> None:
        wanted = "a Python number above 0, or inf for the largest absolute value"
        if isinstance(self.ord, bool) or not isinstance(self.ord, (int, float)):
            advice = f"None stands for 2. {_validate.static('ord')}"
            raise TypeError(_validate.must_be("ord", wanted, self.ord, advice))
        if not self.ord > 0 or _validate.is_beyond_floats(self.ord):
            raise ValueError(_validate.must_be("ord", wanted, self.ord))
        _validate.fraction("per_count", self.per_count)

    @property
    def is_a_mean(self) -> bool:
        """Whether the norm is divided by the number of elements."""
        return self.per_count > 0

    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        axis_name: AxisName | None = None,
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the norm of each block."""
        del memory
        norms = entrywise_norms(
            blocks, float(self.ord), self.per_count, axis_name,
            guarded=guarded, flushed=flushed,
        )  # fmt: skip
        return Measured(norms)


L1: Norm = Norm(1.0)
L2: Norm = Norm(2.0)
INF: Norm = Norm(math.inf)
RMS: Norm = Norm(2.0, per_count=0.5)
AVERAGE: Norm = Norm(2.0, per_count=1.0)


def of_order(ord: float | None) -> Norm:
    """The norm that an `ord=` argument names; None is 2."""
    return L2 if ord is None else Norm(ord)
