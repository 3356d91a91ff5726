"""Compile clipping transformations ahead of time and run them on donated buffers.

All contenders of a race share the same buffers, because the speed of memory depends on
the pages of a buffer. Before each call the buffers are refilled in place, untimed, so
that all contenders clip the same numbers.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from benchmarks.timing import Contender

Tree = Any
Source = TypeVar("Source")
Compiled = TypeVar("Compiled")


class DonatedTree:
    """Hold a tree on the device whose buffers each call donates."""

    def __init__(self, source: Tree) -> None:
        self._source = jax.device_put(source)
        self._tree = jax.jit(_copied)(None, self._source)
        fill = jax.jit(_copied, donate_argnums=0, keep_unused=True)
        self._fill = fill.lower(self._tree, self._source).compile()

    def clip(self, tx: Any, error: Callable[[Tree], float] | None = None) -> Contender:
        """Compile the update of a transformation; its state is donated too."""
        state = jax.jit(tx.init)(self._tree)
        run, facts = compiled(tx.update, self._tree, state, donate=(0, 1))

        def call() -> None:
            nonlocal state
            self._tree, state = jax.block_until_ready(run(self._tree, state))

        check = error and (lambda _: error(self._tree))
        return Contender(call, self._refill, check, facts)

    def _refill(self) -> None:
        self._tree = jax.block_until_ready(self._fill(self._tree, self._source))


def _copied(into: Tree, source: Tree) -> Tree:
    """Copy the source; XLA reuses the buffers of `into` if it is donated."""
    return jax.tree.map(jnp.copy, source)


def compiled(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the executable, its lines, and estimates of memory and traffic in MB."""
    executable = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    memory, cost = executable.memory_analysis(), executable.cost_analysis()
    return executable, {
        "lines": len((executable.as_text() or "").splitlines()),
        "temporary MB": memory.temp_size_in_bytes / 1e6 if memory else None,
        # Some backends return no estimate.
        "accessed MB": cost["bytes accessed"] / 1e6
        if cost and "bytes accessed" in cost
        else None,
    }


def compiled_together(
    compile_one: Callable[[Source], Compiled], sources: Mapping[str, Source]
) -> dict[str, Compiled]:
    """Compile the first source, then all others in parallel.

    While XLA compiles, it times matrix products to choose their kernels. The others
    read the choices of the first, so all programs differ only in the clipping.
    """
    first, *others = sources
    compiled = {first: compile_one(sources[first])}
    with ThreadPoolExecutor() as pool:
        programs = pool.map(compile_one, [sources[name] for name in others])
        return compiled | dict(zip(others, programs, strict=True))
