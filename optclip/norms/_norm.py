"""Which norm, and of what: `Norm` and `Block`."""

import dataclasses
import math
from collections.abc import Sequence

from optclip._arrays import _validate
from optclip._arrays._types import Leaf


@dataclasses.dataclass(frozen=True)
class Norm:
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

    def __post_init__(self) -> None:
        wanted = "a Python number above 0, or inf for the largest absolute value"
        if isinstance(self.ord, bool) or not isinstance(self.ord, (int, float)):
            advice = f"None stands for 2. {_validate.static('ord')}"
            raise TypeError(_validate.must_be("ord", wanted, self.ord, advice))
        if not self.ord > 0 or _validate.is_beyond_floats(self.ord):
            raise ValueError(_validate.must_be("ord", wanted, self.ord))
        _validate.fraction("per_count", self.per_count)


L1: Norm = Norm(1.0)
L2: Norm = Norm(2.0)
INF: Norm = Norm(math.inf)
RMS: Norm = Norm(2.0, per_count=0.5)
AVERAGE: Norm = Norm(2.0, per_count=1.0)


def of_order(ord: float | None) -> Norm:
    """The norm that an `ord=` argument names; None is 2."""
    return L2 if ord is None else Norm(ord)


@dataclasses.dataclass(frozen=True)
class Block:
    """The leaves, or with `axis` the slices of one leaf, that share a norm.

    Args:
      leaves: arrays or BCOO matrices.
      axis: None for one norm over all elements of all leaves; else the axes that each
        norm of the single leaf is taken over, counted from 0 (`()`: each element).
    """

    leaves: Sequence[Leaf]
    axis: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        advice = "One leaf goes in a list too."
        _validate.kind("leaves", self.leaves, (list, tuple), "a list of arrays", advice)
        if self.axis is None:
            return
        is_valid = isinstance(self.axis, tuple) and len(self.leaves) == 1
        if not is_valid or not all(type(a) is int and a >= 0 for a in self.axis):
            wanted = "None, or with a single leaf a tuple of ints counted from 0"
            advice = f"Leaves in the block: {len(self.leaves)}."
            raise TypeError(_validate.must_be("axis", wanted, self.axis, advice))
