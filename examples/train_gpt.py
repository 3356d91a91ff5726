"""Train a small GPT on text in which bursts of corrupted batches occur.

The model has 2 blocks and a width of 48, and predicts the next character of the help
that ships with CPython. AdamW takes 400 steps in float32. Three bursts of 16 batches
consist of random characters, as after a damaged file. Four runs per seed see the same
weights and batches:

1. unclipped;
2. clipped by global norm at the best of several thresholds (`--search` tries them);
   optax and optclip give the same table;
3. optax's way to skip, `skip_large_updates` in `MultiSteps`, around the second run's
   optimizer. It compares the norm with a fixed threshold, the best of several. The
   first 20 steps are never skipped: their norms are larger, and a run whose first steps
   are all skipped never begins;
4. `optclip.skip` around the second run's optimizer. It skips steps whose loss is more
   than 6 standard deviations above the mean of recent losses, so it learns its
   threshold.

It prints, for a learning rate of 0.01 (mean ± standard deviation of three seeds):

                                             after bursts    held-out text  skipped
    unclipped                               3.032 ± 0.080   2.653 ± 0.046        0
    clipping to 0.3 (either library)        2.848 ± 0.086   2.546 ± 0.028        0
    the same, optax skips norms above 1.5   2.557 ± 0.021   2.462 ± 0.017       49
    the same in optclip.skip                2.555 ± 0.024   2.462 ± 0.018       48

If optax skips norms above 2, it applies bad batches of one seed: 2.496. If
it may also skip in the first 20, 2.535 at best, with a norm of 3. `optclip.skip` alone
gives 2.603 ± 0.029 and 2.499 ± 0.023. At a learning rate of 0.003, clipping at its best
threshold reaches 2.546 nats on held-out text, and with `optclip.skip` 2.493; at 0.03 it
reaches 2.700, and with `optclip.skip` 2.580. Without bursts (`BURST_STARTS = ()`)
`optclip.skip` skips no step, and both end at 2.458 ± 0.018.

    python examples/train_gpt.py             # under two minutes on two cores
    python examples/train_gpt.py --quick     # a smoke test
    python examples/train_gpt.py --search    # tune each run: about ten minutes
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optclip
from optclip import thresholds

WIDTH, BLOCKS, HEADS, WINDOW, BATCH = 48, 2, 4, 64, 8
STEPS, SEEDS, CHUNK = 400, 3, 20
RATE, MAX_NORM = 1e-2, 0.3  # The best of `--search`.
LARGE, FIRST = 1.5, 20  # `skip_large_updates` skips larger norms after this step.
BURST_STARTS, BURST = (0.375, 0.575, 0.775), 0.04  # As fractions of the steps.
AFTER = 16  # Steps after a burst whose loss the table reports.

Params = dict[str, Any]


class Corpus(NamedTuple):
    """Hold a text as integers; the last tenth is held out."""

    train: jax.Array
    held_out: jax.Array
    letters: int


class Run(NamedTuple):
    """Hold losses and records of one optimizer, with a row per seed."""

    losses: np.ndarray  # On the batch of each step.
    held_out: np.ndarray
    thresholds: np.ndarray  # For the loss; NaN if none is learned.
    skipped: np.ndarray  # Whether each step was skipped.


def init_params(key: jax.Array, letters: int) -> Params:
    keys = iter(jax.random.split(key, 4 * BLOCKS + 2))

    def matrix(*shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(next(keys), shape)

    def block() -> Params:
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
            "attention_gain": jnp.ones(WIDTH),
            "mlp_gain": jnp.ones(WIDTH),
        }

    return {
        "embedding": matrix(letters, WIDTH),
        "positions": matrix(WINDOW, WIDTH),
        "blocks": [block() for _ in range(BLOCKS)],
        "gain": jnp.ones(WIDTH),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def mean_loss(params: Params, windows: jax.Array) -> jax.Array:
    """Return the cross-entropy of each next character, in nats."""
    x = params["embedding"][windows[:, :-1]] + params["positions"]
    for block in params["blocks"]:
        qkv = rms_norm(x, block["attention_gain"]) @ block["qkv"]
        q, k, v = (
            part.reshape(*part.shape[:2], HEADS, -1) for part in jnp.split(qkv, 3, -1)
        )
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += attended.reshape(x.shape) @ block["out"]
        hidden = jax.nn.gelu(rms_norm(x, block["mlp_gain"]) @ block["up"])
        x += hidden @ block["down"]
    logits = rms_norm(x, params["gain"]) @ params["embedding"].T
    targets = windows[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def draw_batch(key: jax.Array, corpus: Corpus, corrupted: jax.Array) -> jax.Array:
    """Return windows from anywhere in the text, or random characters."""
    text_key, noise_key = jax.random.split(key)
    starts = jax.random.randint(text_key, (BATCH, 1), 0, len(corpus.train) - WINDOW)
    windows = corpus.train[starts + jnp.arange(WINDOW + 1)]
    noise = jax.random.randint(noise_key, windows.shape, 0, corpus.letters)
    return jnp.where(corrupted, noise, windows)


def corrupted_steps(steps: int) -> np.ndarray:
    """Return whether the batch of each step is corrupted."""
    corrupted = np.zeros(steps, bool)
    for start in BURST_STARTS:
        first = int(start * steps)
        corrupted[first : first + max(1, int(BURST * steps))] = True
    return corrupted


def adamw(steps: int, rate: float = RATE) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps)
    return optax.adamw(schedule, b2=0.95, weight_decay=0.1)


def guarded(optimizer: optax.GradientTransformation) -> Any:
    """Skip the steps of an optimizer whose loss is unusual."""
    return optclip.skip(optimizer, max_loss=thresholds.mean_plus_std(6.0, window=64))


def guarded_by_optax(optimizer: optax.GradientTransformation, norm: float) -> Any:
    """Skip the steps of an optimizer whose norm is larger, except the first steps."""

    def is_large(updates: Any, step: jax.Array, params: Any) -> Any:
        limit = jnp.where(step < FIRST, jnp.inf, norm**2)
        return optax.skip_large_updates(updates, step, params, limit)

    options: Any = {"every_k_schedule": 1, "should_skip_update_fn": is_large}
    return optax.MultiSteps(optimizer, **options).gradient_transformation()


def optimizers(steps: int) -> dict[str, Any]:
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw(steps))
    return {
        "unclipped": adamw(steps),
        f"clipping to {MAX_NORM} (either library)": clipped,
        f"the same, optax skips norms above {LARGE}": guarded_by_optax(clipped, LARGE),
        "the same in optclip.skip": guarded(clipped),
    }


def recorded(name: str, state: Any) -> tuple[Any, Any]:
    """Return the learned threshold for the loss, and whether the step was skipped."""
    if isinstance(state, optax.MultiStepsState):
        skip_state: Any = state.skip_state
        return jnp.nan, skip_state["should_skip"]
    if "optclip.skip" not in name:
        return jnp.nan, False
    record = optclip.metrics(state)
    return record["skip/loss_threshold"], record["skip/consecutive"] > 0


def train(name: str, tx: Any, corpus: Corpus, steps: int, seeds: int) -> Run:
    """Train a network for each seed, all in one compiled program."""
    tx = optax.with_extra_args_support(tx)
    corrupted = corrupted_steps(steps)
    keys = jax.random.split(jax.random.key(0), seeds)

    @jax.jit
    @jax.vmap
    def start(key: jax.Array) -> Any:
        params = init_params(key, corpus.letters)
        return params, tx.init(params)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def advance(key: jax.Array, carry: Any, inputs: Any) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            params, state = carry
            number, is_corrupted = inputs
            batch = draw_batch(jax.random.fold_in(key, number), corpus, is_corrupted)
            loss, grads = jax.value_and_grad(mean_loss)(params, batch)
            updates, state = tx.update(grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)
            return (params, state), (loss, *recorded(name, state))

        return jax.lax.scan(step, carry, inputs)

    carry, records = start(keys), []
    with tqdm(total=steps, desc=f"{name:<38}", unit="step") as bar:
        for first in range(0, steps, CHUNK):
            numbers = np.arange(first, min(first + CHUNK, steps))
            carry, record = advance(keys, carry, (numbers, corrupted[numbers]))
            records.append(jax.device_get(record))
            bar.set_postfix_str(f"loss {records[-1][0][:, -1].mean():.2f}")
            bar.update(len(numbers))
    losses, limits, skipped = (
        np.concatenate(parts, axis=1) for parts in zip(*records, strict=True)
    )
    return Run(losses, held_out_losses(carry[0], corpus.held_out), limits, skipped)


@jax.jit
def held_out_losses(stacked: Params, text: jax.Array) -> jax.Array:
    """Return the loss of each network on the held-out text."""
    whole = len(text) // (WINDOW + 1) * (WINDOW + 1)
    windows = text[:whole].reshape(-1, WINDOW + 1)
    return jax.lax.map(lambda params: mean_loss(params, windows), stacked)


def after_bursts(steps: int) -> np.ndarray:
    """Return whether each step follows a burst closely and has an intact batch."""
    corrupted = corrupted_steps(steps)
    recent = np.convolve(corrupted, np.ones(AFTER + 1))[:steps] > 0
    return recent & ~corrupted


def mean_and_deviation(losses: np.ndarray) -> str:
    """Format the mean over seeds and their standard deviation."""
    return f"{losses.mean():.3f} ± {losses.std():.3f}"


def report(runs: Mapping[str, Run]) -> str:
    """Return a table with a row for each run."""
    line = "{:<38} {:>15} {:>15} {:>8}".format
    rows = [line("", "after bursts", "held-out text", "skipped")]
    for name, run in runs.items():
        recent = run.losses[:, after_bursts(run.losses.shape[1])].mean(axis=1)
        cells = mean_and_deviation(recent), mean_and_deviation(run.held_out)
        rows.append(line(name, *cells, f"{run.skipped.sum(axis=1).mean():.0f}"))
    return "\n".join(rows)


def search(corpus: Corpus, steps: int, seeds: int) -> None:
    """Print the table of all runs for each learning rate and threshold."""
    for rate in (3e-3, 1e-2, 3e-2):
        candidates = {"unclipped": adamw(steps, rate)}
        for norm in (0.1, 0.3, 1.0, 3.0):
            clip = optax.clip_by_global_norm(norm)
            candidates[f"optax {norm}"] = optax.chain(clip, adamw(steps, rate))
        for norm in (1.0, 1.5, 2.0, 2.5):
            optimizer = guarded_by_optax(candidates["optax 0.3"], norm)
            candidates[f"optax 0.3, skip above {norm}"] = optimizer
        candidates["optclip.skip, unclipped"] = guarded(adamw(steps, rate))
        candidates["optclip.skip, optax 0.3"] = guarded(candidates["optax 0.3"])
        runs = {n: train(n, tx, corpus, steps, seeds) for n, tx in candidates.items()}
        print(f"\nLearning rate {rate}:\n{report(runs)}\n")


NOTES = f"""
Losses are in nats per character: mean ± standard deviation over the seeds. "After
bursts" is the training loss of the {AFTER} steps after each burst. "Skipped" counts the
skipped steps; {{}} batches were corrupted."""


def read_corpus() -> Corpus:
    """Return the text that the recurrent networks of `train_char_rnn.py` learn too."""
    import train_char_rnn

    text = train_char_rnn.read_corpus()
    return Corpus(text.train, text.held_out, len(text.alphabet))


def main(arguments: Sequence[str] | None = None) -> None:
    # Not importable when this module is imported as `examples.train_gpt`.
    import gpt_plot

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="networks per run")
    parser.add_argument("--out", type=Path, default="results/gpt.png", help="plot")
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed")
    parser.add_argument("--search", action="store_true", help="tune all runs instead")
    args = parser.parse_args(arguments)
    steps, seeds = (2 * CHUNK, 1) if args.quick else (args.steps, args.seeds)
    corpus = read_corpus()
    if args.search:
        search(corpus, steps, seeds)
        return
    txs = optimizers(steps)
    runs = {name: train(name, tx, corpus, steps, seeds) for name, tx in txs.items()}
    print(f"\n{report(runs)}")
    print(NOTES.format(corrupted_steps(steps).sum()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    gpt_plot.draw(runs, corrupted_steps(steps)).savefig(args.out)
    print(f"\nThe plot is in {args.out}.")


if __name__ == "__main__":
    main()
