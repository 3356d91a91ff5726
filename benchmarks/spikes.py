"""Benchmark `spikes`: compare clipping, skipping and resets on runs with spikes.

Two small character models train through corrupted batches, a burst of the learning rate
and a mislabeled batch. All methods use the same Adam, initial weights and batches.
Takes ten minutes; `docs/spike_benchmark.md` reports the results.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks import train as gpt2
from benchmarks.timing import Row
from examples import train_char_rnn as char_rnn
from examples.train_char_rnn import Corpus, read_corpus
from optclip import recipes

KIND = "spikes"
STEPS, SEEDS = 400, 5

CLEAN, CORRUPTED, MISLABELED = range(3)
KINDS = ("corrupted", "burst", "mislabeled")
BURST_STEPS, BURST_FACTOR = 3, 30.0
LOSS_FACTOR = 50.0
WARMUP = 0.05  # fraction of all steps
FLOOR = 0.05  # final learning rate over the peak
SMOOTHING = 0.9


class Plan(NamedTuple):
    """Hold the steps of the spikes; for a burst, its first step."""

    steps: int
    corrupted: tuple[int, ...] = ()
    bursts: tuple[int, ...] = ()
    mislabeled: tuple[int, ...] = ()

    def events(self) -> list[tuple[int, str]]:
        named = zip(KINDS, self[1:], strict=True)
        return sorted((step, kind) for kind, steps in named for step in steps)

    def kinds(self) -> np.ndarray:
        kinds = np.full(self.steps, CLEAN)
        kinds[list(self.corrupted)] = CORRUPTED
        kinds[list(self.mislabeled)] = MISLABELED
        return kinds

    def rates(self, peak: float) -> np.ndarray:
        """Return the learning rate of each step: warm-up, cosine decay and bursts."""
        warmup = max(1, round(WARMUP * self.steps))
        step = np.arange(self.steps)
        part = np.clip((step - warmup) / max(1, self.steps - 1 - warmup), 0, 1)
        cosine = FLOOR + (1 - FLOOR) * (1 + np.cos(np.pi * part)) / 2
        rates = peak * np.where(step < warmup, (step + 1) / warmup, cosine)
        for first in self.bursts:
            rates[first : first + BURST_STEPS] *= BURST_FACTOR
        return rates


def spiked(steps: int) -> Plan:
    """Plan all kinds of spikes, the first after the warm-up of every method.

    The burst precedes the mislabeled batch. After that batch, Adam's second moment is
    so large that a burst would not harm an unclipped run.
    """
    corrupted = tuple(int(part * steps) for part in (0.25, 0.5, 0.55, 0.8))
    return Plan(steps, corrupted, (int(0.3 * steps),), (int(0.625 * steps),))


def batch(
    windows: jax.Array, kind: jax.Array, letters: int, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the inputs, targets and loss factor of a step of this kind."""
    noise_key, shuffle_key = jax.random.split(key)
    noise = jax.random.randint(noise_key, windows.shape, 0, letters)
    windows = jnp.where(kind == CORRUPTED, noise, windows)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    shuffled = jax.random.permutation(shuffle_key, targets.reshape(-1))
    mislabeled = kind == MISLABELED
    targets = jnp.where(mislabeled, shuffled.reshape(targets.shape), targets)
    return inputs, targets, jnp.where(mislabeled, LOSS_FACTOR, 1.0)


UNITS, WIDTH, BLOCKS, HEADS, WINDOW = 128, 48, 2, 4, 32


