"""A checkpoint of each released version, and the numbers it must go on to.

    python -m tests.stacks.checkpoints     # makes that of this version, once, to commit

Run it, in the environment `.venv-stacks`, when a version is released; never again for
one that was: a checkpoint which that version did not write proves nothing.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optclip

GOLDEN = Path(__file__).with_name("golden")
# Steps before the checkpoint and after it.
BEFORE, AFTER = 12, 12


def optimizer() -> optax.GradientTransformation:
    """Several kinds of state at once: rules that learn, groups, leaves, and `skip`.

    Of things that 0.1.0 has: a checkpoint of it is to be restored into this for ever.
    """
    rules = {
        "body": optclip.thresholds.ema(ratio=1.05, warmup=4, max_norm=4.0),
        "head": optclip.thresholds.zscore(z=1.0, warmup=4),
    }
    by_group = optclip.by_path(lambda path: "head" if "head" in path else "body")
    clips = optax.chain(
        optclip.clip_by_group_norm(rules, by_group, name="groups"),
        optclip.clip_by_norm(1.5, record="leaves", name="leaves"),
        optclip.clip_by_global_norm(optclip.thresholds.quantile(0.5, window=8)),
    )
    return optclip.skip(optax.chain(clips, optax.adam(0.05)), when=30.0)


def start() -> dict[str, Any]:
    """The parameters and the state of a run that has taken no step."""
    params = {"body": {"bias": jnp.zeros(2), "kernel": jnp.ones((3, 2))}}
    params["head"] = jnp.ones(2)
    return {"params": params, "opt_state": optimizer().init(params)}


@jax.jit
def step(run: dict[str, Any], noise: Any) -> dict[str, Any]:
    """Towards 0 with noise; one step in eight is so far off that it is left out."""
    grads = jax.tree.map(jnp.add, run["params"], noise)
    updates, opt_state = optimizer().update(grads, run["opt_state"], run["params"])
    params = optax.apply_updates(run["params"], updates)
    return {"params": params, "opt_state": opt_state}


def go_on(run: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The run after the steps from first to last. NumPy's noise is the same anywhere."""
    for i in range(first, last):
        random = np.random.default_rng(i)
        size = 40.0 if i % 8 == 7 else 1.0 + i % 3
        leaves, structure = jax.tree.flatten(run["params"])
        noise = [size * random.uniform(-1, 1, leaf.shape) for leaf in leaves]
        noise = [leaf.astype(np.float32) for leaf in noise]
        run = step(run, jax.tree.unflatten(structure, noise))
    return run


def numbers(run: dict[str, Any]) -> dict[str, Any]:
    """What is compared: all metrics and parameters."""
    logged = optclip.metrics(run["opt_state"])
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(run["params"])]
    params = np.concatenate(leaves).tolist()
    return {key: float(x) for key, x in logged.items()} | {"params": params}


def make(folder: Path) -> None:
    """The checkpoint of this version, and what its run comes to."""
    run = go_on(start(), 0, BEFORE)
    with tempfile.TemporaryDirectory() as made:
        state = Path(made) / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(state, run)
            checkpointer.wait_until_finished()
        # It says where it was saved, which is no one else's folder.
        (state / "commit_success.txt").unlink(missing_ok=True)
        shutil.copytree(state, folder / "state")
    end = go_on(run, BEFORE, BEFORE + AFTER)
    said = {"saved": numbers(run), "end": numbers(end)}
    (folder / "numbers.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    folder = GOLDEN / optclip.__version__
    folder.mkdir(parents=True)
    make(folder)
    print(f"made {folder.relative_to(Path.cwd())}")
