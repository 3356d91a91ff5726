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
from collections.abc import Sequence
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

CHUNK = 20  # Steps in one call of the compiled program.
SEARCH_SEEDS = 2
ARMS = ("no clip", "global norm", "cotangent", "both")


class Setting(NamedTuple):
    """How a network is trained. A threshold of infinity clips nothing."""

    rate: float
    max_norm: float = np.inf
    max_cotangent: float = np.inf


class Arm(NamedTuple):
    """The best setting of an arm, and the losses of new seeds."""

    name: str
    setting: Setting
    losses: np.ndarray
    learns_at: list[float]


class Comparison(NamedTuple):
    """A number for each step: gradients with cotangents clipped, and not."""

    largest: np.ndarray  # Norm of a cotangent, before any clip.
    norm: np.ndarray
    clipped: np.ndarray  # The fraction of cotangents that were clipped.
    clipped_norm: np.ndarray
    cosine: np.ndarray


def gradient(
    task: Task, params: Params, key: jax.Array, max_cotangent: Any
) -> tuple[Params, optclip.typing.CotangentRecord]:
    """The gradient of a batch, and the record of its cotangents."""

    def loss(params: Params, probe: Any) -> jax.Array:
        return task.loss(params, key, functools.partial(unroll, max_cotangent, probe))

    return jax.grad(loss, argnums=(0, 1))(params, optclip.cotangent_probe())


def compare(task: Task, params: Params, key: jax.Array, true: Any) -> Comparison:
    """The true gradient and its record beside those of each threshold."""
    grads, seen = true

    def beside(max_cotangent: Any) -> Any:
        clipped, record = gradient(task, params, key, max_cotangent)
        norm, norms = optax.tree.norm(clipped), optax.tree.norm(grads)
        cosine = optax.tree.vdot(clipped, grads) / (norm * norms)
        metrics = optclip.metrics(record)
        return metrics["cotangent/fraction"], norm, cosine

    found = jax.vmap(beside)(jnp.asarray(task.max_cotangents))
    largest = optclip.metrics(seen)["cotangent/norm"]
    return Comparison(largest, optax.tree.norm(grads), *found)


def programs(task: Task, compares: bool) -> tuple[Any, Any]:
    """What starts a stack of networks, and what trains them for a few steps."""

    def optimizer(rate: Any, max_norm: Any) -> optax.GradientTransformation:
        return optax.chain(optclip.clip_by_global_norm(max_norm), task.optimizer(rate))

    @jax.jit
    @jax.vmap
    def start(setting: Setting, seed: Any) -> Any:
        params = task.init(jax.random.key(seed))
        return params, optimizer(setting.rate, setting.max_norm).init(params)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
    def run(setting: Setting, seed: Any, carry: Any, numbers: Any) -> Any:
        def step(carry: Any, number: jax.Array) -> Any:
            params, state = carry
            key = jax.random.fold_in(jax.random.key(seed), number)
            true = gradient(task, params, key, setting.max_cotangent)
            seen = compare(task, params, key, true) if compares else None
            update = optimizer(setting.rate, setting.max_norm).update
            updates, state = update(true[0], state, params)
            return (optax.apply_updates(params, updates), state), seen

        return jax.lax.scan(step, carry, numbers)

    return start, run


def train(
    task: Task, program: tuple[Any, Any], settings: Sequence[Setting], seeds: range
) -> tuple[np.ndarray, Comparison | None]:
    """The losses of each setting and seed; gradients, if the program compares them."""
    start, run = program
    each = [(*setting, seed) for setting in settings for seed in seeds]
    *columns, seed = (jnp.asarray(column) for column in zip(*each, strict=True))
    setting, seen = Setting(*columns), []
    carry = start(setting, seed)
    bar = tqdm(total=task.steps, unit="step", desc=f"{len(each)} networks")
    for numbers in np.arange(task.steps).reshape(-1, CHUNK):
        carry, found = run(setting, seed, carry, numbers)
        seen.append(jax.device_get(found))
        bar.update(CHUNK)
    bar.close()
    losses = np.nan_to_num(task.test_losses(carry[0]), nan=np.inf, posinf=np.inf)
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *seen)
    return losses.reshape(len(settings), -1), joined