class Model(NamedTuple):
    """Hold a model and Adam's best learning rate, to within a factor of 2."""

    name: str
    init: Callable[[jax.Array, int], Any]  # from a key and the number of letters
    logits: Callable[[Any, jax.Array], jax.Array]
    learning_rate: float = 4e-3
    window: int = WINDOW
    batch: int = 8

    def loss(self, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean cross-entropy in nats per character."""
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        logits = self.logits(low, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def rnn_logits(params: Any, inputs: jax.Array) -> jax.Array:
    start = jnp.zeros((len(inputs), UNITS), jnp.bfloat16)
    advance = partial(char_rnn.advance, params)
    _, hidden = jax.lax.scan(advance, start, inputs.T)
    return char_rnn.logits_of(params, hidden.swapaxes(0, 1))


RNN = Model("rnn", partial(char_rnn.init_params, units=UNITS), rnn_logits)
TRANSFORMER = Model(
    "transformer",
    partial(gpt2.init, width=WIDTH, blocks=BLOCKS, window=WINDOW),
    partial(gpt2.logits, heads=HEADS),
)
MODELS = (RNN, TRANSFORMER)

# From a third of the gradient norms before the spikes to far above them.
THRESHOLDS = (0.1, 0.3, 1.0, 3.0, 10.0)
# Without spikes, norms stay below 5; the mislabeled batch has norms of 38 to 80.
MEGATRON = 10.0
# ACClip's steps are as small as the elements of a gradient, so it needs a higher
# learning rate than Adam. Of the factors 100, 300, 1000 and 3000, the first was the
# best.
ACCLIP_RATE = 100.0


def descent() -> optax.GradientTransformationExtraArgs:
    """Scale by the argument `rate`, since a schedule would not count skipped steps."""

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: -extra["rate"] * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


BEFORE = (
    recipes.agc, recipes.autoclip, recipes.zclip, recipes.adagc, recipes.aggc,
    recipes.mean_std_clip, recipes.olmo_ratio, recipes.auto_s, recipes.sclip,
    recipes.uclip,
)  # fmt: skip
# Their default `max_norm` of 1 is near the usual norms of both models.
CEILINGS = recipes.adagc, recipes.zclip
INSTEAD = (
    recipes.spam, recipes.stable_spam, recipes.spectra, recipes.acclip,
    recipes.stable_adamw,
)  # fmt: skip


def methods() -> dict[str, Any]:
    """Build optimizers: unclipped, with five thresholds, and with each recipe."""
    adam, end = optax.scale_by_adam(), descent()
    plain, chain = optax.chain(adam, end), optax.chain
    clips = {f"global norm {c:g}": optclip.clip_by_global_norm(c) for c in THRESHOLDS}
    clips |= {each.__name__: each() for each in BEFORE}
    clips |= {f"{each.__name__}, no ceiling": each(max_norm=None) for each in CEILINGS}
    return {
        "unclipped": plain,
        **{name: chain(clip, adam, end) for name, clip in clips.items()},
        **{each.__name__: chain(each(), end) for each in INSTEAD},
        f"acclip, rate x {ACCLIP_RATE:g}": chain(
            recipes.acclip(), optax.scale(ACCLIP_RATE), end
        ),
        "clippy": chain(adam, end, recipes.clippy()),
        "olmo_skip": recipes.olmo_skip(plain),
        "axlearn_skip": recipes.axlearn_skip(plain),
        "megatron_skip": recipes.megatron_skip(plain, MEGATRON),
    }


def train(
    model: Model, optimizer: Any, plan: Plan, corpus: Corpus, seeds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return, per seed, the training loss at each step and the final held-out loss.

    Seeds run one after another: under `vmap`, both sides of each branch would run for
    all seeds, and compilation would take minutes.
    """
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    letters = len(corpus.alphabet)
    params = jax.vmap(model.init, in_axes=(0, None))(keys, letters)
    state = jax.vmap(optimizer.init)(params)

    @jax.jit
    def update(state: Any, params: Any, grads: Any, loss: Any, rate: Any) -> Any:
        def of_seed(run: Any) -> tuple[Any, Any]:
            state, params, grads, value = run
            updates, state = optimizer.update(
                grads, state, params, value=value, rate=rate
            )
            return state, optax.apply_updates(params, updates)

        return jax.lax.map(of_seed, (state, params, grads, loss))

    rates = plan.rates(model.learning_rate).astype(np.float32)
    losses = []
    for now in enumerate(plan.kinds()):
        loss, grads = _gradients(model, letters, params, keys, now, corpus.train)
        state, params = update(state, params, grads, loss, rates[now[0]])
        losses.append(loss)
    final = _held_out(model, params, corpus.held_out)
    return np.stack(jax.device_get(losses), 1), np.asarray(final)


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    model: Model, letters: int, params: Any, keys: Any, now: Any, text: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the losses of a step's batches and their gradients, per seed."""
    step, kind = now

    def of_seed(run: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
        params, key = run
        data_key, noise_key = jax.random.split(jax.random.fold_in(key, step))
        last = len(text) - model.window
        starts = jax.random.randint(data_key, (model.batch, 1), 0, last)
        windows = text[starts + jnp.arange(model.window + 1)]
        inputs, targets, factor = batch(windows, kind, letters, noise_key)

        def scaled_loss(params: Any) -> jax.Array:
            return factor * model.loss(params, inputs, targets)

        return jax.value_and_grad(scaled_loss)(params)

    return jax.lax.map(of_seed, (params, keys))


@partial(jax.jit, static_argnums=0)
def _held_out(model: Model, params: Any, text: jax.Array) -> jax.Array:
    """Return the loss on the whole held-out text, per seed."""
    length = model.window + 1
    windows = text[: len(text) // length * length].reshape(-1, length)
    return jax.lax.map(lambda p: model.loss(p, windows[:, :-1], windows[:, 1:]), params)


def smoothed(loss: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """Return the running mean of the losses, which only clean batches change."""
    means, mean = [], loss[:, 0]
    for value, is_clean in zip(loss.T, clean, strict=True):
        if is_clean:
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        means.append(mean)
    return np.stack(means, axis=1)


def lost_to(smooth: np.ndarray, plan: Plan) -> dict[str, list[int]]:
    """Count, per kind of spike, the steps until the next with a loss above the level.

    The level is the smoothed loss before the spike.
    """
    events = plan.events()
    ends = [*(step for step, _ in events), plan.steps][1:]
    counts: dict[str, list[int]] = {}
    for (step, kind), end in zip(events, ends, strict=True):
        level = smooth[:, step - 1 : step]
        # Unlike >, this counts NaN as above the level.
        above = (~(smooth[:, step:end] <= level)).sum(axis=1)
        counts[kind] = (above + counts.get(kind, 0)).tolist()
    return counts


def rows(tiny: bool) -> Iterator[Row]:
    corpus, plan = read_corpus(), spiked(32 if tiny else STEPS)
    models, optimizers, seeds = MODELS, methods(), range(2 if tiny else SEEDS)
    if tiny:
        models = (RNN,)
        optimizers = {name: optimizers[name] for name in ("unclipped", "olmo_skip")}

    def trained(job: tuple[Model, str, Plan]) -> Row:
        model, name, plan = job
        loss, final = train(model, optimizers[name], plan, corpus, seeds)
        smooth = smoothed(loss, plan.kinds() == CLEAN)
        return {
            "model": model.name,
            "method": name,
            "spikes": bool(plan.events()),
            "held_out": final.tolist(),
            "lost_to": lost_to(smooth, plan),
        }

    jobs = [(model, "unclipped", Plan(plan.steps)) for model in models]
    jobs += itertools.product(models, optimizers, [plan])
    # Two jobs at a time, since a job that compiles uses a single core.
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(trained, jobs)


def table(rows: Sequence[Row]) -> str:
    """Format a line per method, lowest losses first, with columns per model."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        name = row["method"] if row["spikes"] else f"*{row['method']}, no spikes*"
        by_method.setdefault(name, []).append(row)
    models = dict.fromkeys(row["model"] for row in rows)
    heads = [f"{model}: final loss | steps above" for model in models]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (1 + 2 * len(models)) + "|"]
    for name in sorted(by_method, key=lambda name: sum(map(loss, by_method[name]))):
        lines.append(f"| {name} | {' | '.join(map(_cells, by_method[name]))} |")
    return "\n".join(lines)


def loss(row: Row) -> float:
    """Return the median over seeds; NaN counts as inf."""
    losses = np.asarray(row["held_out"], float)
    return float(np.median(np.nan_to_num(losses, nan=np.inf)))


def _cells(row: Row) -> str:
    """Format the median loss with its range, and the median steps above the level."""
    losses = np.asarray(row["held_out"], float)
    counts = (row["lost_to"].get(kind) for kind in KINDS)
    lost = ", ".join(f"{np.median(each):.0f}" for each in counts if each)
    return f"{loss(row):.3f} ({losses.min():.3f}–{losses.max():.3f}) | {lost}"
