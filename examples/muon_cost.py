"""What QK-Clip costs: a training step of Muon without it and with it, and its pieces.

The contenders take turns in random order, and a ratio is that of one round. The time is
that of the CPU, of all threads, which other programs disturb less than that of a clock.
A piece runs many times in a row, alone; beside it stands a call of a program that does
next to nothing with the same arguments.

    python examples/muon_cost.py            # some minutes on two cores
    python examples/muon_cost.py --quick    # a smoke test
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_muon import MAX_LOGIT, heads_of, init_params, mean_loss, muon

import optclip
from optclip.functional import max_attention_logit

CALLS = 20  # Of a piece, for one time: a clock of the CPU is too coarse for one.


class Size(NamedTuple):
    """The size of the transformer and of its batch."""

    letters: int
    width: int
    blocks: int
    features: int
    window: int
    batch: int


def steps_of(size: Size) -> dict[str, Callable[[], Any]]:
    """The contenders, compiled; each call is a step from the same parameters."""
    params = init_params(jax.random.key(0), size.letters, size.width, size.blocks)
    shape = (size.batch, size.window + 1)
    windows = np.random.default_rng(0).integers(size.letters, size=shape)
    layers = heads_of(params, size.features)
    # So low that heads are clipped.
    clip = optclip.clip_attention_logits(MAX_LOGIT / 100, layers)
    plain = muon(1e-3)
    clipped = optax.chain(plain, clip)

    def step(tx: Any, has_logits: bool) -> Callable[[], Any]:
        @jax.jit
        def run(params: Any, state: Any) -> Any:
            grad = jax.value_and_grad(mean_loss, has_aux=True)
            (_, largest), grads = grad(params, windows, size.features)
            extra = {"max_logits": largest} if tx is clipped else {}
            updates, state = tx.update(grads, state, params, **extra)
            # What is not returned is not computed.
            return (
                optax.apply_updates(params, updates),
                state,
                largest if has_logits else None,
            )

        state = tx.init(params)
        return lambda: jax.block_until_ready(run(params, state))

    return {
        "Muon": step(plain, has_logits=False),
        "and largest logits": step(plain, has_logits=True),
        "and QK-Clip": step(clipped, has_logits=True),
    }


def pieces_of(size: Size) -> dict[str, Callable[[], Any]]:
    """The largest logits of all layers, the clip of all, and an empty program."""
    whole = init_params(jax.random.key(0), size.letters, size.width, size.blocks)
    layers = heads_of(whole, size.features)
    # Without the other leaves, which the clip passes on as they are.
    params = {
        name: {"attn": {kind: block["attn"][kind] for kind in ("query", "key")}}
        for name, block in whole.items()
        if name.startswith("block")
    }
    heads = size.width // size.features
    keys = jax.random.split(jax.random.key(1), 2)
    query, key = (
        jax.random.normal(k, (size.batch, size.window, n, size.features))
        for k, n in zip(keys, (heads, heads // 2), strict=True)
    )
    # Arrays of their own, else XLA would do the work of one layer only.
    projected = {name: (query + i, key) for i, name in enumerate(layers)}
    clip = optclip.clip_attention_logits(MAX_LOGIT, layers)
    # All heads are clipped.
    largest = {name: jnp.full(heads, 2 * MAX_LOGIT) for name in layers}

    @jax.jit
    def logits(projected: Any) -> Any:
        found = projected.items()
        return {name: max_attention_logit(*x, mask="causal") for name, x in found}

    @jax.jit
    def clipped(params: Any, state: Any, largest: Any) -> Any:
        updates = jax.tree.map(jnp.zeros_like, params)
        return clip.update(updates, state, params, max_logits=largest)

    @jax.jit
    def empty(params: Any, state: Any, largest: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, largest)

    given = params, clip.init(params), largest
    return {
        "max_attention_logit": lambda: jax.block_until_ready(logits(projected)),
        "clip_attention_logits": lambda: jax.block_until_ready(clipped(*given)),
        "an empty program": lambda: jax.block_until_ready(empty(*given)),
    }


def times_of(
    steps: dict[str, Callable[[], Any]], rounds: int, calls: int = 1
) -> dict[str, list[float]]:
    """CPU seconds of a call by round, after one round that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    rng = np.random.default_rng(0)
    for i in range(rounds + 1):
        for name in rng.permutation([*steps]):
            start = time.process_time()
            for _ in range(calls):
                steps[name]()
            if i:
                times[name].append((time.process_time() - start) / calls)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="times of each")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    args = parser.parse_args(arguments)
    size = Size(256, 256, 4, 64, 256, 2)
    size, rounds = (Size(16, 32, 1, 16, 8, 2), 2) if args.quick else (size, args.rounds)
    times = times_of(steps_of(size), rounds)
    pieces = times_of(pieces_of(size), rounds, calls=CALLS)
    print(", ".join(f"{name} {n}" for name, n in size._asdict().items()))
    for name, seconds in times.items():
        pairs = zip(seconds, times["Muon"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:<22} {1e3 * statistics.median(seconds):8.2f} ms {ratio:7.3f}")
    step = statistics.median(times["Muon"])
    for name, seconds in pieces.items():
        median = statistics.median(seconds)
        print(f"{name:<22} {1e3 * median:8.2f} ms {median / step:7.2%}")


if __name__ == "__main__":
    main()
