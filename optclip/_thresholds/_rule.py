"""The protocol of threshold rules: their inputs and results.

Rules of this package describe themselves by more attributes, False where missing:
`is_stateless`, whether a rule depends neither on the step count nor on a memory;
`couples_norms`, whether the threshold of a norm depends on other norms of its leaf; and
`takes_vector`, see the function. They map functions over norms by `_batching.each`,
which compiles norms of one type together, and plain data by `jax.tree.map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard, runtime_checkable

import jax

from .._arrays._types import NumberOrSchedule, PyTree


class Seen(NamedTuple):
    """Describe a step to a rule; unused entries cost nothing under jit.

    Attributes:
      norm: Norms of the scope: a scalar for the tree; a tree or dict of scalars for
        leaves or groups; arrays with length 1 along reduced axes; or moduli of
        elements. Non-finite norms and norms below 2**-60 read 0.
      finite: Tree of bools like `norm`: whether each norm was finite.
      keep: Function from a threshold to the norms after clipping.
      measure: Function from a tree like the updates to its norms over the same scope.
      params: Parameters passed to `update`, or None.
      step: Number of earlier updates, non-finite ones included; int32.
      extra: Extra keyword arguments of `update`, such as `value`.
      updates: Updates to clip, as passed to `update`.
      includes_norm: Whether the norm of this step enters its own threshold; False in
        `skip`, whose rules answer before they learn.
    """

    norm: PyTree
    finite: PyTree
    keep: Callable[..., PyTree]
    measure: Callable[..., Any]
    params: PyTree
    step: jax.Array
    extra: dict[str, Any]
    updates: PyTree
    includes_norm: bool = True


@runtime_checkable
class Rule(Protocol):
    """Compute the threshold of each step; the protocol of user-defined rules.

    Example:
      A threshold of twice the mean of all norms so far, 1 on the first step:

      >>> import dataclasses, jax, jax.numpy as jnp, optclip
      >>> @dataclasses.dataclass(frozen=True)
      ... class TwiceTheMean:
      ...     def init(self, norm):  # An array; per leaf or group, a tree of them.
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
        """Return the memory before the first step, from the shapes of the norms.

        Arrays of a norm's entry begin with its axes; others, such as a window, follow.
        """
        ...

    def update(self, seen: Seen, memory: PyTree, /) -> tuple[PyTree, PyTree]:
        """Return the threshold, which must broadcast to the norms, and the new memory.

        Norms that are not finite keep their entries of the memory. The parts of the
        memory without an entry per norm change if any norm is finite. If the rule has
        the attribute `learns_from_zeros = False`, zero norms keep their entries too.
        A rule that learns before it answers may read `seen.includes_norm`.
        """
        ...


def is_rule(value: object) -> TypeGuard[Rule]:
    """Return whether `value` is a rule; an optimizer, with the same methods, is not."""
    is_other = isinstance(value, type) or is_transformation(value)
    return isinstance(value, Rule) and not is_other


def is_transformation(value: object) -> bool:
    """Return whether `value` is an optax transformation."""
    # The class is compared by name, since optax is not imported below `_transforms`.
    return any(c.__name__ == "GradientTransformation" for c in type(value).__mro__)


def takes_vector(rule: object) -> bool:
    """Return whether a rule computes with all norms as one vector, in a `PerNorm`.

    A user's rule may read norms by their labels, so it receives a tree.
    """
    return bool(getattr(rule, "takes_vector", False))


def learns_from_zeros(rule: object) -> bool:
    """Return whether a rule learns from norms of 0."""
    return bool(getattr(rule, "learns_from_zeros", True))


class OfVector:
    """Compute with all norms as one vector, see `takes_vector`."""

    takes_vector: ClassVar[bool] = True


class OfPositive(OfVector):
    """Learn from norms above 0 only, as one vector."""

    learns_from_zeros: ClassVar[bool] = False


class WithoutMemory:
    """Initialize a rule that has no memory."""

    def init(self, norm: PyTree) -> tuple[()]:
        return ()


@dataclasses.dataclass(frozen=True)
class RuleOfRule:
    """Forward the attributes of the wrapped rule."""

    rule: Rule

    takes_vector: ClassVar[Any] = property(lambda self: takes_vector(self.rule))
    learns_from_zeros: ClassVar[Any] = property(
        lambda self: learns_from_zeros(self.rule)
    )
    couples_norms: ClassVar[Any] = property(
        lambda self: getattr(self.rule, "couples_norms", False)
    )
    is_stateless: ClassVar[Any] = property(
        lambda self: getattr(self.rule, "is_stateless", False)
    )

    def init(self, norm: PyTree) -> PyTree:
        return self.rule.init(norm)


Threshold = NumberOrSchedule | Rule
"""A threshold, which is a number, an optax schedule or a `Rule`."""

ThresholdTree = Threshold | PyTree
"""A threshold, or a prefix tree of thresholds with None for unclipped."""
