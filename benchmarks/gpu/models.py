"""Parts on GPT-2 124M: clipping alone, an AdamW step, and a whole training step."""

from collections.abc import Iterator
from typing import Any

import jax
import optax

import optclip
from benchmarks import clip, exact, other_frameworks, step, train, trees
from benchmarks.gpu import racing
from benchmarks.stepping import Stepping
from benchmarks.timing import Row
from optclip import recipes

TINY = train.TINY._replace(blocks=0)
SIZE = train.Size(letters=50_257, width=768, blocks=12, window=512, batch=16)


def clipping(tiny: bool) -> Iterator[Row]:
    for dtype in racing.dtypes(tiny):
        source = racing.numbers(tiny, dtype)
        for row in clip.raced(source, racing.rounds(tiny)) + racing.without_torch():
            yield {"dtype": dtype, **row}


def stepping(tiny: bool) -> Iterator[Row]:
    """Race AdamW steps whose gradients are arguments, as they are in PyTorch."""
    for dtype in racing.dtypes(tiny):
        source = racing.numbers(tiny, dtype)
        arrays = jax.tree.leaves(source)
        limit, error = clip.checked(arrays)
        stepping = racing.adamw(source, "arguments")
        others = other_frameworks.torch_steps(arrays, limit, error)
        measured = racing.steps(stepping, by_global_norm(limit), tiny, others)
        for row in measured + racing.without_torch():
            yield {"dtype": dtype, **row}


def training(tiny: bool, dtype: str) -> Iterator[Row]:
    """Race training steps: GPT-2's forward and backward pass, clipping, and AdamW."""
    size = TINY if tiny else SIZE
    params, tokens = train.drawn(size)
    params = jax.tree.map(lambda x: x.astype(trees.DTYPES[dtype]), params)
    stepping = Stepping(params, racing.ADAMW(), jax.value_and_grad(train.loss), tokens)
    clips = by_global_norm(train.LIMIT)
    # Compiling a fourth program would take a large part of the time limit.
    del clips["optclip, no record"]
    for row in racing.steps(stepping, clips, tiny):
        yield {"dtype": dtype, "tokens": size.batch * size.window, **row}


def others(tiny: bool) -> Iterator[Row]:
    """Race AGC, per-leaf clipping and `skip`."""
    for dtype in racing.dtypes(tiny):
        source = racing.numbers(tiny, dtype)
        limit = exact.FRACTION * trees.exact_norm(jax.tree.leaves(source))
        stepping = racing.adamw(source)
        clips = {
            "optclip, global norm": optclip.clip_by_global_norm(limit),
            "optclip, per leaf": optclip.clip_by_norm(1.0),
            "optclip, AGC": recipes.agc(step.CLIPPING),
            "optax, AGC": optax.adaptive_grad_clip(step.CLIPPING),
        }
        # No step is skipped. With a limit of inf, XLA would not compute the norm.
        skipping = optclip.skip(racing.ADAMW(), max_norm=1e30)
        skipped = racing.adamw(source, optimizer=skipping)
        more = {"optclip, skip": skipped.contender(optax.identity())}
        for row in racing.steps(stepping, clips, tiny, more):
            yield {"dtype": dtype, **row}


def by_global_norm(limit: float) -> dict[str, Any]:
    return {name: tx for name, (tx, _) in step.by_global_norm(limit).items()}
