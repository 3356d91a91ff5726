"""Train character RNNs over a range of learning rates, with and without clips.

The setting for which clipping by the norm was proposed: a tanh network unrolled over 64
characters, SGD with momentum. The text is the help that ships with CPython, about
0.35 MB of English.

1. Clean data: how far can the best learning rate be missed? Without a clip a network
   learns up to some rate and is lost at twice that rate. A clip moves this edge up.
2. Three of 300 batches are bad: their gradients are a thousand times too large. No
   learning rate helps against that. A clip does, or leaving out such steps.

    python examples/train_char_rnn.py            # under two minutes on two cores
    python examples/train_char_rnn.py --quick    # a smoke test

Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural
Networks", 2012, arXiv:1211.5063.
"""

import argparse
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optclip

UNITS, WINDOW, BATCH, MOMENTUM = 64, 64, 16, 0.9
CHUNK = 20  # Steps in one call of the compiled program.
CLOSE = 0.2  # Nats.
TEMPERATURE = 0.5

Params = dict[str, jax.Array]
Optimizer = optax.GradientTransformation


def behind(clip: Optimizer) -> Callable[[Optimizer], Optimizer]:
    """The usual place of a clip: before the optimizer, where it clips gradients."""
    return lambda optimizer: optax.chain(clip, optimizer)


METHODS = {
    # A clip at infinity measures and touches nothing.
    "no clip": behind(optclip.clip_by_global_norm(jnp.inf)),
    "value 0.001": behind(optclip.clip_by_value(0.001)),
    "global 0.25": behind(optclip.clip_by_global_norm(0.25)),
    "leaf 0.1": behind(optclip.clip_by_norm(0.1)),
    "adagc": behind(optclip.recipes.adagc()),
    "skip above 10": lambda optimizer: optclip.skip(optimizer, max_norm=10.0),
}


class Experiment(NamedTuple):
    """Methods, each to be tried at all learning rates."""

    title: str
    methods: Sequence[str]
    rates: np.ndarray
    bad_batches: int


GUARDS = ["no clip", "leaf 0.1", "skip above 10"]
EXPERIMENTS = (
    Experiment("Clean data", [*METHODS][:5], 2.0 ** np.arange(-4, 4), bad_batches=0),
    Experiment("Three bad batches", GUARDS, 4.0 ** np.arange(-4.5, 1), bad_batches=3),
)


class Corpus(NamedTuple):
    """A text as numbers, and what its letter frequencies alone can predict."""

    alphabet: str
    train: jax.Array
    held_out: jax.Array
    unigram_loss: float


class Sweep(NamedTuple):
    """What a method ended with: a row for each learning rate, a column for each seed."""

    method: str
    rates: np.ndarray
    losses: np.ndarray  # Of the held-out text; inf if NaN.
    clip_rates: np.ndarray
    params: Params


def read_corpus() -> Corpus:
    """CPython's help, the last tenth held out, lines kept and indentation dropped.

    Topics repeat each other's paragraphs. Each is taken once, or the network would be
    tested on what it was trained on.
    """
    lines = "\n\n".join(topics.values()).splitlines()
    paragraphs = "\n".join(" ".join(line.split()) for line in lines).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))
    alphabet = "".join(sorted(set(text)))
    codes = jnp.array([alphabet.index(character) for character in text])
    cut = len(text) * 9 // 10
    counts = Counter(text[:cut])
    total = cut + len(alphabet)
    surprise = [-math.log((counts[c] + 1) / total) for c in text[cut:]]
    return Corpus(alphabet, codes[:cut], codes[cut:], sum(surprise) / len(surprise))


def draw_windows(text: jax.Array, key: jax.Array) -> jax.Array:
    """A batch of windows from anywhere in the text, with one more letter to predict."""
    starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - WINDOW)
    return text[starts + jnp.arange(WINDOW + 1)]


