"""Benchmark `skip`: an AdamW step with skipping around clipping.

The recommended line is the first of docs/production_runs.md. Skipping is compared with
the step of optax that skips, `apply_if_finite`. Gradients are computed in the step, as
in benchmark `step`, or are products that XLA may fuse, as after loss scaling.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks import clip, step, trees
from benchmarks.stepping import Stepping, with_loss
from benchmarks.timing import Row, race
from optclip import thresholds


def unscaled(params: Any, gradients: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients)


SOURCES = {"made": step.SOURCES["made"], "unscaled": with_loss(unscaled)}


def rows(tiny: bool) -> Iterator[Row]:
    # As many leaves as GPT-2, with a tenth of its parameters.
    shapes = trees.workloads(tiny)["gpt2"] if tiny else trees.gpt2(256, 12, 7_300, 1024)
    source = trees.numbers(shapes, "float32")
    limit, _ = clip.checked(jax.tree.leaves(source))
    tree = jax.device_put(source)
    for gradients in ["made"] if tiny else SOURCES:
        # Each contender holds its own moments, which are in the state of `skip`.
        arguments = SOURCES[gradients], tree, jnp.ones(())
        stepping = Stepping(tree, optax.identity(), *arguments)
        contenders = {
            name: stepping.contender(tx) for name, tx in optimizers(limit).items()
        }
        for row in race(
            contenders, 2 if tiny else 60, against="optax, apply_if_finite"
        ):
            yield {"dtype": "float32", "gradients": gradients, **row}


def optimizers(limit: float) -> dict[str, Any]:
    def ours(**options: Any) -> Any:
        clipping = optclip.clip_by_global_norm(
            limit, record=options.get("record", True)
        )
        return optclip.skip(optax.chain(clipping, step.adamw()), **options)

    clipped = optclip.clip_by_global_norm(limit), step.adamw()
    ten_medians = thresholds.scaled(thresholds.quantile(0.5, window=200), 10.0)
    by_optax = optax.chain(optax.clip_by_global_norm(limit), step.adamw())
    return {
        "unclipped": step.adamw(),
        "optclip": optax.chain(*clipped),
        "optax": by_optax,
        "optclip, skip": ours(),
        "optclip, skip, history": optclip.with_history(ours()),
        "optclip, skip, leaf norms, history": optclip.with_history(
            ours(record="leaves")
        ),
        "optclip, recommended line": optclip.with_history(
            ours(record="leaves", max_norm=ten_medians), steps=1000
        ),
        "optax, apply_if_finite": optax.apply_if_finite(by_optax, 5),
    }
