"""Train recurrent networks with clipping inside the backward pass, after it, or both.

Against exploding gradients, one can clip the gradient of the parameters by its global
norm, or the cotangent of the hidden state at each step and row with `clip_cotangent`.

1. Characters: the network and the text of `train_char_rnn.py`, unrolled over 64 steps.
2. The adding problem: two of 200 random numbers are marked, and the network must output
   their sum after the last. It has ReLUs and a recurrence initialized to the identity.

Each arm searches a grid of learning rates and thresholds on two seeds. Its best setting
then trains five new seeds. Along the runs with global-norm clipping, the gradient is
also computed with clipped cotangents, for the same weights and batches, and compared.

    python examples/train_backward.py            # about half an hour on one core
    python examples/train_backward.py --quick    # a smoke test

Sources: Graves, "Generating Sequences With Recurrent Neural Networks", 2013,
arXiv:1308.0850; Le, Jaitly and Hinton, "A Simple Way to Initialize Recurrent Networks
of Rectified Linear Units", 2015, arXiv:1504.00941.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import backward_plot
import jax
import jax.numpy as jnp
import numpy as np
import optax
from backward_tasks import Params, Task, adding_task, character_task, unroll
from tqdm import tqdm

import optclip

CHUNK = 10  # Steps per call of the compiled program.
SEARCH_SEEDS = 2
STACK = 4  # Networks trained at a time: as many as fit into the cache of a core.
LARGER = 1.01  # A ratio of norms above this is larger than rounding explains.


class Setting(NamedTuple):
    """Hold the hyperparameters of one network, or of several as arrays."""

    rate: Any
    max_norm: Any = np.inf
    max_cotangent: Any = np.inf


class Arm(NamedTuple):
    """Hold the best setting of an arm and its losses."""

    name: str
    setting: Setting
    searched: np.ndarray  # Per rate and seed of the search, at the best thresholds.
    losses: np.ndarray  # Per new seed.


class Comparison(NamedTuple):
    """Compare gradients with and without clipped cotangents, per batch."""

    largest: Any  # The largest unclipped norm of a cotangent.
    norm: Any  # Of the gradient without clipped cotangents.
    clipped: Any  # The fraction of cotangents that are clipped.
    clipped_norm: Any  # Of the gradient with clipped cotangents.
    cosine: Any  # Of the angle between the two gradients.


def gradient(
    task: Task, params: Params, key: jax.Array, max_cotangent: Any
) -> tuple[Params, optclip.typing.CotangentRecord]:
    """Return the gradient of a batch, and the record of its cotangents."""

    def loss(params: Params, probe: Any) -> jax.Array:
        return task.loss(params, key, functools.partial(unroll, max_cotangent, probe))

    return jax.grad(loss, argnums=(0, 1))(params, optclip.cotangent_probe())


def programs(task: Task) -> tuple[Any, Any, Any]:
    """Return functions that initialize, train a few steps, and compare gradients."""

    def optimizer(setting: Setting) -> optax.GradientTransformation:
        clip = optclip.clip_by_global_norm(setting.max_norm)
        return optax.chain(clip, task.optimizer(setting.rate))

    def start(setting: Setting, seed: Any) -> Any:
        params = task.init(jax.random.key(seed))
        return params, optimizer(setting).init(params)

    def run(setting: Setting, seed: Any, carry: Any, numbers: Any) -> Any:
        def step(carry: Any, number: jax.Array) -> Any:
            params, state = carry
            key = jax.random.fold_in(jax.random.key(seed), number)
            grads, _ = gradient(task, params, key, setting.max_cotangent)
            updates, state = optimizer(setting).update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, carry, numbers)[0]

    def compare(seed: Any, params: Params, number: jax.Array) -> Comparison:
        key = jax.random.fold_in(jax.random.key(seed), number)
        grads, unclipped = gradient(task, params, key, np.inf)
        norm = optax.tree.norm(grads)

        def at_threshold(max_cotangent: Any) -> Any:
            clipped, record = gradient(task, params, key, max_cotangent)
            clipped_norm = optax.tree.norm(clipped)
            cosine = optax.tree.vdot(clipped, grads) / (norm * clipped_norm)
            return optclip.metrics(record)["cotangent/fraction"], clipped_norm, cosine

        columns = jax.vmap(at_threshold)(jnp.asarray(task.max_cotangents))
        largest = optclip.metrics(unclipped)["cotangent/largest_norm"]
        return Comparison(largest, norm, *columns)

    return stacked(start), stacked(run), stacked(compare)


def stacked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over networks, `STACK` at a time."""

    @jax.jit
    def each(networks: Any, *common: Any) -> Any:
        return jax.lax.map(lambda x: function(*x, *common), networks, batch_size=STACK)

    return each


