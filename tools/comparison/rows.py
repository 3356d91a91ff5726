"""The table: each input as a text, as run by optax and as run by optclip.

Rows 11 and 28 to 29 are wrappers of optax, where optax decides: there its column has
both clips inside the wrapper, ours what to do instead. Rows from 30 on are neighbours
of the first, in other dtypes and other clips.
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
    ShareOfParams,
    Side,
    X,
    above_the_bound,
    adaptively,
    by_rms,
    by_value,
    clip,
    dense,
    each,
    globally,
    in_explicit_mesh,
    in_shard_map,
    injected,
    of,
    policies,
    scanned,
    slope,
    state_of,
    ulps_apart,
    under,
)

LEFT_OUT = (
    "3", "5", "6", "8", "10b", "10c", "12b", "15a", "15b", "19a", "19b", "20", "22b", "22c",
    "24", "26", "27", "28b", "31", "35", "36", "37", "38", "39", "40", "41", "42", "44",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """An input, with what to show of what came out and a word to add to ours.

    The page leaves out what is rare, the same in another dtype, leaf or clip, or in
    another of its tables.
    """

    number: str
    name: str
    text: str
    theirs: Side
    ours: Side
    show: Callable[[Any], Any] = lambda found: found
    note: str = ""

    @property
    def on_page(self) -> bool:
        return self.number not in LEFT_OUT


BF16, INF, NAN = jnp.bfloat16, np.inf, np.nan
HALF, BRAIN = np.float16([300, 400]), X.astype(BF16)
ZEROS, WEIGHTS = np.zeros(2, np.float32), np.float32([6, 8])
MIXED = [np.array([3], BF16), np.float32([4])]
BAD = [np.float32([INF, 4]), np.float32([3])]
ODD = np.float32([INF, -INF, NAN, 3])
NORMAL = np.random.default_rng(0).normal(size=(200, 1000)).astype(np.float32)
COMPLEX = np.complex64([3j, 0.3 + 0.4j])
HALVES = np.float32([0.5, 0.5])
DEEP = np.float32([[3, 0], [4, 5]]).reshape(2, 1, 1, 1, 1, 2)
KERNEL = [X.reshape(2, 1, 1, 1), np.float32([8])]
EXAMPLES = np.float32([[3, 4], [INF, 0], [0, 0.5]])

GLOBAL, OURS = optax.clip_by_global_norm, optclip.clip_by_global_norm


def strict():
    return jax.numpy_dtype_promotion("strict")


def in_float32(factory):
    return lambda limit: factory(jnp.float32(limit))


def threshold(make):
    return state_of(make, lambda s: optclip.metrics(s)["clip/threshold"], BRAIN)


def optax_threshold(state):
    return state.hyperparams["max_norm"]


def seen_twice():
    seen = optax.snapshot("norm", optax.tree.norm)
    return optax.chain(seen, GLOBAL(2.0), seen, GLOBAL(1.0))


def clipped_thrice():
    return optax.chain(OURS(2.0), OURS(1.0, name="second"), OURS(0.5))


def norms(state):
    return {k: v for k, v in optclip.metrics(state).items() if k.endswith("/norm")}


def wrapped(wrapper, theirs, ours, updates):
    """Within a wrapper of optax, where it is optax that decides."""
    makers = {
        "its clip": lambda: wrapper(theirs(1.0)),
        "ours inside": lambda: wrapper(ours(1.0)),
    }
    return each({name: clip(make, updates) for name, make in makers.items()})


def parted(tx):
    return optax.partition({"a": tx, "b": tx}, ["a", "b"])


def first_masked(tx):
    return optax.masked(tx, [True, False])


def by_first_two_axes():
    """The kernel by its first two axes, the bias, which lacks them, by its norm."""
    kernel, bias = [True, False], [False, True]
    rule = ShareOfParams(0.1)
    return optax.chain(
        optclip.clip_by(rule, over=optclip.axes((0, 1)), mask=kernel),
        optclip.clip_by(rule, over="leaf", mask=bias),
    )


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
    Row("1", "float16-overflow", "`clip_by_global_norm(1)`, float16 `[300, 400]`", *globally(1.0, HALF)),
    Row("2", "float32-overflow", "the same, float32 `[3e20, 4e20]`", *globally(1.0, np.float32([3e20, 4e20]))),
    Row("3", "mixed-overflow", "the same, a float16 leaf `[300]` and a float32 leaf `[400]`",
        *globally(1.0, [HALF[:1], np.float32([400])])),
    Row("4", "float32-underflow", "`clip_by_global_norm(1e-30)`, float32 `[3e-25, 4e-25]`",
        *globally(1e-30, np.float32([3e-25, 4e-25]))),
    Row("5", "zero-of-zero", "`clip_by_global_norm(0)`, `[0, 0]`", *globally(0.0, ZEROS)),
    Row("6", "negative-norm", "`clip_by_global_norm(-1)`, `[3, 4]`", *globally(-1.0, X)),
    Row("7", "one-inf", "`clip_by_global_norm(1)`, leaves `[inf, 4]` and `[3]`",
        of(GLOBAL, 1.0, BAD), policies(OURS, 1.0, BAD), note="by `nonfinite=`"),
    Row("8", "infinite-threshold", "`clip_by_global_norm(inf)`, the same leaves", *globally(INF, BAD)),
    Row("9", "bfloat16-sum", "`clip_by_global_norm(1)`, 200 bfloat16 leaves of 1000 normal numbers",
        *globally(1.0, list(NORMAL.astype(BF16))), show=show.norm),
    Row("10a", "injected-schedule", "`inject_hyperparams(clip_by_global_norm)`, `linear_schedule(2, 1, 2)`, bfloat16 `[3, 4]`, three steps",
        *injected(lambda: optax.linear_schedule(2.0, 1.0, 2), BRAIN, steps=3)),
    Row("10b", "injected-mixed", "the same, the number 1.0, leaves bfloat16 `[3]` and float32 `[4]`", *injected(lambda: 1.0, MIXED)),
    Row("10c", "injected-array", "the same, `jnp.float32(1)`, bfloat16 `[3, 4]`", *injected(lambda: jnp.float32(1.0), BRAIN)),
    Row("11", "injected-rounding", "the same, the number 0.3, bfloat16: the threshold",
        each({"its clip": state_of(lambda: optax.inject_hyperparams(GLOBAL)(max_norm=0.3), optax_threshold, BRAIN),
              "ours inside": threshold(lambda: optax.inject_hyperparams(OURS)(max_norm=0.3))}),
        each({"a number": threshold(lambda: OURS(0.3)),
              "a schedule": threshold(lambda: OURS(optax.constant_schedule(0.3)))}), note="given to optclip directly"),
    Row("12a", "array-threshold", "`clip_by_global_norm(jnp.float32(1))`, bfloat16 `[3, 4]`",
        of(in_float32(GLOBAL), 1.0, BRAIN), of(in_float32(OURS), 1.0, BRAIN)),
    Row("12b", "numpy-threshold", "`clip_by_global_norm(np.float64(1))`, bfloat16 `[3, 4]`", *globally(np.float64(1.0), BRAIN)),
    Row("13", "slope-at-zero", "the gradient of the sum of what `clip_by_global_norm(1)` returns, at `[0, 0]`",
        slope(lambda: GLOBAL(1.0)), slope(lambda: OURS(1.0))),
    Row("14", "debug-nans", "`clip_by_global_norm(1)`, `[0, 0]`, `jax.debug_nans(True)`, eager",
        *under(lambda: jax.debug_nans(True), globally(1.0, ZEROS))),
    Row("15a", "strict-promotion", "`clip_by_global_norm(1)`, leaves bfloat16 `[3]` and float32 `[4]`, strict dtype promotion",
        *under(strict, globally(1.0, MIXED))),
    Row("15b", "strict-promotion-adaptive", "`adaptive_grad_clip(0.1)`, bfloat16 `[3, 4]`, float32 parameters `[6, 8]`, strict dtype promotion",
        *under(strict, adaptively(BRAIN, WEIGHTS))),
    Row("16", "shard-map", "`clip_by_global_norm(1)` in `jax.shard_map` on an Auto mesh, one of `[10, 20, .., 80]` on each of 8 devices",
        in_shard_map(lambda: GLOBAL(1.0)), in_shard_map(lambda: OURS(1.0)), show=show.norm),
    Row("17", "explicit-mesh", "`adaptive_grad_clip(0.1)`, Explicit mesh, `[3, 4, 0, .., 0]` and parameters `[6, 8, 0, .., 0]` split over 8 devices",
        *in_explicit_mesh(adaptively(np.pad(X, (0, 6)), np.pad(WEIGHTS, (0, 6)))), show=show.norm),
    Row("18", "adaptive-dtype", "`adaptive_grad_clip(0.1)`, bfloat16 `[3, 4]`, float32 parameters `[6, 8]`",
        *adaptively(BRAIN, WEIGHTS), show=show.with_dtypes),
    Row("19a", "rms-zero-of-zero", "`clip_by_block_rms(0)`, `[0, 0]`", *by_rms(0.0, ZEROS)),
    Row("19b", "rms-negative", "`clip_by_block_rms(-1)`, `[3, 4]`", *by_rms(-1.0, X)),
    Row("20", "negative-value", "`clip(-1)`, `[-3, 3]`", *by_value(-1.0, np.float32([-3, 3]))),
    Row("21", "nonfinite-values", "`clip(1)`, `[inf, -inf, NaN, 3]`",
        of(optax.clip, 1.0, ODD), policies(optclip.clip_by_value, 1.0, ODD), note="by `nonfinite=`"),
    Row("22a", "int-leaf", "`clip_by_global_norm(1)`, leaves float32 `[3, 4]` and int32 `[7]`", *globally(1.0, [X, np.int32([7])])),
    Row("22b", "python-leaf", "the same, leaves `3.0` and `4.0`, Python floats", *globally(1.0, [3.0, 4.0])),
    Row("22c", "float0-leaf", "the same, leaves float32 `[3, 4]` and float0", *globally(1.0, [X, np.zeros(1, jax.dtypes.float0)])),
    Row("22d", "sparse-leaf", "the same, a `BCOO` matrix `[[3, 0], [0, 4]]`", *dense(globally, 1.0, np.diag(X))),
    Row("23", "schedule", "`clip_by_global_norm(constant_schedule(1))`, `[3, 4]`", *globally(optax.constant_schedule(1.0), X)),
    Row("24", "extra-argument", "`clip_by_global_norm(1).update(.., value=1.0)`, not in a chain, `[3, 4]`",
        clip(lambda: GLOBAL(1.0), X, value=1.0), clip(lambda: OURS(1.0), X, value=1.0)),
    Row("25", "scan", "the norm of `[3, 4]` times 1, 2, 3, kept in the state in `jax.lax.scan` (`optax.monitor`, `optclip.metrics`)",
        scanned(lambda: optax.monitor({"norm": optax.tree.norm}), lambda s: optax.tree.get(s, "norm")),
        scanned(lambda: OURS(1.0), lambda s: optclip.metrics(s)["clip/norm"])),
    Row("26", "one-name-twice", "the norm of `[3, 4]` before clips to 2, to 1 and to 0.5, two kept under one name (`optax.snapshot`, `optclip.metrics`)",
        state_of(seen_twice, lambda s: optax.tree.get(s, "norm")), state_of(clipped_thrice, norms)),
    Row("27", "jit-and-eager", "`clip_by_global_norm`, 1000 normal numbers, eager against jit: units in the last place",
        ulps_apart(GLOBAL, NORMAL[0]), ulps_apart(OURS, NORMAL[0]), show=show.agreement, note="unclipped is promised"),
    Row("28a", "flatten", "`flatten(clip_by_block_rms(1))`, leaves `[3, 4]` and `[0.5, 0.5]`",
        wrapped(optax.flatten, optax.clip_by_block_rms, optclip.clip_by_rms, [X, HALVES]),
        of(optclip.clip_by_rms, 1.0, [X, HALVES]), note="outside of it"),
    Row("28b", "flatten-dtypes", "`flatten(clip_by_global_norm(1))`, leaves bfloat16 `[3]` and float32 `[4]`: the dtypes",
        wrapped(optax.flatten, GLOBAL, OURS, MIXED), of(OURS, 1.0, MIXED), show=show.dtypes, note="outside of it"),
    Row("29a", "partition", "`partition` with `clip_by_global_norm(1)` for each of `[3, 4]` and `[6, 8]`",
        wrapped(parted, GLOBAL, OURS, [X, WEIGHTS]), of(OURS, 1.0, [X, WEIGHTS]), show=show.norm, note="outside of it"),
    Row("29b", "masked", "`masked(clip_by_global_norm(1), [True, False])`, leaves `[3, 4]` and `[12]`",
        wrapped(first_masked, GLOBAL, OURS, [X, np.float32([12])]),
        clip(lambda: OURS(1.0, clip_mask=[True, False]), [X, np.float32([12])]), note="with `clip_mask=[True, False]`"),
    Row("30", "float16-underflow", "`clip_by_global_norm(1e-3)`, float16, 1000 times 1e-4", *globally(1e-3, np.full(1000, 1e-4, np.float16)), show=show.norm),
    Row("31", "bfloat16-overflow", "`clip_by_global_norm(1)`, bfloat16 `[3e20, 4e20]`", *globally(1.0, np.float32([3e20, 4e20]).astype(BF16))),
    Row("32", "norm-overflow", "`optax.tree.norm`, `functional.global_norm`, float32 `[3e20, 4e20]`",
        lambda run: run(optax.tree.norm)(jnp.float32([3e20, 4e20])), lambda run: run(F.global_norm)(jnp.float32([3e20, 4e20]))),
    Row("33", "many-leaves", "`clip_by_global_norm(1)`, 400 bfloat16 leaves `[1]`", *globally(1.0, list(np.ones((400, 1), BF16))), show=show.norm),
    Row("34", "above-the-bound", "`clip_by_global_norm(1)`, 200 float32 vectors of 1000 normal numbers: norms after, in float64",
        above_the_bound(lambda: GLOBAL(1.0), NORMAL), above_the_bound(lambda: OURS(1.0, strict=True), NORMAL), show=show.above_one, note="with `strict=True`"),
    Row("35", "one-nan", "`clip_by_global_norm(1)`, leaves `[NaN, 4]` and `[3]`",
        of(GLOBAL, 1.0, [np.float32([NAN, 4]), BAD[1]]), policies(OURS, 1.0, [np.float32([NAN, 4]), BAD[1]]), note="by `nonfinite=`"),
    Row("36", "tree-of-thresholds", "thresholds `[1.0, 0.5]` for leaves `[3, 4]` and `[6, 8]`",
        of(GLOBAL, [1.0, 0.5], [X, WEIGHTS]), of(optclip.clip_by_norm, [1.0, 0.5], [X, WEIGHTS]), note="with `clip_by_norm`"),
    Row("37", "rms-slope-at-zero", "the gradient of the sum of what `clip_by_block_rms(1)` returns, at `[0, 0]`",
        slope(lambda: optax.clip_by_block_rms(1.0)), slope(lambda: optclip.clip_by_rms(1.0))),
    Row("38", "complex-values", "`clip(1)`, `[3j, 0.3+0.4j]`", *by_value(1.0, COMPLEX)),
    Row("39", "adaptive-rank", "`adaptive_grad_clip(0.1)`, `[[3, 0], [4, 5]]` and parameters `[[6, 0], [8, 10]]`, both of shape `(2, 1, 1, 1, 1, 2)`",
        *adaptively(DEEP, 2 * DEEP), show=show.flat, note="the axes are named"),
    Row("40", "axes-and-ranks", "`adaptive_grad_clip(0.1, axis=(0, 1))`, a kernel of rank 4 that holds `[3, 4]` and a bias `[8]`, the parameters alike",
        clip(lambda: optax.adaptive_grad_clip(0.1, axis=(0, 1)), KERNEL, KERNEL),
        clip(by_first_two_axes, KERNEL, KERNEL), show=show.flat, note="by two clips with masks"),
    Row("41", "rms-float16", "`clip_by_block_rms(1)`, float16 `[300, 400]`", *by_rms(1.0, HALF)),
    Row("42", "adaptive-float16", "`adaptive_grad_clip(0.1)`, float16 `[300, 400]`, parameters `[6, 8]`", *adaptively(HALF, WEIGHTS.astype(np.float16))),
    Row("43", "zero-nans", "`zero_nans()` before `clip_by_global_norm(1)`, `[inf, NaN, 4]`",
        clip(lambda: optax.chain(optax.zero_nans(), GLOBAL(1.0)), np.float32([INF, NAN, 4])),
        clip(lambda: OURS(1.0, nonfinite="drop"), np.float32([INF, NAN, 4])), note="with `nonfinite=\"drop\"`"),
    Row("44", "order-three", "`tree.norm(.., ord=3)`, `functional.global_norm(.., ord=3)`, `[3, 4, 5]`",
        lambda run: run(lambda x: optax.tree.norm(x, ord=3))(jnp.float32([3, 4, 5])),
        lambda run: run(lambda x: F.global_norm(x, ord=3))(jnp.float32([3, 4, 5]))),
    Row("45", "one-bad-example", "`per_example_global_norm_clip(1)`, examples `[3, 4]`, `[inf, 0]`, `[0, 0.5]`: the sum",
        optax_per_example, per_example, note="`functional` under `jax.vmap`, `nonfinite=\"zero\"`"),
]
# fmt: on
