"""Train recurrent networks with a clip inside the backward pass, behind it, or both.

Where gradients explode, one can clip the gradient of the parameters by its global norm,
or the cotangent of the hidden state at each step and row, by `clip_cotangent`.

1. Characters: the network and the text of `train_char_rnn.py`, unrolled over 64 steps.
2. The adding problem: of 200 random numbers two are marked, and their sum is asked for
   at the end. The network has ReLUs and starts out as the identity.

Each arm gets a grid of learning rates and thresholds on two seeds. Its best setting then
trains five new seeds. Along the runs with the global clip the gradient is computed with
clipped cotangents too, of the same weights and batches, and the two are compared.

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

import backward_picture
import jax
import jax.numpy as jnp
import numpy as np
import optax
from backward_tasks import Params, Task, adding_task, character_task, unroll
from tqdm import tqdm

import optclip

CHUNK = 10  # Steps in one call of the compiled program.
SEARCH_SEEDS = 2
STACK = 4  # Networks trained at a time, as many as stay in the cache of a core.
LARGER = 1.01  # The ratio of two norms that are not equal but for rounding.


class Setting(NamedTuple):
    """Numbers, or arrays of them, that a network is trained with. Inf clips nothing."""

    rate: Any
    max_norm: Any = np.inf
    max_cotangent: Any = np.inf


class Arm(NamedTuple):
    """The best setting of an arm, and what it came to."""

    name: str
    setting: Setting
    searched: (
        np.ndarray
    )  # Losses of each rate and seed of the search, thresholds as set.
    losses: np.ndarray  # Of new seeds.


class Comparison(NamedTuple):
    """Arrays with a number for each batch: gradients with clipped cotangents, or not."""

    largest: Any  # Norm of a cotangent, before any clip.
    norm: Any
    clipped: Any  # The fraction of cotangents that were clipped.
    clipped_norm: Any
    cosine: Any


def gradient(
    task: Task, params: Params, key: jax.Array, max_cotangent: Any
) -> tuple[Params, optclip.typing.CotangentRecord]:
    """The gradient of a batch, and the record of its cotangents."""

    def loss(params: Params, probe: Any) -> jax.Array:
        return task.loss(params, key, functools.partial(unroll, max_cotangent, probe))

    return jax.grad(loss, argnums=(0, 1))(params, optclip.cotangent_probe())


def programs(task: Task) -> tuple[Any, Any, Any]:
    """What starts networks, trains them for a few steps, and compares gradients."""

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
        grads, seen = gradient(task, params, key, np.inf)
        norm = optax.tree.norm(grads)

        def beside(max_cotangent: Any) -> Any:
            clipped, record = gradient(task, params, key, max_cotangent)
            clipped_norm = optax.tree.norm(clipped)
            cosine = optax.tree.vdot(clipped, grads) / (norm * clipped_norm)
            return optclip.metrics(record)["cotangent/fraction"], clipped_norm, cosine

        found = jax.vmap(beside)(jnp.asarray(task.max_cotangents))
        return Comparison(optclip.metrics(seen)["cotangent/largest_norm"], norm, *found)

    return stacked(start), stacked(run), stacked(compare)


def stacked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of many networks, a few at a time."""

    @jax.jit
    def each(networks: Any, *common: Any) -> Any:
        return jax.lax.map(lambda x: function(*x, *common), networks, batch_size=STACK)

    return each


def train(
    task: Task, program: Any, settings: Sequence[Setting], seeds: range, compares: bool
) -> tuple[np.ndarray, Comparison | None]:
    """The losses of each setting and seed, and the gradients on the way, if asked for."""
    start, run, compare = program
    each = [(*setting, seed) for setting in settings for seed in seeds]
    # Full stacks, or the rest of each number of networks is compiled anew.
    full = each + each[-1:] * (-len(each) % STACK)
    *columns, seed = (jnp.asarray(column) for column in zip(*full, strict=True))
    setting, seen = Setting(*columns), []
    carry = start((setting, seed))
    with tqdm(total=task.steps, unit="step", desc=f"{len(each)} networks") as bar:
        for numbers in np.arange(task.steps).reshape(-1, CHUNK):
            if compares:
                seen.append(jax.device_get(compare((seed, carry[0]), numbers[0])))
            carry = jax.block_until_ready(run((setting, seed, carry), numbers))
            bar.update(CHUNK)
    losses = np.nan_to_num(task.test_losses(carry[0]), nan=np.inf, posinf=np.inf)
    shape = len(settings), len(seeds)

    def joined(*chunks: np.ndarray) -> np.ndarray:
        series = np.stack(chunks, axis=1)[: len(each)]
        return series.reshape(*shape, *series.shape[1:])

    compared = jax.tree.map(joined, *seen) if compares else None
    return losses[: len(each)].reshape(shape), compared


