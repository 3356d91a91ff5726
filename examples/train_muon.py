"""Train small transformers with Muon, with and without QK-Clip.

A step of Muon is as large in every direction, so that the weights of queries and keys
grow, and attention logits with them. QK-Clip comes after the step: it scales the
weights of each head whose largest logit was above 100.

Each seed trains twice, from the same weights and on the same batches. The weights of
queries and keys start at twice their usual size, so that hundreds of steps do what
takes thousands in a large model.

    python examples/train_muon.py            # some minutes on two cores
    python examples/train_muon.py --quick    # a smoke test

Sources: Kimi K2, arXiv:2507.20534, 2025; Jordan et al., "Muon: An optimizer for hidden
layers in neural networks", 2024.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import muon_picture
import numpy as np
import optax
from tqdm import tqdm
from train_char_rnn import Corpus, read_corpus

import optclip
from optclip.functional import max_attention_logit

WIDTH, BLOCKS, FEATURES = 64, 2, 16  # Four query heads; two share a key head.
WINDOW, BATCH, RARE, GAIN = 128, 32, 300, 2.0
RATE, ADAM_RATE, MAX_LOGIT, TOLERATED = 0.1, 3e-3, 100.0, 105.0
CHUNK = 10  # Steps in one call of the compiled program.
# A threshold of infinity measures and touches nothing.
METHODS = {"Muon": np.inf, "Muon and QK-Clip": MAX_LOGIT}

Params = dict[str, Any]


class Run(NamedTuple):
    """What one network came to, and what was seen in each of its steps."""

    held_out: float
    losses: np.ndarray
    peaks: np.ndarray  # The largest attention logit of the batch, in any head.
    clipped: np.ndarray  # Whether any head was.


def with_rare_as_one(corpus: Corpus) -> Corpus:
    """Characters that are rare count as one.

    Else the largest logit of a batch depends on which of them are in it.
    """
    counts = np.bincount(corpus.train, minlength=len(corpus.alphabet))
    common = np.flatnonzero(counts >= RARE)
    codes = np.full(len(counts), len(common))
    codes[common] = np.arange(len(common))
    alphabet = "".join(corpus.alphabet[i] for i in common) + "\N{REPLACEMENT CHARACTER}"
    train, held_out = (jnp.asarray(codes[x]) for x in (corpus.train, corpus.held_out))
    return corpus._replace(alphabet=alphabet, train=train, held_out=held_out)


def init_params(
    key: jax.Array, letters: int, width: int = WIDTH, blocks: int = BLOCKS
) -> Params:
    """Matrices that keep the size of numbers, but those of queries and keys."""
    keys = iter(jax.random.split(key, 2 + 6 * blocks))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> jax.Array:
        return gain * rows**-0.5 * jax.random.normal(next(keys), (rows, columns))

    params: Params = {"embed": jax.random.normal(next(keys), (letters, width))}
    for i in range(blocks):
        params[f"block_{i}"] = {
            "attn": {
                "query": matrix(width, width, GAIN),
                "key": matrix(width, width // 2, GAIN),
                "value": matrix(width, width // 2),
                "out": matrix(width, width, 0.5),
            },
            "up": matrix(width, 2 * width),
            "down": matrix(2 * width, width, 0.5),
        }
    return {**params, "head": matrix(width, letters)}


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding: pairs of features turn with the position."""
    _, window, _, features = x.shape
    speeds = 100.0 ** -jnp.linspace(0, 1, features // 2)
    angles = jnp.arange(window)[:, None, None] * speeds
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    attn: Params, x: jax.Array, window: int, features: int
) -> tuple[jax.Array, jax.Array]:
    """Causal attention within each window, and the largest logit of each head."""

    def by_head(name: str) -> jax.Array:
        heads = attn[name].shape[1] // features
        return (x @ attn[name]).reshape(-1, window, heads, features)

    query, key, value = (
        rotated(by_head("query")),
        rotated(by_head("key")),
        by_head("value"),
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    largest = max_attention_logit(query, key, mask="causal")
    return mixed.reshape(x.shape) @ attn["out"], largest


def mean_loss(
    params: Params, windows: jax.Array, features: int = FEATURES
) -> tuple[jax.Array, Params]:
    """Cross-entropy of each next character, in nats, and the largest logits by layer."""
    # One axis for all characters: XLA on CPU is slow to differentiate stacks.
    x, largest = params["embed"][windows[:, :-1].reshape(-1)], {}
    window = windows.shape[1] - 1
    for name in sorted(name for name in params if name.startswith("block")):
        block = params[name]
        mixed, largest[f"{name}/attn"] = attend(
            block["attn"], normalized(x), window, features
        )
        x = x + mixed
        x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
    logits, targets = normalized(x) @ params["head"], windows[:, 1:].reshape(-1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), largest


def muon(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for the others."""

    def sides(params: Any) -> Any:
        def side(path: Any, _: Any) -> optax.contrib.MuonDimensionNumbers | None:
            in_a_block = path[0].key.startswith("block")
            return optax.contrib.MuonDimensionNumbers() if in_a_block else None

        return jax.tree.map_with_path(side, params)

    return optax.contrib.muon(
        rate, adam_learning_rate=ADAM_RATE, muon_weight_dimension_numbers=sides
    )


def heads_of(params: Params, features: int = FEATURES) -> dict[str, optclip.Heads]:
    return optclip.find_heads(
        params, query="query", key="key", axis=-1, head_dim=features
    )


def optimizer(
    params: Params, max_logit: Any, steps: int
) -> optax.GradientTransformationExtraArgs:
    """QK-Clip comes last, behind the learning rate."""
    return optax.chain(
        muon(optax.linear_schedule(RATE, 0.0, steps)),
        optclip.clip_attention_logits(max_logit, heads_of(params)),
    )


def trainer(corpus: Corpus, steps: int) -> tuple[Any, Any]:
    """What starts a network and what trains it for a few steps, compiled."""

    def start(seed: int) -> Any:
        params = init_params(jax.random.key(seed), len(corpus.alphabet))
        return params, optimizer(params, MAX_LOGIT, steps).init(params)

    @jax.jit
    def run(seed: int, max_logit: float, carry: Any, numbers: jax.Array) -> Any:
        def step(carry: Any, number: jax.Array) -> Any:
            params, state = carry
            key = jax.random.fold_in(jax.random.key(seed), number)
            starts = jax.random.randint(key, (BATCH, 1), 0, len(corpus.train) - WINDOW)
            windows = corpus.train[starts + jnp.arange(WINDOW + 1)]
            grad = jax.value_and_grad(mean_loss, has_aux=True)
            (loss, largest), grads = grad(params, windows)
            updates, state = optimizer(params, max_logit, steps).update(
                grads, state, params, max_logits=largest
            )
            peak = jnp.max(jnp.stack([*largest.values()]))
            seen = loss, peak, peak > max_logit
            return (optax.apply_updates(params, updates), state), seen

        return jax.lax.scan(step, carry, numbers)

    return jax.jit(start), run


@jax.jit
def held_out_loss(params: Params, text: jax.Array) -> jax.Array:
    whole = len(text) // (WINDOW + 1) * (WINDOW + 1)
    return mean_loss(params, text[:whole].reshape(-1, WINDOW + 1))[0]


def train(corpus: Corpus, steps: int, seeds: int) -> dict[str, list[Run]]:
    """A run for each method and seed; the batches are those of the seed."""
    start, run = trainer(corpus, steps)
    found: dict[str, list[Run]] = {name: [] for name in METHODS}
    with tqdm(total=len(METHODS) * seeds * steps, unit="step") as bar:
        for seed in range(seeds):
            for name, max_logit in METHODS.items():
                bar.set_description(f"seed {seed}, {name:<16}")
                carry, seen = start(seed), []
                for numbers in np.arange(steps).reshape(-1, CHUNK):
                    carry, new = run(seed, max_logit, carry, numbers)
                    seen.append(jax.device_get(new))
                    bar.update(CHUNK)
                held_out = float(held_out_loss(carry[0], corpus.held_out))
                columns = map(np.concatenate, zip(*seen, strict=True))
                found[name].append(Run(held_out, *columns))
    return found


def report(runs: dict[str, list[Run]]) -> str:
    """The table: a line for each seed, and the mean and deviation of losses."""
    line = "{:<17} {:>5} {:>13} {:>15} {:>8} {:>9}".format
    lines = [
        line("", "seed", "largest logit", "steps above 105", "clipped", "held out")
    ]
    for name, of_seeds in runs.items():
        for seed, run in enumerate(of_seeds):
            above, clipped = np.sum(run.peaks > TOLERATED), f"{run.clipped.mean():.0%}"
            peak, loss = f"{run.peaks.max():.1f}", f"{run.held_out:.3f}"
            lines.append(line(name, seed, peak, above, clipped, loss))
        losses = [run.held_out for run in of_seeds]
        lines.append(f"{name:<17} loss {np.mean(losses):.3f} ± {np.std(losses):.3f}")
    return "\n".join(lines)


NOTES = """
The largest logit is that of any head in any step, clipped the fraction of steps with a
head above 100. Loss is of the held-out text after the last step, in nats per character;
± is the standard deviation of seeds."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="tens of steps")
    parser.add_argument("--seeds", type=int, default=5, help="networks of each method")
    parser.add_argument("--out", type=Path, default="results/muon.png", help="picture")
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed")
    args = parser.parse_args(arguments)
    steps = -(-args.steps // CHUNK) * CHUNK
    steps, seeds = (CHUNK, 1) if args.quick else (steps, args.seeds)
    runs = train(with_rare_as_one(read_corpus()), steps, seeds)
    print(f"\n{report(runs)}\n{NOTES}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    muon_picture.draw(runs, MAX_LOGIT).savefig(args.out, dpi=150)
    print(f"\nLogits and losses are drawn in {args.out}.")


if __name__ == "__main__":
    main()