def train(
    task: Task, program: Any, settings: Sequence[Setting], seeds: range, compares: bool
) -> tuple[np.ndarray, Comparison | None]:
    """Return the losses of each setting and seed, and compared gradients on request."""
    start, run, compare = program
    networks = [(*setting, seed) for setting in settings for seed in seeds]
    # Padded to full stacks, since each size of a remainder would be compiled.
    full = networks + networks[-1:] * (-len(networks) % STACK)
    *columns, seed = (jnp.asarray(column) for column in zip(*full, strict=True))
    setting, comparisons = Setting(*columns), []
    carry = start((setting, seed))
    with tqdm(total=task.steps, unit="step", desc=f"{len(networks)} networks") as bar:
        for numbers in np.arange(task.steps).reshape(-1, CHUNK):
            if compares:
                comparison = compare((seed, carry[0]), numbers[0])
                comparisons.append(jax.device_get(comparison))
            carry = jax.block_until_ready(run((setting, seed, carry), numbers))
            bar.update(CHUNK)
    losses = np.nan_to_num(task.test_losses(carry[0]), nan=np.inf, posinf=np.inf)
    shape = len(settings), len(seeds)

    def joined(*chunks: np.ndarray) -> np.ndarray:
        series = np.stack(chunks, axis=1)[: len(networks)]
        return series.reshape(*shape, *series.shape[1:])

    compared = jax.tree.map(joined, *comparisons) if compares else None
    return losses[: len(networks)].reshape(shape), compared


def grids(task: Task) -> dict[str, list[Setting]]:
    """Return the settings to search for each arm with at most one kind of clipping."""
    none = (np.inf,)
    thresholds = {
        "unclipped": (none, none),
        "global norm": (task.max_norms, none),
        "cotangent": (none, task.max_cotangents),
    }
    return {
        name: [
            Setting(rate, *clips)
            for *clips, rate in itertools.product(*both, task.rates)
        ]
        for name, both in thresholds.items()
    }


def search(
    task: Task, program: Any, tried: dict[str, list[Setting]], seeds: int
) -> dict[str, tuple[Setting, np.ndarray]]:
    """Return each arm's best setting, and its losses at all rates."""
    flat = [setting for settings in tried.values() for setting in settings]
    losses, _ = train(task, program, flat, range(seeds), compares=False)
    results, first = {}, 0
    for name, settings in tried.items():
        arm_losses = losses[first : first + len(settings)]
        first += len(settings)
        # The bound makes all diverged networks equally bad.
        mean = np.minimum(arm_losses, 2 * task.learned).mean(axis=1)
        best = settings[mean.argmin()]
        same_thresholds = [other[1:] == best[1:] for other in settings]
        results[name] = best, arm_losses[same_thresholds]
    return results


def run_arms(task: Task, search_seeds: int, seeds: int) -> tuple[list[Arm], Comparison]:
    """Search for the best setting of each arm, then train new seeds with it.

    The arm "both" uses the best threshold of global-norm clipping alone.
    """
    program = programs(task)
    best = search(task, program, grids(task), search_seeds)
    pairs = itertools.product(task.max_cotangents, task.rates)
    norm = best["global norm"][0].max_norm
    both = [Setting(rate, norm, cotangent) for cotangent, rate in pairs]
    best |= search(task, program, {"both": both}, search_seeds)
    settings = [setting for setting, _ in best.values()]
    new_seeds = range(100, 100 + seeds)
    losses, comparison = train(task, program, settings, new_seeds, compares=True)
    arms = [
        Arm(name, *result, of_seeds)
        for (name, result), of_seeds in zip(best.items(), losses, strict=True)
    ]
    of_global = list(best).index("global norm")
    return arms, jax.tree.map(lambda x: x[of_global], comparison)