def grids(task: Task) -> dict[str, list[Setting]]:
    """What the search tries for each arm with one clip, or none."""
    none = (np.inf,)
    thresholds = {
        "no clip": (none, none),
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
    """The best setting of each arm, and the losses at all rates with its thresholds."""
    flat = [setting for settings in tried.values() for setting in settings]
    losses, _ = train(task, program, flat, range(seeds), compares=False)
    found, first = {}, 0
    for name, settings in tried.items():
        own = losses[first : first + len(settings)]
        first += len(settings)
        # A network that is lost is as bad as another that is.
        mean = np.minimum(own, 2 * task.learned).mean(axis=1)
        best = settings[mean.argmin()]
        found[name] = best, own[[other[1:] == best[1:] for other in settings]]
    return found


def run_arms(task: Task, search_seeds: int, seeds: int) -> tuple[list[Arm], Comparison]:
    """Search for the best setting of each arm, then train new seeds with it.

    Both clips get the best norm of the global clip alone.
    """
    program = programs(task)
    best = search(task, program, grids(task), search_seeds)
    pairs = itertools.product(task.max_cotangents, task.rates)
    norm = best["global norm"][0].max_norm
    both = [Setting(rate, norm, cotangent) for cotangent, rate in pairs]
    best |= search(task, program, {"both": both}, search_seeds)
    settings = [setting for setting, _ in best.values()]
    new_seeds = range(100, 100 + seeds)
    losses, seen = train(task, program, settings, new_seeds, compares=True)
    arms = [
        Arm(name, *found, of_seeds)
        for (name, found), of_seeds in zip(best.items(), losses, strict=True)
    ]
    of_global = list(best).index("global norm")
    return arms, jax.tree.map(lambda x: x[of_global], seen)


def report(task: Task, arms: Sequence[Arm]) -> str:
    """The table of the arms."""
    line = "{:<12} {:>7} {:>7} {:>9}   {:>7}   {:<16} {:<8} {}".format
    names = "", "rate", "norm", "cotangent", "median", "range", "learned", "learns at"
    lines = [line(*names)]
    for name, setting, searched, losses in arms:
        settings = ("-" if x == np.inf else f"{x:g}" for x in setting)
        median = f"{np.median(losses):.3g}"
        shown = median, f"{losses.min():.3g} to {losses.max():.3g}"
        learned = f"{np.sum(losses < task.learned)} of {len(losses)}"
        learns = (searched < task.learned).all(axis=1)
        at = np.asarray(task.rates)[learns]
        span = f"{at[0]:g} to {at[-1]:g}" if len(at) else "none"
        lines.append(line(name, *settings, *shown, learned, span))
    return "\n".join(lines)


def report_gradients(task: Task, seen: Comparison) -> str:
    """The table of the gradients, a line for each threshold of cotangents."""
    known = np.isfinite(seen.norm)
    norms, largest = seen.norm[known], seen.largest[known]
    line = "{:<10} {:>8} {:>14} {:>8} {:>11}   {:>15} {:>7} {:>8}".format
    names = "cotangent", "clipped", "ratio: median", "largest", "above 1.01"
    lines = [
        f"{known.sum()} gradients. Norm: median {np.median(norms):.3g}, largest"
        f" {norms.max():.3g}; largest cotangent: median {np.median(largest):.3g},"
        f" largest {largest.max():.3g}",
        line(*names, "cosine: median", "lowest", "below 0"),
    ]
    for i, max_cotangent in enumerate(task.max_cotangents):
        ratio = seen.clipped_norm[..., i][known] / norms
        cosine = seen.cosine[..., i][known]
        clipped = seen.clipped[..., i].mean()
        of_ratio = f"{np.median(ratio):.2f}", f"{ratio.max():.2f}"
        of_cosine = f"{np.median(cosine):.2f}", f"{cosine.min():.2f}"
        above, below = f"{np.mean(ratio > LARGER):.1%}", f"{np.mean(cosine < 0):.1%}"
        name, clipped = f"{max_cotangent:g}", f"{clipped:.1%}"
        lines.append(line(name, clipped, *of_ratio, above, *of_cosine, below))
    return "\n".join(lines)


NOTES = """
Losses are of the last step: nats per character on text held out, and squared error; of
new seeds, with the best rate and thresholds of the arm. Learned is a loss below letter
frequencies alone, and below half the error of always answering 1. Learns at has the
rates at which both seeds of the search learned, with these thresholds.
Gradients are those of the runs with the global clip, before that clip. Clipped is the
fraction of cotangents above the threshold, ratio the norm of the gradient with clipped
cotangents over its norm without, cosine that of the angle between the two."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="networks of each arm")
    parser.add_argument(
        "--out", type=Path, default="results/backward.png", help="picture"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps and settings")
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
        arms, seen = run_arms(task, search_seeds, seeds)
        results[task.title] = task, arms, seen
        print(f"\n{report(task, arms)}\n\n{report_gradients(task, seen)}")
    print(NOTES)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    backward_picture.draw(results).savefig(args.out, dpi=150)
    print(f"\nLosses and gradients are drawn in {args.out}.")


if __name__ == "__main__":
    main()
