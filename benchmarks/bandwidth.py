"""Part `cpp`: what the memory can do, by loops of C speed and by the device itself."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trees
from benchmarks.cases import Case, Options, Row
from benchmarks.held import compiled
from benchmarks.timing import Contender, race


def cases(options: Options) -> Iterator[Case]:
    """NumPy's read and scale of the GPT-2 tree, and a donated copy of a large array."""
    workload = trees.workloads(options.small)["gpt2"]
    labels = {"what": "read-and-scale", "tree": "gpt2", "dtype": "f32"}
    yield Case(labels, _numpy_case(workload, options), workload.title)
    elements = 1 << (18 if options.small else 30 if _on_gpu() else 27)
    title = f"{elements * 4 / 2**20:,.0f} MiB"
    yield Case({"what": "copy"}, _copy_case(elements, options), title)


def _on_gpu() -> bool:
    """Whether arrays live on a GPU, which has room and needs size to be busy."""
    return jax.default_backend() == "gpu"


def _numpy_case(
    workload: trees.Workload, options: Options
) -> Callable[[], dict[str, Row]]:
    """How to run NumPy's two passes, each a compiled loop without a temporary."""

    def run() -> dict[str, Row]:
        tree = trees.numbers(workload.shapes, "f32")
        arrays = [x.reshape(-1) for x in jax.tree.leaves(tree)]
        factors = itertools.cycle((np.float32(0.5), np.float32(2)))  # none vanishes

        def read() -> Any:
            return sum(float(np.dot(x, x)) for x in arrays)

        def scale() -> None:
            factor = next(factors)
            for x in arrays:
                np.multiply(x, factor, out=x)

        rows = race(
            {"read": Contender(read), "scale": Contender(scale)}, options.rounds
        )
        for row in rows.values():
            row["gradient_bytes"] = trees.nbytes(tree)
        return rows

    return run


def _copy_case(elements: int, options: Options) -> Callable[[], dict[str, Row]]:
    """How to run `x + 1` in place, which reads and writes each byte once."""

    def run() -> dict[str, Row]:
        x = jnp.zeros(elements)
        step, facts = compiled(lambda x: (x + 1,), x, donate=(0,))

        def call() -> None:
            nonlocal x
            (x,) = jax.block_until_ready(step(x))

        rows = race({"x + 1": Contender(call, facts=facts)}, options.rounds)
        rows["x + 1"]["moved_bytes"] = 2 * 4 * elements
        return rows

    return run
