"""Clips compiled ahead of time, run on one set of donated buffers.

All contenders of a race take the same buffers and give them back, because the speed of
memory depends on the pages that a buffer happens to lie on. They are filled again, in
place and untimed, before each call: every clip is of the same numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import Contender

Tree = Any


class Donated:
    """A tree on the device that a train step would donate."""

    def __init__(self, source: Tree) -> None:
        self._source = jax.device_put(source)
        self._tree = jax.jit(_copied)(None, self._source)
        fill = jax.jit(_copied, donate_argnums=0, keep_unused=True)
        self._fill = fill.lower(self._tree, self._source).compile()

    def clip(self, tx: Any, error: Callable[[Tree], float]) -> Contender:
        """The update of a transformation, its state donated too."""
        state = jax.jit(tx.init)(self._tree)
        run, facts = compiled(tx.update, self._tree, state, donate=(0, 1))

        def call() -> None:
            nonlocal state
            self._tree, state = jax.block_until_ready(run(self._tree, state))

        return Contender(call, self._refill, lambda _: error(self._tree), facts)

    def _refill(self) -> None:
        self._tree = jax.block_until_ready(self._fill(self._tree, self._source))


def _copied(into: Tree, source: Tree) -> Tree:
    """The numbers of the source, in the buffers of the tree that is donated."""
    return jax.tree.map(jnp.copy, source)


def compiled(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """An executable, and what memory XLA says it needs and moves."""
    executable = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    memory, cost = executable.memory_analysis(), executable.cost_analysis()
    return executable, {
        "temporary MB": memory.temp_size_in_bytes / 1e6 if memory else None,
        "accessed MB": cost["bytes accessed"] / 1e6 if cost else None,
    }
