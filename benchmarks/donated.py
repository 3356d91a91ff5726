"""Clips compiled ahead of time, run on one set of donated buffers.

All contenders of a race take the same buffers and give them back, because the speed of
memory depends on the pages that a buffer happens to lie on. They are filled again, in
place and untimed, before each call: every clip is of the same numbers.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from benchmarks.timing import Contender

Tree = Any
Given = TypeVar("Given")
Made = TypeVar("Made")


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
    """An executable, and the memory that XLA plans for it and moves."""
    executable = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    memory, cost = executable.memory_analysis(), executable.cost_analysis()
    return executable, {
        "temporary MB": memory.temp_size_in_bytes / 1e6 if memory else None,
        # The compilers of some devices estimate nothing.
        "accessed MB": cost["bytes accessed"] / 1e6
        if cost and "bytes accessed" in cost
        else None,
    }


def compiled_together(
    make: Callable[[Given], Made], given: Mapping[str, Given]
) -> dict[str, Made]:
    """Call `make`, which compiles, for each: first for one, then for all in parallel.

    XLA times matrix products to choose their kernels while it compiles. The others then
    read the choices of the first, and so differ from it in the clipping only.
    """
    first, *rest = given
    done = {first: make(given[first])}
    with ThreadPoolExecutor() as pool:
        return done | dict(
            zip(rest, pool.map(make, [given[name] for name in rest]), strict=True)
        )
