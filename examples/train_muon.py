"""Train small transformers with Muon, with and without QK-Clip.

Steps of Muon are equally large in every direction, so the weights of queries and keys
grow, and with them the attention logits. QK-Clip runs after the step: it scales down
the weights of each head whose largest logit is above 100.

Each seed trains twice, from the same weights and on the same batches. The weights of
queries and keys start at twice their usual size, so that logits grow within hundreds of
steps as they do within thousands in a large model.

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
import muon_plot
import numpy as np
import optax
from tqdm import tqdm
from train_char_rnn import Corpus, read_corpus

import optclip
from optclip.functional import max_attention_logit

WIDTH, BLOCKS, FEATURES = 64, 2, 16  # Four query heads; two share a key head.
WINDOW, BATCH, RARE, GAIN = 128, 32, 300, 2.0
RATE, ADAM_RATE, MAX_LOGIT, TOLERATED = 0.1, 3e-3, 100.0, 105.0
CHUNK = 10  # Steps per call of the compiled program.
# An infinite threshold clips nothing.
METHODS = {"Muon": np.inf, "Muon and QK-Clip": MAX_LOGIT}

Params = dict[str, Any]


class Run(NamedTuple):
    """Hold the final loss of a network, and the measurements of each step."""

    held_out: float
    losses: np.ndarray
    peaks: np.ndarray  # The largest attention logit of the batch over all heads.
    clipped: np.ndarray  # Whether any head was clipped.


def with_rare_as_one(corpus: Corpus) -> Corpus:
    """Replace all rare characters by a single one.

    Otherwise, the largest logit of a batch depends on the rare characters in it.
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
    """Initialize matrices that preserve the scale, except for queries and keys."""
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
    """Apply a rotary embedding."""
    _, window, _, features = x.shape
    speeds = 100.0 ** -jnp.linspace(0, 1, features // 2)
    angles = jnp.arange(window)[:, None, None] * speeds
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    attn: Params, x: jax.Array, window: int, features: int
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention, and the largest logit of each head."""

    def per_head(name: str) -> jax.Array:
        heads = attn[name].shape[1] // features
        return (x @ attn[name]).reshape(-1, window, heads, features)

    query, key, value = (
        rotated(per_head("query")),
        rotated(per_head("key")),
        per_head("value"),
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    largest = max_attention_logit(query, key, mask="causal")
    return mixed.reshape(x.shape) @ attn["out"], largest


def mean_loss(
    params: Params, windows: jax.Array, features: int = FEATURES
) -> tuple[jax.Array, Params]:
    """Return the mean cross-entropy, and the largest logits per layer."""
    # All characters on one axis, since XLA on CPU differentiates batches slowly.
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
    """Build Muon for the matrices of the blocks, and Adam for all others."""

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
    """Chain Muon and QK-Clip, which must come after the learning rate."""
    return optax.chain(
        muon(optax.linear_schedule(RATE, 0.0, steps)),
        optclip.clip_attention_logits(max_logit, heads_of(params)),
    )


def trainer(corpus: Corpus, steps: int) -> tuple[Any, Any]:
    """Return functions that initialize a network and train it for a few steps."""

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
                grads, state, params, logits=largest
            )
            peak = jnp.max(jnp.stack([*largest.values()]))
            record = loss, peak, peak > max_logit
            return (optax.apply_updates(params, updates), state), record

        return jax.lax.scan(step, carry, numbers)

    return jax.jit(start), run


@jax.jit
def held_out_loss(params: Params, text: jax.Array) -> jax.Array:
    whole = len(text) // (WINDOW + 1) * (WINDOW + 1)
    return mean_loss(params, text[:whole].reshape(-1, WINDOW + 1))[0]


def train(corpus: Corpus, steps: int, seeds: int) -> dict[str, list[Run]]:
    """Train a network per method and seed; the seed determines the batches."""
    start, run = trainer(corpus, steps)
    runs: dict[str, list[Run]] = {name: [] for name in METHODS}
    with tqdm(total=len(METHODS) * seeds * steps, unit="step") as bar:
        for seed in range(seeds):
            for name, max_logit in METHODS.items():
                bar.set_description(f"seed {seed}, {name:<16}")
                carry, records = start(seed), []
                for numbers in np.arange(steps).reshape(-1, CHUNK):
                    carry, record = run(seed, max_logit, carry, numbers)
                    records.append(jax.device_get(record))
                    bar.update(CHUNK)
                held_out = float(held_out_loss(carry[0], corpus.held_out))
                columns = map(np.concatenate, zip(*records, strict=True))
                runs[name].append(Run(held_out, *columns))
    return runs


def report(runs: dict[str, list[Run]]) -> str:
    """Format a table with a row per seed, and the mean and deviation of the losses."""
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
"Largest logit" is the maximum over heads and steps; "clipped" is the
fraction of steps with a head above 100. The loss is measured on held-out text after
the last step, in nats per character: mean ± standard deviation over the seeds."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=250, help="steps per network, a multiple of 10"
    )
    parser.add_argument("--seeds", type=int, default=5, help="networks per method")
    parser.add_argument("--out", type=Path, default="results/muon.png", help="plot")
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed")
    args = parser.parse_args(arguments)
    steps = -(-args.steps // CHUNK) * CHUNK
    steps, seeds = (CHUNK, 1) if args.quick else (steps, args.seeds)
    runs = train(with_rare_as_one(read_corpus()), steps, seeds)
    print(f"\n{report(runs)}\n{NOTES}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    muon_plot.draw(runs, MAX_LOGIT).savefig(args.out)
    print(f"\nThe plot is in {args.out}.")


if __name__ == "__main__":
    main()
