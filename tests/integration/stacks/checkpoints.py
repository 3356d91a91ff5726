"""Define the run of the golden checkpoints, one per released version.

`tools/checkpoint.py` writes the checkpoint of a version.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optclip
from optclip import _thresholds, thresholds

GOLDEN = Path(__file__).with_name("golden")
# Steps before and after the checkpoint.
BEFORE, AFTER = 12, 12
# Transformations that clip in some steps, and those that clip in every step.
SOMETIMES = {
    "groups", "leaves", "slices", "elements", "largest", "carried", "clip", "after",
}  # fmt: skip
ALWAYS = {"smooth", "steady"}


def optimizer() -> optax.GradientTransformation:
    """Chain all kinds of state: each learned rule, scope and wrapper.

    Uses only what 0.1.0 contains, since its checkpoint must be restored.
    """
    adam = optclip.with_periodic_reset(optax.adam(0.05), every=9, warmup=2)
    usual = thresholds.of_gradients(thresholds.ema(0.1, decay=0.9, warmup=0))
    steps = optclip.clip_after(adam, optclip.clip_by_global_norm(usual, name="after"))
    rule = thresholds.mean_plus_std(4.0, window=8, ddof=1)
    return optclip.skip(
        optax.chain(*clips(), steps), max_norm=30.0, max_loss=rule, max_consecutive=4,
        learn_skipped=True,
    )  # fmt: skip


def clips() -> list[optax.GradientTransformation]:
    """Build the transformations before the optimizer."""
    rules = {
        "body": thresholds.ema(ratio=1.05, warmup=4, max_norm=4.0),
        "head": thresholds.zscore(z=1.0, warmup=4),
    }
    by_group = optclip.by_path(lambda path: "head" if "head" in path else "body")
    deviations = thresholds.mean_plus_std(0.5, window=6)
    moment = thresholds.moment(power=1.5, decay=0.5)
    second = _thresholds.second_moment(theta=2.0, decay=0.9, warmup=3)
    largest = _thresholds.ema_of_max(decay=0.9)
    return [
        optclip.clip_by_group_norm(rules, by_group, name="groups"),
        optclip.clip_by_norm(1.5, record="leaves", name="leaves"),
        optclip.clip_by_global_norm(jnp.inf, record="leaves", name="watched"),
        optclip.clip_by_value(100.0, record=False),
        optclip.clip_by_norm(deviations, axis=0, name="slices"),
        optclip.clip_by_value(second, name="elements"),
        optclip.clip_by_value(moment, response="smooth", name="smooth"),
        optclip.clip_by_value(largest, response="proportional", name="largest"),
        optclip.clip_by(
            thresholds.mean_over_rms(), response="normalize", name="steady"
        ),
        optclip.recipes.uclip(optclip.clip_by_global_norm(0.97, name="carried")),
        optclip.clip_by_global_norm(thresholds.quantile(0.5, window=8)),
    ]


def start() -> dict[str, Any]:
    """Return the parameters and the state before the first step."""
    params = {"body": {"bias": jnp.zeros(2), "kernel": jnp.ones((3, 2))}}
    params["head"] = jnp.ones(2)
    return {"params": params, "opt_state": optimizer().init(params)}


@jax.jit
def step(run: dict[str, Any], noise: Any) -> dict[str, Any]:
    """Step towards 0 with noise; one step in eight is skipped."""
    grads = jax.tree.map(jnp.add, run["params"], noise)
    loss = optclip.functional.global_norm(grads) ** 2
    updates, opt_state = optimizer().update(
        grads, run["opt_state"], run["params"], value=loss
    )
    params = optax.apply_updates(run["params"], updates)
    return {"params": params, "opt_state": opt_state}


def go_on(run: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Take the steps from first to last, with noise from NumPy."""
    for i in range(first, last):
        random = np.random.default_rng(i)
        size = 40.0 if i % 8 == 7 else 1.0 + i % 3
        leaves, structure = jax.tree.flatten(run["params"])
        noise = [size * random.uniform(-1, 1, leaf.shape) for leaf in leaves]
        noise = [leaf.astype(np.float32) for leaf in noise]
        run = step(run, jax.tree.unflatten(structure, noise))
    return run


def numbers(run: dict[str, Any]) -> dict[str, Any]:
    """Return all metrics and parameters."""
    logged = optclip.metrics(run["opt_state"])
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(run["params"])]
    params = np.concatenate(leaves).tolist()
    return {key: float(x) for key, x in logged.items()} | {"params": params}


def restore(path, like=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def by_orbax(state, like, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
    return restore(path / "state", like)
