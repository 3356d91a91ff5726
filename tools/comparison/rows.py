"""Define the rows of the table: an input, and how optax and optclip run it.

In rows with "its clip" the cause is a wrapper of optax. Its column shows both libraries
inside the wrapper, and the other column shows the alternative.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from optclip import functional as F
from tools.comparison import show
from tools.comparison.sides import (
    Side,
    X,
    above_the_bound,
    adaptively,
    clip,
    dense,
    each,
    eager,
    globally,
    in_explicit_mesh,
    in_shard_map,
    injected,
    of,
    policies,
    scanned,
    slope,
    state_of,
    under,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold an input, both sides, how to show results, and a note on optclip's.

    `run` compiles both sides. Rows with hundreds of leaves run eagerly, since their few
    operations compile faster than the whole program.
    """

    name: str
    text: str
    theirs: Side
    ours: Side
    show: Callable[[Any], Any] = lambda result: result
    note: str = ""
    run: Callable[[Any], Any] = jax.jit


BF16, INF, NAN = jnp.bfloat16, np.inf, np.nan
HALF, BRAIN = np.float16([300, 400]), X.astype(BF16)
ZEROS, WEIGHTS = np.zeros(2, np.float32), np.float32([6, 8])
BAD = [np.float32([INF, 4]), np.float32([3])]
ODD = np.float32([INF, -INF, NAN, 3])
NORMAL = np.random.default_rng(0).normal(size=(200, 1000)).astype(np.float32)
HALVES = np.float32([0.5, 0.5])
EXAMPLES = np.float32([[3, 4], [INF, 0], [0, 0.5]])

GLOBAL, OURS = optax.clip_by_global_norm, optclip.clip_by_global_norm


def in_float32(factory):
    return lambda limit: factory(jnp.float32(limit))


def threshold(make):
    return state_of(make, lambda s: optclip.metrics(s)["clip/threshold"], BRAIN)


def optax_threshold(state):
    return state.hyperparams["max_norm"]


def wrapped(wrapper, theirs, ours, updates):
    """Run both libraries within a wrapper of optax."""
    makers = {
        "its clip": lambda: wrapper(theirs(1.0)),
        "ours inside": lambda: wrapper(ours(1.0)),
    }
    return each({name: clip(make, updates) for name, make in makers.items()})


def parted(tx):
    return optax.partition({"a": tx, "b": tx}, ["a", "b"])


