"""Parts on GPT-2 124M: clipping alone, AdamW and training steps, per-example norms."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax

import optclip
from benchmarks import clip, step, train, trees
from benchmarks.donated_buffers import compiled, compiled_together
from benchmarks.stepping import Stepping
from benchmarks.timing import Contender, Row, race
from optclip import recipes
from optclip.per_example import clipped_grad, norms

TINY = train.TINY._replace(blocks=0)
SIZE = train.Size(letters=50_257, width=768, blocks=12, window=512, batch=16)


def rounds(tiny: bool) -> int:
    return 2 if tiny else 31


def dtypes(tiny: bool) -> tuple[str, ...]:
    return ("bfloat16",) if tiny else ("bfloat16", "float32")


@functools.cache
def numbers(tiny: bool, dtype: str) -> Any:
    """Return the tree of GPT-2 filled with random numbers."""
    return trees.numbers(trees.workloads(tiny)["gpt2"], dtype)


def steps(
    stepping: Stepping,
    clips: Mapping[str, Any],
    tiny: bool,
    more: Mapping[str, Contender] | None = None,
) -> list[Row]:
    """Race the step after each clipping transformation against the unclipped step."""
    clips = {"unclipped": optax.identity(), **clips}
    contenders = compiled_together(stepping.contender, clips) | dict(more or {})
    return race(contenders, rounds(tiny), against="unclipped", alone=True)


def clipping(tiny: bool) -> Iterator[Row]:
    for dtype in dtypes(tiny):
        source = numbers(tiny, dtype)
        for row in clip.raced(source, rounds(tiny)):
            yield {"dtype": dtype, **row}


def stepping(tiny: bool) -> Iterator[Row]:
    """Race AdamW steps whose gradients are arguments."""
    for dtype in dtypes(tiny):
        source = numbers(tiny, dtype)
        limit, _ = clip.checked(jax.tree.leaves(source))
        stepping = step.stepping_of(source, "arguments")
        for row in steps(stepping, clip.by_global_norm(limit), tiny):
            yield {"dtype": dtype, **row}


def training(tiny: bool, dtype: str) -> Iterator[Row]:
    """Race training steps: GPT-2's forward and backward pass, clipping, and AdamW."""
    size = TINY if tiny else SIZE
    params, tokens = train.drawn(size)
    params = jax.tree.map(lambda x: x.astype(trees.DTYPES[dtype]), params)
    stepping = Stepping(params, step.adamw(), jax.value_and_grad(train.loss), tokens)
    clips = clip.by_global_norm(train.LIMIT)
    # Compiling a fourth program would take a large part of the time limit.
    del clips["optclip, no record"]
    for row in steps(stepping, clips, tiny):
        yield {"dtype": dtype, "tokens": size.batch * size.window, **row}


def others(tiny: bool) -> Iterator[Row]:
    """Race AGC, per-leaf clipping and `skip`."""
    for dtype in dtypes(tiny):
        source = numbers(tiny, dtype)
        limit, _ = clip.checked(jax.tree.leaves(source))
        stepping = step.stepping_of(source, "made")
        clips = {
            "optclip, global norm": optclip.clip_by_global_norm(limit),
            "optclip, per leaf": optclip.clip_by_norm(1.0),
            "optclip, AGC": recipes.agc(0.01),
            "optax, AGC": optax.adaptive_grad_clip(0.01),
        }
        # No step is skipped. With a limit of inf, XLA would not compute the norm.
        skipping = optclip.skip(step.adamw(), max_norm=1e30)
        skipped = step.stepping_of(source, "made", skipping)
        more = {"optclip, skip": skipped.contender(optax.identity())}
        for row in steps(stepping, clips, tiny, more):
            yield {"dtype": dtype, **row}


def per_example(tiny: bool) -> Iterator[Row]:
    """Race ghost norms and ghost clipping against the gradient of the batch."""
    size = train.TINY if tiny else SIZE._replace(batch=32)
    params, tokens = train.drawn(size)

    def loss(params: Any, window: jax.Array) -> jax.Array:
        return train.loss(params, window[None])

    def contender(function: Any) -> Contender:
        run, facts = compiled(function, params, tokens)
        return Contender(
            lambda: jax.block_until_ready(run(params, tokens)), facts=facts
        )

    functions = {
        "plain gradient": jax.grad(train.loss),
        "optclip, ghost norms": norms(loss, method="ghost"),
        "optclip, ghost clipping": clipped_grad(loss, 1.0, method="ghost"),
    }
    contenders = compiled_together(contender, functions)
    for row in race(contenders, rounds(tiny), against="plain gradient"):
        yield {"batch": size.batch, "window": size.window, **row}
