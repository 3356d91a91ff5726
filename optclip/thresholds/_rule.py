"""The protocol of rules: what a rule is shown, and what it returns."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from optclip._arrays._types import Number, NumberOrSchedule, PyTree


class Measure(Protocol):
    """Takes a tree like the updates, returns its norms over the same scope."""

    def __call__(self, tree: PyTree, /, *, guarded: bool = True) -> PyTree: ...


class Seen(NamedTuple):
    """What a rule may look at; what it does not use costs nothing under jit.

    Attributes:
      norm: the norms of the scope, finite: `()` for the tree; a tree or dict of them
        for leaves and groups; with 1 at reduced axes; the modulus for elements. A
        non-finite norm reads 0, and so does one below 2**-60.
      finite: a tree of bools like `norm`: which of them were finite.
      keep: takes a threshold, returns the norms that the response would leave.
      measure: takes a tree like the updates, returns its norms over the same scope;
        with `guarded=False` a norm reads inf where the sum of its squares overflows, at
        half the cost.
      params: as given to `update`, or None.
      step: int32, the number of updates before this one, non-finite ones too.
      extra: the extra keyword arguments of `update`, such as `value`.
      updates: what is clipped, as given to `update`.
    """

    norm: PyTree
    finite: PyTree
    keep: Callable[..., PyTree]
    measure: Measure
    params: PyTree
    step: jax.Array
    extra: dict[str, Any]
    updates: PyTree


@runtime_checkable
class Rule(Protocol):
    """How a threshold comes about.

    Example:
      A threshold of twice the mean of all norms so far, 1 on the first step:

      >>> import dataclasses, jax, jax.numpy as jnp, optclip
      >>> @dataclasses.dataclass(frozen=True)
      ... class TwiceTheMean:
      ...     def init(self, norm):  # An array; by leaf or group a tree of them.
      ...         return jax.tree.map(jnp.zeros_like, norm)
      ...     def update(self, seen, memory):
      ...         known, count = seen.step > 0, seen.step + 1
      ...         threshold = jax.tree.map(lambda m: jnp.where(known, 2 * m, 1), memory)
      ...         mean = lambda m, n: m + (n - m) / count
      ...         return threshold, jax.tree.map(mean, memory, seen.norm)
      >>> tx = optclip.clip_by_global_norm(TwiceTheMean())
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 2.0, 20.0):
      ...     clipped, state = tx.update(size * jnp.array([3.0, 4.0]), state)
      ...     print(clipped)
      [0.6 0.8]
      [6. 8.]
      [ 9. 12.]
    """

    def init(self, norm: PyTree, /) -> PyTree:
        """The memory before the first step, from norms of which only shapes count."""
        ...

    def update(self, seen: Seen, memory: PyTree, /) -> tuple[PyTree, PyTree]:
        """The threshold, shaped as the norms or broadcast to them, and new memory.

        The engine takes the new memory only if all norms that this rule saw are finite.
        """
        ...


def takes_vector(rule: object) -> bool:
    """Return whether a rule computes with all norms as one vector, in a `PerNorm`.

    A user's rule may read norms by their labels, so it receives a tree.
    """
    return bool(getattr(rule, "takes_vector", False))


Threshold = NumberOrSchedule | Rule
ThresholdTree = Threshold | PyTree


def like(value: Number, norm: jax.Array) -> jax.Array:
    """A hyperparameter, traced or not, in the dtype of the norms it goes with."""
    return jnp.asarray(value).astype(norm.dtype)
