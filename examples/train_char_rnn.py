"""Train a character RNN at a learning rate that only a clipped gradient survives.

The setting for which clipping by the norm was proposed: a tanh network unrolled over
96 characters, SGD with momentum at learning rate 1. Four runs start from the same seed
and see the same windows of text; they differ in the clip alone. The text is the help
that ships with CPython, about 0.35 MB of English.

    python examples/train_char_rnn.py            # about a minute on two cores
    python examples/train_char_rnn.py --quick    # a smoke test

Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural
Networks", 2012, arXiv:1211.5063.
"""

import argparse
import functools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from tqdm import tqdm

import optclip

UNITS = 256
WINDOW = 96
BATCH = 32
LEARNING_RATE = 1.0
MOMENTUM = 0.9
CHUNK = 20
TALLEST = 1e5
TEMPERATURE = 0.5

# The threshold decides as much as the kind of clip: by value at 0.001 trains as well.
CLIPS = {
    "no clip": optclip.clip_by_global_norm(jnp.inf),
    "by value, 0.01": optclip.clip_by_value(0.01),
    "by norm of each leaf, 0.1": optclip.clip_by_norm(0.1),
    "by global norm, 0.25": optclip.clip_by_global_norm(0.25),
}
# Okabe and Ito's colours, told apart in print and by colour-blind eyes. Runs that can
# coincide are a dark broken line on a light wide one.
STYLES = (("#E69F00", "-"), ("#D55E00", "--"), ("#0072B2", "--"), ("#56B4E9", "-"))

Params = dict[str, jax.Array]


class Corpus(NamedTuple):
    """A text as numbers, and what its letter frequencies alone can predict."""

    alphabet: str
    train: jax.Array
    held_out: jax.Array
    unigram_loss: float


class Trace(NamedTuple):
    """What is logged of each step."""

    loss: jax.Array
    norm_before: jax.Array
    norm_after: jax.Array
    clip_rate: jax.Array


class Run(NamedTuple):
    """A finished training run."""

    clip: str
    params: Params
    trace: Trace
    held_out_loss: float


