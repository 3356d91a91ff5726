"""Share norms that a wrapper has measured with the clipping inside it.

A context variable holds them while the inner transformation runs. As an extra argument
of `update` they would reach every transformation inside: one that names its arguments
raises on another one, and one that is compiled receives new arrays, of which nothing
shows that they are those that were measured.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from .._arrays._batching import Batched
from .._arrays._leaf import Leaf
from .._arrays._types import PyTree
from .._clip import Decision, layout_of
from .._norms import BY_NAME, Block, Measured, Measurement
from .._scopes import LEAF


class _Known(NamedTuple):
    """Hold the norms of blocks of certain arrays."""

    norm: Measurement
    blocks: Sequence[Block]
    flushed: bool
    norms: Batched

    def answers(
        self, norm: Measurement, blocks: Sequence[Block], flushed: bool
    ) -> bool:
        """Return whether these are the norms of such blocks of the same arrays."""
        ours = self.norm, self.flushed, len(self.blocks)
        is_alike = (norm, flushed, len(blocks)) == ours
        return is_alike and all(map(_are_same, blocks, self.blocks))


_KNOWN: contextvars.ContextVar[tuple[_Known, ...]]
_KNOWN = contextvars.ContextVar("known", default=())


@contextlib.contextmanager
def sharing_norms(
    decision: Decision, tree: PyTree, adapted: Callable[[Batched], Batched]
) -> Iterator[None]:
    """Let clipping of exactly the leaves of `tree` use the norms of a decision.

    Args:
      decision: Of a tree of the same structure.
      tree: The updates that the inner transformation receives.
      adapted: Returns norms of `tree` from those of the decision.
    """
    clip, known = decision.clip, []
    # A user's norm may hold arrays, which have derivatives and no single equality. What
    # else a measurement returns, such as a factorization, is not shared.
    is_own = type(clip.norm) in [type(norm) for norm in BY_NAME.values()]
    if is_own and not (clip.norm.remembers or decision.work):
        wanted = [(clip, decision.norms, True)]
        if decision.leaf_norms is not None:
            each = dataclasses.replace(clip, scope=LEAF)
            wanted.append((each, decision.leaf_norms.norms, False))
        for of, norms, flushed in wanted:
            blocks = layout_of(of, tree).blocks
            found = _Known(clip.norm, blocks, flushed, adapted(norms))
            known.append(found._replace(norms=_differentiable(found)))
    token = _KNOWN.set((*_KNOWN.get(), *known))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def measured(
    norm: Measurement,
    blocks: Sequence[Block],
    memory: Sequence[jax.Array] = (),
    *,
    flushed: bool = True,
) -> Measured:
    """Return the norms of these blocks, those that are known without measuring."""
    for known in _KNOWN.get():
        if known.answers(norm, blocks, flushed):
            return Measured(known.norms)
    return norm.measure(blocks, memory, flushed=flushed)


def _are_same(a: Block, b: Block) -> bool:
    """Return whether two blocks have the same arrays, measured along the same axes."""
    if (a.axis, a.stacked, len(a.leaves)) != (b.axis, b.stacked, len(b.leaves)):
        return False
    return all(
        x.value is y.value and x.axis_name == y.axis_name
        for x, y in zip(a.leaves, b.leaves, strict=True)
    )


def _differentiable(known: _Known) -> Batched:
    """Return the norms, with the derivative of measuring these blocks.

    Their own derivative is that of the updates before, NaN in a step with a NaN.
    """

    def measure(arrays: list[list[jax.Array]]) -> Batched:
        pairs = zip(known.blocks, arrays, strict=True)
        blocks = [_with_arrays(*pair) for pair in pairs]
        return known.norm.measure(blocks, flushed=known.flushed).norms

    @jax.custom_jvp
    def shared(norms: Batched, arrays: list[list[jax.Array]]) -> Batched:
        return norms

    @shared.defjvp
    def shared_jvp(primals, tangents):
        norms, arrays = primals
        return norms, jax.jvp(measure, (arrays,), tangents[1:])[1]

    arrays = [[leaf.value for leaf in block.leaves] for block in known.blocks]
    return shared(known.norms, arrays)


def _with_arrays(block: Block, arrays: list[jax.Array]) -> Block:
    pairs = zip(block.leaves, arrays, strict=True)
    leaves = [Leaf.of(array, leaf.path, leaf.axis_name) for leaf, array in pairs]
    return dataclasses.replace(block, leaves=leaves)
