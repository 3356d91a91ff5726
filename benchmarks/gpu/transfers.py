"""Part `transfers`: run ten steps in which JAX rejects transfers to and from the host.

JAX's guard does not cover transfers within a program, such as reading the predicate of
a branch: `counts` counts branches, and `profile` counts copies to the host.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks import trees
from benchmarks.timing import Row
from optclip import recipes

STEPS = 10
SHAPES = {"w": (64, 48), "b": (48,)}


def optimizers() -> dict[str, Callable[[], Any]]:
    def before_adamw(tx: Any) -> Any:
        return optax.chain(tx, optax.adamw(1e-3))

    return {
        "global norm": lambda: before_adamw(optclip.clip_by_global_norm(1.0)),
        "per leaf": lambda: before_adamw(optclip.clip_by_norm(1.0)),
        "AGC": lambda: before_adamw(recipes.agc()),
        "ZClip": lambda: before_adamw(recipes.zclip()),
        "skip": lambda: optclip.skip(optax.adamw(1e-3), max_norm=1.0),
    }


def rows(tiny: bool) -> Iterator[Row]:
    for name, make in optimizers().items():
        try:
            _run(make())
        except Exception as error:
            yield {"clipping": name, "transfers": f"{type(error).__name__}: {error}"}
        else:
            yield {"clipping": name, "steps": STEPS, "transfers": "none"}


def _run(tx: Any) -> None:
    params = jax.tree.map(jnp.asarray, trees.numbers(SHAPES, "float32"))
    gradients, state = params, tx.init(params)

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step).lower(params, state, gradients).compile()
    with jax.transfer_guard("disallow"):
        for _ in range(STEPS):
            params, state = run(params, state, gradients)
        jax.block_until_ready(params)