def read_corpus() -> Corpus:
    """CPython's help, the last tenth held out, lines kept and indentation dropped.

    Topics repeat each other's paragraphs; each is taken once, for else the network
    would be tested on what it was trained on.
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


@jax.jit
def held_out_loss(params: Params, text: jax.Array) -> jax.Array:
    """The loss on all of a text, cut into windows of the length trained on."""
    whole = len(text) // (WINDOW + 1) * (WINDOW + 1)
    return mean_loss(params, text[:whole].reshape(-1, WINDOW + 1))


def clipped_sgd(clip: optax.GradientTransformation) -> optax.GradientTransformation:
    """SGD behind a clip, with a clip at infinity on each side of it, to measure."""
    return optax.chain(
        optclip.clip_by_global_norm(jnp.inf, name="before"),
        clip,
        optclip.clip_by_global_norm(jnp.inf, name="after"),
        optax.sgd(LEARNING_RATE, momentum=MOMENTUM),
    )


def train(clip: str, corpus: Corpus, steps: int, seed: int) -> Run:
    """Train with one clip, behind a progress bar.

    Many steps run in one compiled call, so the bar costs a transfer each `CHUNK` steps.
    """
    optimizer = clipped_sgd(CLIPS[clip])

    def step(carry: Any, key: jax.Array) -> tuple[Any, Trace]:
        """Compute the gradients, clip them and descend, apply."""
        params, opt_state = carry
        windows = draw_windows(corpus.train, key)
        loss, grads = jax.value_and_grad(mean_loss)(params, windows)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        seen = optclip.metrics(opt_state)
        trace = Trace(loss, seen["before/norm"], seen["after/norm"], seen["clip/rate"])
        return (params, opt_state), trace

    run_chunk = jax.jit(functools.partial(jax.lax.scan, step))
    init_key, data_key = jax.random.split(jax.random.key(seed))
    params = init_params(init_key, len(corpus.alphabet))
    carry = params, optimizer.init(params)
    keys = jax.random.split(data_key, steps)
    traces = []
    with tqdm(total=steps, desc=f"{clip:<25}", unit="step") as bar:
        for start in range(0, steps, CHUNK):
            carry, trace = run_chunk(carry, keys[start : start + CHUNK])
            traces.append(jax.device_get(trace))
            loss, norm, _, rate = (float(values[-1]) for values in traces[-1])
            bar.set_postfix_str(f"loss {loss:.2f}, norm {norm:.2f}, clipped {rate:.0%}")
            bar.update(len(trace.loss))
    trace = jax.tree.map(lambda *parts: np.concatenate(parts), *traces)
    params, _ = carry
    return Run(clip, params, trace, float(held_out_loss(params, corpus.held_out)))


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


def sample_text(run: Run, corpus: Corpus, seed: int) -> str:
    """300 characters from a trained network, as after a line break."""
    keys = jax.random.split(jax.random.key(seed), 300)
    letters = generate(run.params, jnp.array(corpus.alphabet.index("\n")), keys)
    return "".join(corpus.alphabet[i] for i in letters.tolist())


def report(runs: Sequence[Run], corpus: Corpus) -> str:
    """The table: how each run ended on the held-out text."""
    lines = [f"{'clip':<25} {'loss, nats':>10} {'bits/char':>10} diverged clip rate"]
    for run in runs:
        loss = run.held_out_loss
        diverged = "no" if loss < corpus.unigram_loss else "yes"
        lines.append(
            f"{run.clip:<25} {loss:10.3f} {loss / math.log(2):10.3f} {diverged:>8}"
            f" {run.trace.clip_rate[-1]:9.0%}"
        )
    lines += [
        "Loss is of the held-out text after the last step. A run diverged if it is NaN",
        f"or above the {corpus.unigram_loss:.3f} nats of letter frequencies alone.",
        "Clip rate is the share of steps in which the clip changed the gradient.",
    ]
    return "\n".join(lines)


def draw_figure(runs: Sequence[Run], corpus: Corpus) -> Figure:
    """The loss of all runs above, and below the norms of each before and after.

    A figure without pyplot needs no display. Of lines that coincide the upper is thin.
    """
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 1)
    draw_losses(figure.add_subplot(grid[0]), runs, corpus)
    panels = grid[1].subgridspec(1, len(runs)).subplots(sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, runs, strict=True):
        axes.plot(run.trace.norm_before, color="0.65", lw=2.5, label="before the clip")
        axes.plot(run.trace.norm_after, color="0", lw=0.9, label="after the clip")
        axes.set_title(run.clip, fontsize="medium")
        axes.locator_params(axis="x", nbins=2)
        axes.set_ylim(1e-2, TALLEST)
        if (peak := np.nanmax(run.trace.norm_before)) > TALLEST:
            axes.text(
                0.5, 0.9, f"up to {peak:.0e}", transform=axes.transAxes, ha="right"
            )
    panels[0].set_ylabel("gradient norm")
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    for axes in figure.get_axes():
        axes.set(xlabel="step", xlim=(0, len(runs[0].trace.loss)), yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    figure.get_axes()[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    return figure


def draw_losses(axes: Axes, runs: Sequence[Run], corpus: Corpus) -> None:
    for run, (colour, style) in zip(runs, STYLES, strict=True):
        width, order = (3, 1) if style == "-" else (1.3, 2)
        label = run.clip if np.isfinite(run.held_out_loss) else f"{run.clip}, then NaN"
        axes.plot(
            run.trace.loss, color=colour, ls=style, lw=width, zorder=order, label=label
        )
    axes.axhline(corpus.unigram_loss, color="0", lw=0.8, ls=":")
    axes.text(
        1.01, corpus.unigram_loss, "letter\nfrequencies\nalone", va="center",
        fontsize="small", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set_ylabel("training loss, nats per character")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--out", type=Path, default="results/char_rnn.png")
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    args = parser.parse_args(arguments)
    corpus = read_corpus()
    steps = CHUNK if args.quick else args.steps
    runs = [train(clip, corpus, steps, args.seed) for clip in CLIPS]
    print(f"\n{report(runs, corpus)}")
    best = min(runs, key=lambda run: np.nan_to_num(run.held_out_loss, nan=np.inf))
    print(f"\nA sample of the best run, {best.clip}, at temperature {TEMPERATURE}:")
    print(sample_text(best, corpus, args.seed))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw_figure(runs, corpus).savefig(args.out, dpi=150)
    print(f"\nLosses and norms are drawn in {args.out}.")


if __name__ == "__main__":
    main()