def report(task: Task, arms: Sequence[Arm]) -> str:
    """Format a table with a row per arm."""
    line = "{:<12} {:>7} {:>7} {:>9}   {:>7}   {:<16} {:<8} {}".format
    names = "", "rate", "norm", "cotangent", "median", "range", "learned", "learns at"
    lines = [line(*names)]
    for name, setting, searched, losses in arms:
        settings = ("-" if x == np.inf else f"{x:g}" for x in setting)
        median = f"{np.median(losses):.3g}"
        span = f"{losses.min():.3g} to {losses.max():.3g}"
        learned = f"{np.sum(losses < task.learned)} of {len(losses)}"
        learns = (searched < task.learned).all(axis=1)
        rates = np.asarray(task.rates)[learns]
        learns_at = f"{rates[0]:g} to {rates[-1]:g}" if len(rates) else "none"
        lines.append(line(name, *settings, median, span, learned, learns_at))
    return "\n".join(lines)


def report_gradients(task: Task, comparison: Comparison) -> str:
    """Format a table of the gradients with a row per cotangent threshold."""
    finite = np.isfinite(comparison.norm)
    norms, largest = comparison.norm[finite], comparison.largest[finite]
    line = "{:<10} {:>8} {:>14} {:>8} {:>11}   {:>15} {:>7} {:>8}".format
    names = "cotangent", "clipped", "ratio: median", "largest", "above 1.01"
    lines = [
        f"{finite.sum()} gradients. Norm: median {np.median(norms):.3g}, largest"
        f" {norms.max():.3g}; largest cotangent: median {np.median(largest):.3g},"
        f" largest {largest.max():.3g}",
        line(*names, "cosine: median", "lowest", "below 0"),
    ]
    for i, max_cotangent in enumerate(task.max_cotangents):
        ratio = comparison.clipped_norm[..., i][finite] / norms
        cosine = comparison.cosine[..., i][finite]
        clipped = comparison.clipped[..., i].mean()
        of_ratio = f"{np.median(ratio):.2f}", f"{ratio.max():.2f}"
        of_cosine = f"{np.median(cosine):.2f}", f"{cosine.min():.2f}"
        above, below = f"{np.mean(ratio > LARGER):.1%}", f"{np.mean(cosine < 0):.1%}"
        name, clipped = f"{max_cotangent:g}", f"{clipped:.1%}"
        lines.append(line(name, clipped, *of_ratio, above, *of_cosine, below))
    return "\n".join(lines)


NOTES = """
Losses are measured after the last step, on new seeds with the best
settings of the arm: nats per character on held-out text, and the squared error.
"Learned" counts losses below the entropy of letter frequencies, or below half the
error of always answering 1. "Learns at" lists the rates at which both seeds of the
search learned, with these thresholds.
Gradients are from the runs with global-norm
clipping, before that clipping. "Clipped" is the fraction of cotangents above the
threshold, "ratio" is the norm of the gradient with clipped cotangents over the norm
without, and "cosine" refers to the angle between them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="networks per arm")
    parser.add_argument("--out", type=Path, default="results/backward.png", help="plot")
    parser.add_argument("--quick", action="store_true", help="few steps and settings")
    args = parser.parse_args(arguments)
    results = {}
    for task in (character_task(), adding_task()):
        if args.quick:
            task = task._replace(
                steps=CHUNK, rates=task.rates[:1], max_norms=task.max_norms[:1],
                max_cotangents=task.max_cotangents[:1],
            )  # fmt: skip
        print(f"\n{task.title}, {len(task.rates)} learning rates:")
        search_seeds, seeds = (1, 1) if args.quick else (SEARCH_SEEDS, args.seeds)
        arms, comparison = run_arms(task, search_seeds, seeds)
        results[task.title] = task, arms, comparison
        print(f"\n{report(task, arms)}\n\n{report_gradients(task, comparison)}")
    print(NOTES)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    backward_plot.draw(results).savefig(args.out)
    print(f"\nThe plot is in {args.out}.")


if __name__ == "__main__":
    main()