def first_masked(tx):
    return optax.masked(tx, [True, False])


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
    Row("float16-overflow", "`clip_by_global_norm(1)`, float16 `[300, 400]`", *globally(1.0, HALF)),
    Row("float32-overflow", "the same, float32 `[3e20, 4e20]`", *globally(1.0, np.float32([3e20, 4e20]))),
    Row("float32-underflow", "`clip_by_global_norm(1e-30)`, float32 `[3e-25, 4e-25]`",
        *globally(1e-30, np.float32([3e-25, 4e-25]))),
    Row("one-inf", "`clip_by_global_norm(1)`, leaves `[inf, 4]` and `[3]`",
        of(GLOBAL, 1.0, BAD), policies(OURS, 1.0, BAD), note="by `nonfinite=`"),
    Row("bfloat16-sum", "`clip_by_global_norm(1)`, 200 bfloat16 leaves of 1000 normal numbers",
        *globally(1.0, list(NORMAL.astype(BF16))), show=show.norm, run=eager),
    Row("injected-schedule", "`inject_hyperparams(clip_by_global_norm)`, `linear_schedule(2, 1, 2)`, bfloat16 `[3, 4]`, three steps",
        *injected(lambda: optax.linear_schedule(2.0, 1.0, 2), BRAIN, steps=3)),
    Row("injected-rounding", "the same, the number 0.3, bfloat16: the threshold",
        each({"its clip": state_of(lambda: optax.inject_hyperparams(GLOBAL)(max_norm=0.3), optax_threshold, BRAIN),
              "ours inside": threshold(lambda: optax.inject_hyperparams(OURS)(max_norm=0.3))}),
        each({"a number": threshold(lambda: OURS(0.3)),
              "a schedule": threshold(lambda: OURS(optax.constant_schedule(0.3)))}), note="given to optclip directly"),
    Row("array-threshold", "`clip_by_global_norm(jnp.float32(1))`, bfloat16 `[3, 4]`",
        of(in_float32(GLOBAL), 1.0, BRAIN), of(in_float32(OURS), 1.0, BRAIN)),
    Row("slope-at-zero", "the gradient of the sum of `clip_by_global_norm(1)`, at `[0, 0]`",
        slope(lambda: GLOBAL(1.0)), slope(lambda: OURS(1.0))),
    Row("debug-nans", "`clip_by_global_norm(1)`, `[0, 0]`, `jax.debug_nans(True)`, eager",
        *under(lambda: jax.debug_nans(True), globally(1.0, ZEROS)), run=eager),
    Row("shard-map", "`clip_by_global_norm(1)` in `jax.shard_map` on an Auto mesh, one of `[10, 20, .., 80]` on each of 8 devices",
        in_shard_map(lambda: GLOBAL(1.0)), in_shard_map(lambda: OURS(1.0)), show=show.norm),
    Row("explicit-mesh", "`adaptive_grad_clip(0.1)`, Explicit mesh, `[3, 4, 0, .., 0]` and parameters `[6, 8, 0, .., 0]` split over 8 devices",
        *in_explicit_mesh(adaptively(np.pad(X, (0, 6)), np.pad(WEIGHTS, (0, 6)))), show=show.norm),
    Row("adaptive-dtype", "`adaptive_grad_clip(0.1)`, bfloat16 `[3, 4]`, float32 parameters `[6, 8]`",
        *adaptively(BRAIN, WEIGHTS), show=show.with_dtypes),
    Row("nonfinite-values", "`clip(1)`, `[inf, -inf, NaN, 3]`",
        of(optax.clip, 1.0, ODD), policies(optclip.clip_by_value, 1.0, ODD), note="by `nonfinite=`"),
    Row("int-leaf", "`clip_by_global_norm(1)`, leaves float32 `[3, 4]` and int32 `[7]`", *globally(1.0, [X, np.int32([7])])),
    Row("sparse-leaf", "the same, a `BCOO` matrix `[[3, 0], [0, 4]]`", *dense(globally, 1.0, np.diag(X))),
    Row("schedule", "`clip_by_global_norm(constant_schedule(1))`, `[3, 4]`", *globally(optax.constant_schedule(1.0), X)),
    Row("scan", "the norm of `[3, 4]` times 1, 2, 3, kept in the state in `jax.lax.scan` (`optax.monitor`, `optclip.metrics`)",
        scanned(lambda: optax.monitor({"norm": optax.tree.norm}), lambda s: optax.tree.get(s, "norm")),
        scanned(lambda: OURS(1.0), lambda s: optclip.metrics(s)["clip/norm"])),
    Row("flatten", "`flatten(clip_by_block_rms(1))`, leaves `[3, 4]` and `[0.5, 0.5]`",
        wrapped(optax.flatten, optax.clip_by_block_rms, optclip.clip_by_rms, [X, HALVES]),
        of(optclip.clip_by_rms, 1.0, [X, HALVES]), note="outside of it"),
    Row("partition", "`partition` with `clip_by_global_norm(1)` for each of `[3, 4]` and `[6, 8]`",
        wrapped(parted, GLOBAL, OURS, [X, WEIGHTS]), of(OURS, 1.0, [X, WEIGHTS]), show=show.norm, note="outside of it"),
    Row("masked", "`masked(clip_by_global_norm(1), [True, False])`, leaves `[3, 4]` and `[12]`",
        wrapped(first_masked, GLOBAL, OURS, [X, np.float32([12])]),
        clip(lambda: optclip.clip_by(1.0, clip_mask=[True, False]), [X, np.float32([12])]), note="`clip_by` with `clip_mask=[True, False]`"),
    Row("float16-underflow", "`clip_by_global_norm(1e-3)`, float16, 1000 times 1e-4", *globally(1e-3, np.full(1000, 1e-4, np.float16)), show=show.norm),
    Row("norm-overflow", "`optax.tree.norm`, `functional.global_norm`, float32 `[3e20, 4e20]`",
        lambda run: run(optax.tree.norm)(jnp.float32([3e20, 4e20])), lambda run: run(F.global_norm)(jnp.float32([3e20, 4e20]))),
    Row("many-leaves", "`clip_by_global_norm(1)`, 400 bfloat16 leaves `[1]`", *globally(1.0, list(np.ones((400, 1), BF16))), show=show.norm, run=eager),
    Row("above-the-bound", "`clip_by_global_norm(1)`, 200 float32 vectors of 1000 normal numbers: norms after, in float64",
        above_the_bound(lambda: GLOBAL(1.0), NORMAL), above_the_bound(lambda: OURS(1.0, strict=True), NORMAL), show=show.above_one, note="with `strict=True`"),
    Row("one-bad-example", "`per_example_global_norm_clip(1)`, examples `[3, 4]`, `[inf, 0]`, `[0, 0.5]`: the sum",
        optax_per_example, per_example, note="`functional` under `jax.vmap`, `nonfinite=\"zero\"`"),
]
# fmt: on
