"""Define the rows of the table: an input, and how optax and optclip run it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from docs.plots_and_tables.comparison import show
from docs.plots_and_tables.comparison.sides import (
    Side,
    X,
    above_the_bound,
    adaptively,
    eager,
    globally,
    in_explicit_mesh,
    in_shard_map,
    injected,
    of,
    policies,
    scanned,
    slope,
)
from optclip import functional as F


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold an input, both sides, how to show results, and a note on optclip's.

    `run` compiles both sides. Rows with hundreds of leaves run eagerly, since their few
    operations compile faster than the whole program.
    """

    text: str
    theirs: Side
    ours: Side
    show: Callable[[Any], Any] = lambda result: result
    note: str = ""
    run: Callable[[Any], Any] = jax.jit


BF16, INF = jnp.bfloat16, np.inf
HALF, BRAIN = np.float16([300, 400]), X.astype(BF16)
WEIGHTS = np.float32([6, 8])
BAD = [np.float32([INF, 4]), np.float32([3])]
NORMAL = np.random.default_rng(0).normal(size=(200, 1000)).astype(np.float32)
EXAMPLES = np.float32([[3, 4], [INF, 0], [0, 0.5]])

GLOBAL, OURS = optax.clip_by_global_norm, optclip.clip_by_global_norm


def per_example(run):
    def one(grads):
        return F.clip_by_global_norm(grads, 1.0, nonfinite="zero")[0]

    return run(lambda batch: jnp.sum(jax.vmap(one)(batch), 0))(jnp.asarray(EXAMPLES))


def optax_per_example(run):
    def total(batch):
        return optax.per_example_global_norm_clip([batch], 1.0)[0][0]

    return run(total)(jnp.asarray(EXAMPLES))


# fmt: off
ROWS = [
    Row("`clip_by_global_norm(1)`, float16 `[300, 400]`", *globally(1.0, HALF)),
    Row("`clip_by_global_norm(1)`, leaves `[inf, 4]` and `[3]`",
        of(GLOBAL, 1.0, BAD), policies(OURS, 1.0, BAD), note="by `nonfinite=`"),
    Row("`clip_by_global_norm(1)`, 200 bfloat16 leaves of 1000 normal numbers",
        *globally(1.0, list(NORMAL.astype(BF16))), show=show.norm, run=eager),
    Row("`inject_hyperparams(clip_by_global_norm)`, `linear_schedule(2, 1, 2)`, bfloat16 `[3, 4]`, three steps",
        *injected(lambda: optax.linear_schedule(2.0, 1.0, 2), BRAIN, steps=3)),
    Row("the gradient of the sum of `clip_by_global_norm(1)`, at `[0, 0]`",
        slope(lambda: GLOBAL(1.0)), slope(lambda: OURS(1.0))),
    Row("`clip_by_global_norm(1)` in `jax.shard_map` on an Auto mesh, one of `[10, 20, .., 80]` on each of 8 devices",
        in_shard_map(lambda: GLOBAL(1.0)), in_shard_map(lambda: OURS(1.0)), show=show.norm),
    Row("`adaptive_grad_clip(0.1)`, Explicit mesh, `[3, 4, 0, .., 0]` and parameters `[6, 8, 0, .., 0]` split over 8 devices",
        *in_explicit_mesh(adaptively(np.pad(X, (0, 6)), np.pad(WEIGHTS, (0, 6)))), show=show.norm),
    Row("`clip_by_global_norm(1)`, leaves float32 `[3, 4]` and int32 `[7]`", *globally(1.0, [X, np.int32([7])])),
    Row("`clip_by_global_norm(constant_schedule(1))`, `[3, 4]`", *globally(optax.constant_schedule(1.0), X)),
    Row("the norm of `[3, 4]` times 1, 2, 3, kept in the state in `jax.lax.scan` (`optax.monitor`, `optclip.metrics`)",
        scanned(lambda: optax.monitor({"norm": optax.tree.norm}), lambda s: optax.tree.get(s, "norm")),
        scanned(lambda: OURS(1.0), lambda s: optclip.metrics(s)["clip/norm"])),
    Row("`clip_by_global_norm(1)`, 200 float32 vectors of 1000 normal numbers: norms after, in float64",
        above_the_bound(lambda: GLOBAL(1.0), NORMAL), above_the_bound(lambda: OURS(1.0, strict=True), NORMAL), show=show.above_one, note="with `strict=True`"),
    Row("`per_example_global_norm_clip(1)`, examples `[3, 4]`, `[inf, 0]`, `[0, 0.5]`: the sum",
        optax_per_example, per_example, note="`functional` under `jax.vmap`, `nonfinite=\"zero\"`"),
]
# fmt: on