def candidates(task: Task, name: str, best: dict[str, Setting]) -> list[Setting]:
    """The grid of an arm; both clips get the best norm of the global clip alone."""
    norms: Sequence[float] = (np.inf,)
    if name == "global norm":
        norms = task.max_norms
    elif name == "both":
        norms = (best["global norm"].max_norm,)
    clips_cotangents = name in ("cotangent", "both")
    cotangents = task.max_cotangents if clips_cotangents else (np.inf,)
    grid = itertools.product(norms, cotangents, task.rates)
    return [Setting(rate, norm, cotangent) for norm, cotangent, rate in grid]


def run_arms(
    task: Task, search_seeds: int, seeds: int
) -> tuple[list[Arm], Comparison | None]:
    """Search for the best setting of each arm, then train new seeds with it."""
    best: dict[str, Setting] = {}
    arms, compared = [], None
    plain, comparing = programs(task, False), programs(task, True)
    for name in ARMS:
        tried = candidates(task, name, best)
        losses, _ = train(task, plain, tried, range(search_seeds))
        # A network that is lost is as bad as another that is.
        losses = np.minimum(losses, 2 * task.learned)
        setting = best[name] = tried[losses.mean(axis=1).argmin()]
        learns_at = [
            other.rate
            for other, found in zip(tried, losses, strict=True)
            if other[1:] == setting[1:] and (found < task.learned).all()
        ]
        program = comparing if name == "global norm" else plain
        losses, found = train(task, program, [setting], range(100, 100 + seeds))
        compared = found if found is not None else compared
        arms.append(Arm(name, setting, losses[0], learns_at))
    return arms, compared


def report(task: Task, arms: Sequence[Arm]) -> str:
    """The table of the arms."""
    line = "{:<12} {:>7} {:>7} {:>9}   {:>7} {:>7} {:>7}   {:<8} {}".format
    names = "", "rate", "norm", "cotangent", "median", "best", "worst", "learned"
    lines = [line(*names, "learns at")]
    for name, setting, losses, learns_at in arms:
        settings = ("-" if x == np.inf else f"{x:g}" for x in setting)
        shown = (f"{x:.3g}" for x in (np.median(losses), losses.min(), losses.max()))
        learned = f"{np.sum(losses < task.learned)} of {len(losses)}"
        span = f"{learns_at[0]:g} to {learns_at[-1]:g}" if learns_at else "none"
        lines.append(line(name, *settings, *shown, learned, span))
    return "\n".join(lines)


def report_gradients(task: Task, seen: Comparison) -> str:
    """The table of the gradients, a line for each threshold of cotangents."""
    known = np.isfinite(seen.norm)
    norms, largest = seen.norm[known], seen.largest[known]
    line = "{:<10} {:>8} {:>13} {:>8} {:>8}   {:>14} {:>7}".format
    lines = [
        f"Norms, median and largest: of a step's largest cotangent "
        f"{np.median(largest):.3g} {largest.max():.3g}, of the gradient "
        f"{np.median(norms):.3g} {norms.max():.3g}",
        line("cotangent", "clipped", "ratio: median", "largest", "above 1",
             "cosine: median", "lowest"),
    ]  # fmt: skip
    for i, max_cotangent in enumerate(task.max_cotangents):
        ratio = seen.clipped_norm[..., i][known] / norms
        cosine = seen.cosine[..., i][known]
        clipped, above = seen.clipped[..., i].mean(), np.mean(ratio > 1)
        of_ratio = (f"{x:.2f}" for x in (np.median(ratio), ratio.max()))
        of_cosine = (f"{x:.2f}" for x in (np.median(cosine), cosine.min()))
        name = f"{max_cotangent:g}"
        lines.append(
            line(name, f"{clipped:.1%}", *of_ratio, f"{above:.1%}", *of_cosine)
        )
    return "\n".join(lines)


NOTES = """
Losses are of the last step: nats per character on text held out, and squared error; of
new seeds, with the best rate and thresholds of the arm. Learned is a loss below letter
frequencies alone, and below half the error of always answering 1. Learns at are the
rates at which both seeds of the search learned, with these thresholds.
Gradients are those of the runs with the global clip, before it. Clipped is the fraction
of cotangents above the threshold, ratio the norm of the gradient with cotangents
clipped over its norm without, cosine that of the angle between the two."""


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
        assert seen is not None
        results[task.title] = task, arms, seen
        print(f"\n{report(task, arms)}\n\n{report_gradients(task, seen)}")
    print(NOTES)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    backward_picture.draw(results).savefig(args.out, dpi=150)
    print(f"\nLosses and gradients are drawn in {args.out}.")


if __name__ == "__main__":
    main()
