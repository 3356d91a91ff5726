"""Measure the cost of QK-Clip: a Muon training step with and without it, and its parts.

Contenders take turns in random order, and ratios are computed per round. Times are CPU
times of all threads, which other programs disturb less than elapsed time. Each part
also runs alone, many times in a row, and is compared with a nearly empty program that
takes the same arguments.

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

CALLS = 20  # Per measurement of a part, since the clock of CPU time is coarse.


class Size(NamedTuple):
    """Hold the size of the transformer and of its batch."""

    letters: int
    width: int
    blocks: int
    features: int
    window: int
    batch: int


def steps_of(size: Size) -> dict[str, Callable[[], Any]]:
    """Return the contenders; each call takes a step from the same parameters."""
    params = init_params(jax.random.key(0), size.letters, size.width, size.blocks)
    shape = (size.batch, size.window + 1)
    windows = np.random.default_rng(0).integers(size.letters, size=shape)
    layers = heads_of(params, size.features)
    # A low threshold, so that heads are clipped.
    clip = optclip.clip_attention_logits(MAX_LOGIT / 100, layers)
    plain = muon(1e-3)
    clipped = optax.chain(plain, clip)

    def step(tx: Any, has_logits: bool) -> Callable[[], Any]:
        @jax.jit
        def run(params: Any, state: Any) -> Any:
            grad = jax.value_and_grad(mean_loss, has_aux=True)
            (_, largest), grads = grad(params, windows, size.features)
            extra = {"logits": largest} if tx is clipped else {}
            updates, state = tx.update(grads, state, params, **extra)
            # XLA computes the logits only if they are used or returned.
            return (
                optax.apply_updates(params, updates),
                state,
                largest if has_logits else None,
            )

        state = tx.init(params)
        return lambda: jax.block_until_ready(run(params, state))

    return {
        "Muon": step(plain, has_logits=False),
        "+ largest logits": step(plain, has_logits=True),
        "+ QK-Clip": step(clipped, has_logits=True),
    }


def parts_of(size: Size) -> dict[str, Callable[[], Any]]:
    """Return the two parts of QK-Clip for all layers, and an empty program."""
    whole = init_params(jax.random.key(0), size.letters, size.width, size.blocks)
    layers = heads_of(whole, size.features)
    # Without the leaves that QK-Clip does not scale.
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
    # Different arrays, else XLA would compute a single layer.
    projected = {name: (query + i, key) for i, name in enumerate(layers)}
    clip = optclip.clip_attention_logits(MAX_LOGIT, layers)
    # All heads are clipped.
    largest = {name: jnp.full(heads, 2 * MAX_LOGIT) for name in layers}

    @jax.jit
    def logits(projected: Any) -> Any:
        return {
            name: max_attention_logit(*arrays, mask="causal")
            for name, arrays in projected.items()
        }

    @jax.jit
    def clipped(params: Any, state: Any, largest: Any) -> Any:
        updates = jax.tree.map(jnp.zeros_like, params)
        return clip.update(updates, state, params, logits=largest)

    @jax.jit
    def empty(params: Any, state: Any, largest: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, largest)

    arguments = params, clip.init(params), largest
    return {
        "max_attention_logit": lambda: jax.block_until_ready(logits(projected)),
        "clip_attention_logits": lambda: jax.block_until_ready(clipped(*arguments)),
        "empty program": lambda: jax.block_until_ready(empty(*arguments)),
    }


def times_of(
    steps: dict[str, Callable[[], Any]], rounds: int, calls: int = 1
) -> dict[str, list[float]]:
    """Return the CPU seconds of a call in each round, after an untimed round."""
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
    parser.add_argument("--rounds", type=int, default=31, help="rounds of timing")
    parser.add_argument("--quick", action="store_true", help="tiny model, two rounds")
    args = parser.parse_args(arguments)
    size = Size(256, 256, 4, 64, 256, 2)
    size, rounds = (Size(16, 32, 1, 16, 8, 2), 2) if args.quick else (size, args.rounds)
    times = times_of(steps_of(size), rounds)
    parts = times_of(parts_of(size), rounds, calls=CALLS)
    print(", ".join(f"{name} {n}" for name, n in size._asdict().items()))
    for name, seconds in times.items():
        pairs = zip(seconds, times["Muon"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:<22} {1e3 * statistics.median(seconds):8.2f} ms {ratio:7.3f}")
    step = statistics.median(times["Muon"])
    for name, seconds in parts.items():
        median = statistics.median(seconds)
        print(f"{name:<22} {1e3 * median:8.2f} ms {median / step:7.2%}")


if __name__ == "__main__":
    main()
