"""Executables compiled ahead of time, run on one set of donated buffers.

All contenders of a race take over the same buffers and give them back, because the
speed of memory depends on the pages that a buffer happens to lie on. They are filled
again, in place and untimed, before each call: every clip is of the same numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import Contender

Tree = Any
Inspect = Callable[[Any], dict[str, Any]]


class Held:
    """A tree on the device that a train step would donate."""

    def __init__(self, source: Tree) -> None:
        self.source = jax.device_put(source)
        fill = jax.jit(_copied, donate_argnums=0, keep_unused=True)
        self.tree = jax.jit(_copied)(None, self.source)
        self._fill = fill.lower(self.tree, self.source).compile()

    def renew(self, source: Tree = None) -> None:
        """Fill the buffers with the numbers of the source, or of another one."""
        source = self.source if source is None else source
        self.tree = self._fill(self.tree, source)
        jax.block_until_ready(self.tree)

    def taking(
        self,
        function: Callable[..., Any],
        inspect: Inspect,
        *extra: Any,
        source: Tree = None,
    ) -> Contender:
        """A function from the tree (and a state) to the tree (and a state), donated."""
        source = jax.device_put(source)
        run, facts = compiled(function, self.tree, *extra, donate=range(1 + len(extra)))
        kept = extra

        def call() -> Any:
            nonlocal kept
            self.tree, *rest = jax.block_until_ready(run(self.tree, *kept))
            kept = tuple(rest) if kept else kept
            return rest

        return Contender(
            call, lambda: self.renew(source), lambda _: inspect(self.tree), facts
        )

    def reading(self, function: Callable[[Tree], Any], inspect: Inspect) -> Contender:
        """A function of the tree that leaves it as it is."""
        run, facts = compiled(function, self.tree)
        return Contender(
            lambda: jax.block_until_ready(run(self.tree)), self.renew, inspect, facts
        )


def _copied(into: Tree, source: Tree) -> Tree:
    """The numbers of the source, in the buffers of the tree that is donated."""
    return jax.tree.map(jnp.copy, source)


def compiled(
    function: Callable[..., Any], *arguments: Any, donate: Any = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """An executable, and what XLA says of it."""
    jitted = jax.jit(function, donate_argnums=tuple(donate))
    executable = jitted.lower(*arguments).compile()
    facts: dict[str, Any] = {}
    memory = executable.memory_analysis()
    if memory is not None:
        facts["temp_bytes"] = memory.temp_size_in_bytes
    text = executable.as_text() or ""
    facts["branches"] = text.count(" conditional(")
    if jax.default_backend() == "gpu":
        # Each fusion is a kernel; counted in the text, no profiler needed.
        facts["kernels"] = text.count(" fusion(")
    return executable, facts
