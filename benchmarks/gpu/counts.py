"""Part `counts`: kernels, graph nodes to update and memory of compiled programs.

Without a GPU they are compiled for an H100, if the compiler for it is installed.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks import step, stepping, trees
from benchmarks.donated_buffers import compiled_together
from benchmarks.gpu import launches, models, nodes, target
from benchmarks.timing import Row
from optclip import recipes

Compile = Callable[[Any, Any], target.Program]


def rows(tiny: bool) -> Iterator[Row]:
    try:
        _, device = target.place()
    except RuntimeError as error:
        yield {"note": str(error)}
        return
    for dtype in models.dtypes(tiny):
        tree = trees.typed(trees.workloads(tiny)["gpt2"], dtype)
        for name, (compile_one, more) in PROGRAMS.items():
            programs = compiled_together(
                lambda tx, tree=tree, one=compile_one: one(tx, tree), more | clips()
            )
            for contender, program in programs.items():
                row = {"program": name, "contender": contender, "dtype": dtype}
                yield row | counted(program) | {"device": device}


def counted(program: target.Program) -> Row:
    kinds = launches.launched(program.text)
    return {
        "kernels": kinds.total(),
        "graph nodes to update": nodes.updated(program.text, program.buffers),
        "temporary kB": program.temporaries / 1e3,
        "branches and loops": len(
            re.findall(r" (?:conditional|while)\(", program.text)
        ),
        "kinds": ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()),
    }


def clips() -> dict[str, Any]:
    tree = optclip.clip_by_global_norm
    return {
        "optclip, global norm": tree(1.0),
        "optclip, global norm, no record": tree(1.0, record=False),
        "optax, global norm": optax.clip_by_global_norm(1.0),
        "optclip, per leaf": optclip.clip_by_norm(1.0),
        "optclip, AGC": recipes.agc(0.01),
        "optax, AGC": optax.adaptive_grad_clip(0.01),
    }


def alone(clip: Any, tree: Any) -> target.Program:
    """Compile clipping alone, with donated gradients and state."""
    shapes = target.placed((tree, jax.eval_shape(clip.init, tree), tree))
    return target.compiled(clip.update, *shapes, donate=(0, 1))


def adamw_step(clip: Any, tree: Any, optimizer: Any = None) -> target.Program:
    """Compile a step whose gradients are arguments and whose state is donated."""
    optimizer = optimizer or step.adamw()
    state = tree, jax.eval_shape(optimizer.init, tree)
    run = stepping.step_of(clip, optimizer, step.SOURCES["arguments"])
    shapes = state, jax.eval_shape(clip.init, tree), tree, jnp.ones(())
    return target.compiled(run, *target.placed(shapes), donate=(0, 1))


PROGRAMS: dict[str, tuple[Compile, dict[str, Any]]] = {
    "clipping alone": (alone, {}),
    "AdamW step": (adamw_step, {"unclipped": optax.identity()}),
}