def init_params(key: jax.Array, letters: int, units: int = UNITS) -> Params:
    """Weights of a network that starts out stable: what diverges later is training."""
    embed, recur, head = jax.random.split(key, 3)
    scale = units**-0.5
    return {
        "embed": jax.random.normal(embed, (letters, units)),
        "recur": jax.random.normal(recur, (units, units)) * scale / 2,
        "bias": jnp.zeros(units),
        "head": jax.random.normal(head, (units, letters)) * scale,
        "head_bias": jnp.zeros(letters),
    }


def advance(
    params: Params, hidden: jax.Array, letter: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The hidden state after one more letter, twice, as `jax.lax.scan` wants it."""
    drive = params["embed"][letter] + hidden @ params["recur"] + params["bias"]
    hidden = jnp.tanh(drive)
    return hidden, hidden


def logits_of(params: Params, hidden: jax.Array) -> jax.Array:
    return hidden @ params["head"] + params["head_bias"]


def mean_loss(params: Params, windows: jax.Array) -> jax.Array:
    """Cross-entropy of each next character, in nats, from an empty hidden state."""
    inputs, targets = windows[:, :-1].T, windows[:, 1:].T
    start = jnp.zeros((len(windows), UNITS))
    _, hidden = jax.lax.scan(functools.partial(advance, params), start, inputs)
    logits = logits_of(params, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def batch_loss(params: Params, corpus: Corpus, key: jax.Array, bad: Any) -> jax.Array:
    """The loss of a batch. A bad one is noise, and its loss is a sum, not a mean."""
    text_key, noise_key = jax.random.split(key)
    text = draw_windows(corpus.train, text_key)
    noise = jax.random.randint(noise_key, text.shape, 0, len(corpus.alphabet))
    loss = mean_loss(params, jnp.where(bad, noise, text))
    return loss * jnp.where(bad, BATCH * WINDOW, 1)


@jax.jit
def held_out_losses(stacked: Params, text: jax.Array) -> jax.Array:
    """The loss of each network on a whole text, in windows of the length trained on."""
    whole = len(text) // (WINDOW + 1) * (WINDOW + 1)
    windows = text[:whole].reshape(-1, WINDOW + 1)
    return jax.lax.map(lambda params: mean_loss(params, windows), stacked)


def train(
    method: str, experiment: Experiment, corpus: Corpus, steps: int, seeds: int
) -> Sweep:
    """Train one network for each learning rate and seed, all in one compiled program.

    Those of one seed start from the same weights and see the same batches.
    """
    rates = jnp.repeat(jnp.asarray(experiment.rates, jnp.float32), seeds)
    keys = jnp.tile(jax.random.split(jax.random.key(0), seeds), len(experiment.rates))
    is_bad = np.zeros(steps, bool)
    is_bad[np.linspace(0, steps, experiment.bad_batches + 2, dtype=int)[1:-1]] = True

    def optimizer(rate: jax.Array) -> Optimizer:
        return METHODS[method](optax.sgd(rate, momentum=MOMENTUM))

    @jax.jit
    @jax.vmap
    def start(rate: jax.Array, key: jax.Array) -> Any:
        params = init_params(key, len(corpus.alphabet))
        return params, optimizer(rate).init(params)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
    def run(rate: jax.Array, key: jax.Array, carry: Any, batches: Any) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            """Compute the gradients, clip them and descend, apply."""
            params, opt_state = carry
            number, bad = batch
            data_key = jax.random.fold_in(key, number)
            loss, grads = jax.value_and_grad(batch_loss)(params, corpus, data_key, bad)
            updates, opt_state = optimizer(rate).update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(step, carry, batches)

    carry = start(rates, keys)
    with tqdm(total=steps, desc=f"{method:<13}", unit="step") as bar:
        for first in range(0, steps, CHUNK):
            now = np.arange(first, min(first + CHUNK, steps))
            carry, losses = run(rates, keys, carry, (now, is_bad[now]))
            learning = int(np.sum(losses[:, -1] < corpus.unigram_loss))
            bar.set_postfix_str(f"{learning} of {len(rates)} networks learn")
            bar.update(len(now))
    params, opt_state = carry
    seen = optclip.metrics(opt_state).items()
    losses = np.nan_to_num(held_out_losses(params, corpus.held_out), nan=np.inf)
    clip_rates = next(value for name, value in seen if name.endswith("/rate"))
    losses, clip_rates = (np.reshape(x, (-1, seeds)) for x in (losses, clip_rates))
    return Sweep(method, experiment.rates, losses, clip_rates, params)


@jax.jit
def generate(params: Params, first: jax.Array, keys: jax.Array) -> jax.Array:
    """One letter for each key, each read back in as the next input."""

    def draw(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        hidden, letter = carry
        hidden, _ = advance(params, hidden, letter)
        logits = logits_of(params, hidden) / TEMPERATURE
        letter = jax.random.categorical(key, logits)
        return (hidden, letter), letter

    return jax.lax.scan(draw, (jnp.zeros(UNITS), first), keys)[1]


def sample_text(sweep: Sweep, corpus: Corpus) -> str:
    """300 characters from the best network of a sweep, as after a line break."""
    best = sweep.losses.argmin()
    params = {name: x[best] for name, x in sweep.params.items()}
    keys = jax.random.split(jax.random.key(0), 300)
    letters = generate(params, jnp.array(corpus.alphabet.index("\n")), keys)
    return "".join(corpus.alphabet[i] for i in letters.tolist())


def span(rates: np.ndarray) -> str:
    shown = [str(Fraction(float(rate))) for rate in rates]
    return f"{shown[0]} to {shown[-1]}" if shown else "none"


def report(sweeps: Sequence[Sweep], corpus: Corpus) -> str:
    """The table of an experiment."""
    line = "{:<13} {:>11} {:>7} {:>7}   {:<14} {}".format
    lines = [line("", "lowest loss", "at rate", "clipped", "close at", "learns at")]
    lowest = min(sweep.losses.mean(axis=1).min() for sweep in sweeps)
    for method, rates, losses, clip_rates, _ in sweeps:
        mean = losses.mean(axis=1)
        best = mean.argmin()
        clipped = f"{clip_rates[best].mean():.0%}"
        close = span(rates[mean < lowest + CLOSE])
        learns = span(rates[(losses < corpus.unigram_loss).all(axis=1)])
        rate = str(Fraction(float(rates[best])))
        lines.append(line(method, f"{mean[best]:.3f}", rate, clipped, close, learns))
    return "\n".join(lines)


NOTES = """
Loss is of the held-out text after the last step, in nats per character, the mean of all
seeds. Clipped is the fraction of the steps at that rate. Close is a loss at most {} nats
above the lowest of the table. The network learns at a rate at which all seeds end below
the {:.3f} nats of letter frequencies alone."""


def main(arguments: Sequence[str] | None = None) -> None:
    import char_rnn_picture  # Here: imported as `examples.train_char_rnn`, none is found.

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of each network")
    parser.add_argument("--seeds", type=int, default=3, help="networks for each rate")
    parser.add_argument(
        "--out", type=Path, default="results/char_rnn.png", help="picture"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed")
    args = parser.parse_args(arguments)
    steps, seeds = (CHUNK, 1) if args.quick else (args.steps, args.seeds)
    corpus = read_corpus()
    results = {}
    for experiment in EXPERIMENTS:
        title, methods, rates, _ = experiment
        print(f"\n{title}, {len(rates)} learning rates, {seeds} seeds:")
        results[title] = [train(m, experiment, corpus, steps, seeds) for m in methods]
        print(f"\n{report(results[title], corpus)}")
    print(NOTES.format(CLOSE, corpus.unigram_loss))
    best = min(results["Clean data"], key=lambda sweep: sweep.losses.min())
    print(f"\nA sample of the best network, {best.method}, temperature {TEMPERATURE}:")
    print(sample_text(best, corpus))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    char_rnn_picture.draw(results, corpus.unigram_loss).savefig(args.out, dpi=150)
    print(f"\nThe losses are drawn in {args.out}.")


if __name__ == "__main__":
    main()
