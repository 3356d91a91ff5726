"""Train character RNNs over a range of learning rates, with and without clipping.

This is the setting for which norm clipping was proposed: a tanh network unrolled over
64 characters, trained by SGD with momentum. The text is the help that ships with
CPython, about 0.35 MB of English.

1. Clean data: how robust is training to the learning rate? An unclipped network learns
   up to some rate and diverges at twice that rate. Clipping moves this edge up.
2. Three of 300 batches are bad: their gradients are a thousand times too large.
   Clipping or skipping such steps helps, while no learning rate does.

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
CHUNK = 20  # Steps per call of the compiled program.
CLOSE = 0.2  # Nats.
TEMPERATURE = 0.5

Params = dict[str, jax.Array]
Optimizer = optax.GradientTransformation


def clip_before(clip: Optimizer) -> Callable[[Optimizer], Optimizer]:
    """Return a function that clips the gradients of an optimizer."""
    return lambda optimizer: optax.chain(clip, optimizer)


METHODS = {
    # An infinite threshold records norms and clips nothing.
    "unclipped": clip_before(optclip.clip_by_global_norm(jnp.inf)),
    "value 0.001": clip_before(optclip.clip_by_value(0.001)),
    "global 0.25": clip_before(optclip.clip_by_global_norm(0.25)),
    "leaf 0.1": clip_before(optclip.clip_by_norm(0.1)),
    "adagc": clip_before(optclip.recipes.adagc()),
    "skip above 10": lambda optimizer: optclip.skip(optimizer, max_norm=10.0),
}


class Experiment(NamedTuple):
    """Hold the methods to try at all learning rates."""

    title: str
    methods: Sequence[str]
    rates: np.ndarray
    bad_batches: int


GUARDS = ["unclipped", "leaf 0.1", "skip above 10"]
EXPERIMENTS = (
    Experiment("Clean data", [*METHODS][:5], 2.0 ** np.arange(-4, 4), bad_batches=0),
    Experiment("Three bad batches", GUARDS, 4.0 ** np.arange(-4.5, 1), bad_batches=3),
)


class Corpus(NamedTuple):
    """Hold a text as integers, and the loss that letter frequencies reach on it."""

    alphabet: str
    train: jax.Array
    held_out: jax.Array
    unigram_loss: float  # In nats per held-out character.


class Sweep(NamedTuple):
    """Hold the results of a method: a row per learning rate, a column per seed."""

    method: str
    rates: np.ndarray
    losses: np.ndarray  # On the held-out text; inf if NaN.
    clip_rates: np.ndarray  # The fraction of clipped or skipped steps.
    params: Params


def read_corpus() -> Corpus:
    """Read CPython's help without indentation, and hold out its last tenth.

    Topics repeat each other's paragraphs. Each paragraph is used once, so that the
    held-out text does not occur in the training text.
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
    """Return windows from anywhere in the text, with one more letter to predict."""
    starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - WINDOW)
    return text[starts + jnp.arange(WINDOW + 1)]


def init_params(key: jax.Array, letters: int, units: int = UNITS) -> Params:
    """Initialize a network that is stable before training."""
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
    """Return the next hidden state twice, as carry and output of `jax.lax.scan`."""
    drive = params["embed"][letter] + hidden @ params["recur"] + params["bias"]
    hidden = jnp.tanh(drive)
    return hidden, hidden


def logits_of(params: Params, hidden: jax.Array) -> jax.Array:
    return hidden @ params["head"] + params["head_bias"]


def mean_loss(params: Params, windows: jax.Array) -> jax.Array:
    """Return the cross-entropy of the next character, in nats, from a zero state."""
    inputs, targets = windows[:, :-1].T, windows[:, 1:].T
    start = jnp.zeros((len(windows), UNITS))
    _, hidden = jax.lax.scan(functools.partial(advance, params), start, inputs)
    logits = logits_of(params, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def batch_loss(params: Params, corpus: Corpus, key: jax.Array, bad: Any) -> jax.Array:
    """Return the loss of a batch; if bad, the sum instead of the mean, on noise."""
    text_key, noise_key = jax.random.split(key)
    text = draw_windows(corpus.train, text_key)
    noise = jax.random.randint(noise_key, text.shape, 0, len(corpus.alphabet))
    loss = mean_loss(params, jnp.where(bad, noise, text))
    return loss * jnp.where(bad, BATCH * WINDOW, 1)


@jax.jit
def held_out_losses(stacked: Params, text: jax.Array) -> jax.Array:
    """Return the loss of each network on a text, in windows of the training length."""
    whole = len(text) // (WINDOW + 1) * (WINDOW + 1)
    windows = text[:whole].reshape(-1, WINDOW + 1)
    return jax.lax.map(lambda params: mean_loss(params, windows), stacked)


def train(
    method: str, experiment: Experiment, corpus: Corpus, steps: int, seeds: int
) -> Sweep:
    """Train one network per learning rate and seed, all in one compiled program.

    Networks with the same seed use the same initial weights and batches.
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
    metrics = optclip.metrics(opt_state).items()
    losses = np.nan_to_num(held_out_losses(params, corpus.held_out), nan=np.inf)
    clip_rates = next(value for name, value in metrics if name.endswith("/rate"))
    losses, clip_rates = (np.reshape(x, (-1, seeds)) for x in (losses, clip_rates))
    return Sweep(method, experiment.rates, losses, clip_rates, params)


@jax.jit
def generate(params: Params, first: jax.Array, keys: jax.Array) -> jax.Array:
    """Sample one letter per key, with each letter as the next input."""

    def draw(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        hidden, letter = carry
        hidden, _ = advance(params, hidden, letter)
        logits = logits_of(params, hidden) / TEMPERATURE
        letter = jax.random.categorical(key, logits)
        return (hidden, letter), letter

    return jax.lax.scan(draw, (jnp.zeros(UNITS), first), keys)[1]


def sample_text(sweep: Sweep, corpus: Corpus) -> str:
    """Sample 300 characters from the best network of a sweep."""
    best = sweep.losses.argmin()
    params = {name: x[best] for name, x in sweep.params.items()}
    keys = jax.random.split(jax.random.key(0), 300)
    letters = generate(params, jnp.array(corpus.alphabet.index("\n")), keys)
    return "".join(corpus.alphabet[i] for i in letters.tolist())


def span(rates: np.ndarray) -> str:
    texts = [str(Fraction(float(rate))) for rate in rates]
    return f"{texts[0]} to {texts[-1]}" if texts else "none"


def report(sweeps: Sequence[Sweep], corpus: Corpus) -> str:
    """Format a table with a row per method."""
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
"Lowest loss" is measured on held-out text after the last step, in nats
per character: the mean over seeds at the best rate. "Clipped" is the fraction of
clipped steps at that rate. "Close at" lists the rates with a loss at most {} nats
above the lowest of the table, and "learns at" those at which all seeds end below
{:.3f}, the loss of letter frequencies."""


def main(arguments: Sequence[str] | None = None) -> None:
    # Not importable when this module is imported as `examples.train_char_rnn`.
    import char_rnn_plot

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps per network")
    parser.add_argument("--seeds", type=int, default=3, help="networks per rate")
    parser.add_argument("--out", type=Path, default="results/char_rnn.png", help="plot")
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
    char_rnn_plot.draw(results, corpus.unigram_loss).savefig(args.out)
    print(f"\nThe plot is in {args.out}.")


if __name__ == "__main__":
    main()
