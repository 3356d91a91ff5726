"""Part `rules`: an AdamW step with a threshold that learns, against a fixed one.

The gradients are the same in each step, so that a rule of the norms so far lets them
pass, and one in its warm-up clips them as the fixed threshold does: known either way.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import optclip
from benchmarks import stepping, trees
from benchmarks.cases import Case, Options, Row
from benchmarks.oracle import SHARE
from benchmarks.steps import OPTIMIZERS, passed
from benchmarks.timing import race
from optclip import recipes, thresholds

LONG = 1_000_000  # a warm-up that no benchmark leaves
# XLA would know that inf clips nothing, and leave the clip out.
FAR = 1e30


def clips(limit: float) -> dict[str, stepping.Clip | None]:
    """A fixed threshold, and each rule with its usual window."""
    tree, leaf = optclip.clip_by_global_norm, optclip.clip_by_norm
    found: dict[str, stepping.Clip | None] = {
        "unclipped": None,
        "fixed": stepping.Clip(tree(limit), limit),
        "fixed, by leaf": stepping.Clip(leaf(FAR), math.inf),
        "autoclip": stepping.Clip(recipes.autoclip(), math.inf),
        "mean_std_clip": stepping.Clip(recipes.mean_std_clip(), math.inf),
    }
    zscore = thresholds.zscore(warmup=LONG, max_norm=limit)
    ema = thresholds.ema(warmup=LONG, max_norm=limit)
    found["zclip"] = stepping.Clip(tree(zscore), limit)
    found["adagc"] = stepping.Clip(leaf(ema), limit)
    return found


def cases(options: Options) -> Iterator[Case]:
    """The GPT-2 tree in float32 and bfloat16."""
    workload = trees.workloads(options.small)["gpt2"]
    for dtype in ("f32",) if options.small else ("f32", "bf16"):
        labels = {"what": "rules", "tree": workload.name, "dtype": dtype}
        yield Case(labels, _case(workload, dtype, options), workload.title)


def _case(
    workload: trees.Workload, dtype: str, options: Options
) -> Callable[[], dict[str, Row]]:
    """How to run the race, and how large each state is."""

    def run() -> dict[str, Row]:
        arrays = trees.numbers(workload.shapes, dtype)
        limit = SHARE * trees.exact_norm(jax.tree.leaves(arrays))
        gradients = jax.device_put(arrays)
        shared = stepping.Shared(
            gradients, OPTIMIZERS["adamw"](), passed, gradients, jnp.ones(())
        )
        table = clips(limit)
        runners = {name: shared.contender(name, clip) for name, clip in table.items()}
        rows = race(runners, options.rounds_for(workload))
        for name, clip in table.items():
            if clip is not None:
                rows[name]["state_bytes"] = _size(clip.transformation, gradients)
        return rows

    return run


def _size(transformation: Any, params: Any) -> int:
    """Bytes of its state."""
    state = jax.eval_shape(transformation.init, params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
