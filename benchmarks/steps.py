"""Part `steps`: clip + AdamW or SGD, against the same step unclipped.

The gradients come as arguments, or are made in the step: there XLA holds them in a
buffer that the clip may overwrite, as after a backward pass.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import foreign, stepping, trees
from benchmarks.cases import Case, Options, Row
from benchmarks.oracle import SHARE
from benchmarks.timing import Contender, race

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-4),
    "sgd": lambda: optax.sgd(1e-4),
}


def cases(options: Options) -> Iterator[Case]:
    """A race for each optimizer, tree, dtype and source of gradients."""
    for workload in trees.workloads(options.small).values():
        for dtype in options.dtypes(workload):
            for optimizer in OPTIMIZERS if not options.small else ("adamw",):
                for source in ("arguments",) if workload.many else MADE:
                    labels = {
                        "optimizer": optimizer, "tree": workload.name, "dtype": dtype,
                        "gradients": source,
                    }  # fmt: skip
                    run = _case(workload, dtype, optimizer, source, options)
                    yield Case(labels, run, workload.title)


def passed(params: Any, gradients: Any, factor: jax.Array) -> Any:
    """Gradients that are arguments of the step."""
    return gradients


def made(params: Any, gradients: Any, factor: jax.Array) -> Any:
    """Gradients computed in the step, which XLA must hold in memory.

    A barrier is gone before XLA fuses, and so cheap a product would then be computed
    twice, as no real gradients are. The result of a branch is always held.
    """
    return jax.lax.cond(
        factor > 0,
        lambda: jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients),
        lambda: jax.tree.map(jnp.zeros_like, gradients),
    )


MADE: dict[str, stepping.Gradients] = {"arguments": passed, "made": made}


def _case(
    workload: trees.Workload, dtype: str, optimizer: str, source: str, options: Options
) -> Callable[[], dict[str, Row]]:
    """How to run one race."""

    def run() -> dict[str, Row]:
        arrays = trees.numbers(workload.shapes, dtype)
        limit = SHARE * trees.exact_norm(jax.tree.leaves(arrays))
        gradients = jax.device_put(arrays)
        shared = stepping.Shared(
            gradients, OPTIMIZERS[optimizer](), MADE[source], gradients, jnp.ones(())
        )
        clips = stepping.transformations(limit)
        if not workload.many:  # XLA would divide anew in the loop of each leaf
            clips["plain scale"] = stepping.least(limit)
        runners = {
            name: shared.contender(name, clip)
            for name, clip in clips.items()
            if name != "optax" or options.quick(workload)
        }
        refused: dict[str, Row] = {}
        if optimizer == "adamw" and source == "arguments" and find_spec("torch"):
            try:
                runners.update(_torch_steps(jax.tree.leaves(arrays), limit))
            except Exception as error:  # which kind is up to the library
                refused["PyTorch"] = {"refuses": foreign.refusal(error)}
        rows = race(runners, options.rounds_for(workload))
        for row in rows.values():
            row["gradient_bytes"] = trees.nbytes(arrays)
        return {**rows, **refused}

    return run


def _torch_steps(arrays: foreign.Arrays, limit: float) -> dict[str, Contender]:
    """`clip_grad_norm_` and the fused AdamW of PyTorch, and this AdamW alone."""
    import torch

    parameters = [foreign.to_torch(array).requires_grad_() for array in arrays]
    source = [foreign.to_torch(array) for array in arrays]
    for parameter, gradient in zip(parameters, source, strict=True):
        parameter.grad = gradient.clone()
    adamw = torch.optim.AdamW(parameters, 1e-4, fused=True)

    def renew() -> None:
        foreign.torch_refill([p.grad for p in parameters], source)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        foreign.torch_wait(adamw.step())

    def unclipped() -> None:
        foreign.torch_wait(adamw.step())

    clipped()  # or the first call to make the moments would be the one that refuses
    return {
        "PyTorch": Contender(clipped, renew),
        "PyTorch, unclipped": Contender(unclipped, renew),
    }
