"""Question `spikes`: which way to clip, skip or reset helps when training spikes.

Two small character models, with parameters in float32 and computed in bfloat16, are
hit on purpose by corrupted batches, a burst of the learning rate and a mislabelled
batch. Every method stands around the same Adam and sees the same weights and batches.
Training takes ten minutes on two idle cores; the page is `docs/spikes.md`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks import train as gpt2
from benchmarks import trees
from benchmarks.timing import Row
from examples import train_char_rnn
from examples.train_char_rnn import Corpus, read_corpus
from optclip import recipes

KIND = "spikes"
STEPS, SEEDS = 400, 5

CLEAN, CORRUPTED, MISLABELLED = range(3)
KINDS = ("corrupted", "burst", "mislabelled")
BURST_STEPS, BURST_FACTOR = 3, 30.0
LOSS_FACTOR = 50.0
WARMUP = 0.05  # of all steps
FLOOR = 0.05  # the last learning rate, of the peak
SMOOTHING = 0.9
SETTLING = 20  # the first norms are high in any run


class Plan(NamedTuple):
    """At which step something happens, of a burst the first one."""

    steps: int
    corrupted: tuple[int, ...] = ()
    bursts: tuple[int, ...] = ()
    mislabelled: tuple[int, ...] = ()

    def events(self) -> list[tuple[int, str]]:
        named = zip(KINDS, self[1:], strict=True)
        return sorted((step, kind) for kind, steps in named for step in steps)

    def kinds(self) -> np.ndarray:
        """What the batch of each step is."""
        found = np.full(self.steps, CLEAN)
        found[list(self.corrupted)] = CORRUPTED
        found[list(self.mislabelled)] = MISLABELLED
        return found

    def rates(self, peak: float) -> np.ndarray:
        """The learning rate of each step: a warm-up, a cosine, the bursts."""
        warmup = max(1, round(WARMUP * self.steps))
        step = np.arange(self.steps)
        part = np.clip((step - warmup) / max(1, self.steps - 1 - warmup), 0, 1)
        cosine = FLOOR + (1 - FLOOR) * (1 + np.cos(np.pi * part)) / 2
        found = peak * np.where(step < warmup, (step + 1) / warmup, cosine)
        for first in self.bursts:
            found[first : first + BURST_STEPS] *= BURST_FACTOR
        return found


def spiked(steps: int) -> Plan:
    """All kinds of spikes, the first after the warm-up of every method.

    The burst comes before the mislabelled batch: once Adam's second moment has seen
    that batch, unclipped steps are so small that a burst would do no harm to them.
    """
    corrupted = tuple(int(part * steps) for part in (0.25, 0.5, 0.55, 0.8))
    return Plan(steps, corrupted, (int(0.3 * steps),), (int(0.625 * steps),))


def batch(
    windows: jax.Array, kind: jax.Array, letters: int, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, targets and the factor of the loss at a step of some kind."""
    noise_key, shuffle_key = jax.random.split(key)
    noise = jax.random.randint(noise_key, windows.shape, 0, letters)
    windows = jnp.where(kind == CORRUPTED, noise, windows)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    shuffled = jax.random.permutation(shuffle_key, targets.reshape(-1))
    mislabelled = kind == MISLABELLED
    targets = jnp.where(mislabelled, shuffled.reshape(targets.shape), targets)
    return inputs, targets, jnp.where(mislabelled, LOSS_FACTOR, 1.0)


UNITS, WIDTH, BLOCKS, HEADS, WINDOW = 128, 48, 2, 4, 32


class Model(NamedTuple):
    """A character model and how it is trained.

    The peak learning rate is about the best of four for Adam without clip and spikes.
    """

    name: str
    init: Callable[[jax.Array, int], Any]  # from a key and the number of letters
    logits: Callable[[Any, jax.Array], jax.Array]
    learning_rate: float = 4e-3
    window: int = WINDOW
    batch: int = 8

    def loss(self, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross-entropy in nats per character."""
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        logits = self.logits(low, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def init_rnn(key: jax.Array, letters: int) -> Any:
    embed, recur, head = jax.random.split(key, 3)
    scale = UNITS**-0.5
    return {
        "embed": jax.random.normal(embed, (letters, UNITS)),
        "recur": jax.random.normal(recur, (UNITS, UNITS)) * scale / 2,
        "bias": jnp.zeros(UNITS),
        "head": jax.random.normal(head, (UNITS, letters)) * scale,
        "head_bias": jnp.zeros(letters),
    }


def rnn_logits(params: Any, inputs: jax.Array) -> jax.Array:
    start = jnp.zeros((len(inputs), UNITS), jnp.bfloat16)
    advance = partial(train_char_rnn.advance, params)
    _, hidden = jax.lax.scan(advance, start, inputs.T)
    return train_char_rnn.logits_of(params, hidden.swapaxes(0, 1))


def init_transformer(key: jax.Array, letters: int) -> Any:
    """Gains 1, biases 0, weights that keep the size of numbers at this width."""
    shapes = trees.gpt2(WIDTH, BLOCKS, letters, WINDOW)
    flat, treedef = jax.tree.flatten_with_path(shapes, is_leaf=trees.is_shape)
    keys = jax.random.split(key, len(flat))

    def leaf(path: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, path[-1].key == "g", jnp.float32)
        return WIDTH**-0.5 * jax.random.normal(key, shape)

    leaves = [leaf(path, shape, k) for (path, shape), k in zip(flat, keys, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


RNN = Model("rnn", init_rnn, rnn_logits)
TRANSFORMER = Model("transformer", init_transformer, partial(gpt2.logits, heads=HEADS))
MODELS = (RNN, TRANSFORMER)

# Around the norms of gradients before the spikes, from a third of them to far above.
THRESHOLDS = (0.1, 0.3, 1.0, 3.0, 10.0)
# Norms without spikes stay below 5, from the first step on; the mislabelled batch has 38
# to 80: ten is out of reach of the one and far below the other.
MEGATRON = 10.0
# ACClip's steps are as small as the elements of a gradient, so Adam's learning rate
# teaches it little. Of 100, 300, 1000 and 3000 times that the first was the best.
ACCLIP_RATE = 100.0


def descent() -> optax.GradientTransformationExtraArgs:
    """Descend at the learning rate that `update` is given.

    A schedule of its own would stand still while steps are skipped, and bursts with it.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, rate: Any, **_: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


BEFORE = (
    recipes.agc, recipes.autoclip, recipes.zclip, recipes.adagc, recipes.aggc,
    recipes.mean_std_clip, recipes.olmo_ratio, recipes.auto_s, recipes.sclip,
    recipes.uclip,
)  # fmt: skip
INSTEAD = (recipes.spam, recipes.stable_spam, recipes.acclip, recipes.stable_adamw)


def methods() -> dict[str, Any]:
    """Optimizers: without a clip, with five thresholds, by every recipe's defaults."""
    adam, end = optax.scale_by_adam(), descent()
    plain, chain = optax.chain(adam, end), optax.chain
    clips = {f"global norm {c:g}": optclip.clip_by_global_norm(c) for c in THRESHOLDS}
    clips |= {each.__name__: each() for each in BEFORE}
    return {
        "no clip": plain,
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


class Run(NamedTuple):
    """What came of all seeds; the first axis of each array is the seed."""

    loss: np.ndarray  # of each step's batch, before it is learnt
    norm: np.ndarray  # of each step's gradient
    held_out: np.ndarray
    metrics: Mapping[str, np.ndarray]  # of the clips after the last step


def train(
    model: Model, optimizer: Any, plan: Plan, corpus: Corpus, seeds: Sequence[int]
) -> Run:
    """Train from several seeds, one after the other in each call, as training would.

    Side by side each branch in a clip is computed for all, and compiles for minutes.
    """
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    letters = len(corpus.alphabet)
    params = jax.vmap(model.init, in_axes=(0, None))(keys, letters)
    state = jax.vmap(optimizer.init)(params)

    @jax.jit
    def update(state: Any, params: Any, grads: Any, loss: Any, rate: Any) -> Any:
        def of_seed(given: Any) -> tuple[Any, Any]:
            state, params, grads, loss = given
            found, state = optimizer.update(grads, state, params, value=loss, rate=rate)
            return state, optax.apply_updates(params, found)

        return jax.lax.map(of_seed, (state, params, grads, loss))

    rates = plan.rates(model.learning_rate).astype(np.float32)
    seen = []
    for now in enumerate(plan.kinds()):
        loss, norm, grads = _gradients(model, letters, params, keys, now, corpus.train)
        state, params = update(state, params, grads, loss, rates[now[0]])
        seen.append((loss, norm))
    losses, norms = (
        np.stack(each, 1) for each in zip(*jax.device_get(seen), strict=True)
    )
    held_out = _held_out(model, params, corpus.held_out)
    return Run(losses, norms, *jax.device_get((held_out, _metrics(state))))


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    model: Model, letters: int, params: Any, keys: Any, now: Any, text: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """The loss of a step's batch, the norm of its gradient and the gradient."""
    step, kind = now

    def of_seed(given: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array, Any]:
        params, key = given
        data_key, noise_key = jax.random.split(jax.random.fold_in(key, step))
        last = len(text) - model.window
        starts = jax.random.randint(data_key, (model.batch, 1), 0, last)
        windows = text[starts + jnp.arange(model.window + 1)]
        inputs, targets, factor = batch(windows, kind, letters, noise_key)

        def scaled_loss(params: Any) -> jax.Array:
            return factor * model.loss(params, inputs, targets)

        loss, grads = jax.value_and_grad(scaled_loss)(params)
        return loss, optclip.functional.global_norm(grads), grads

    return jax.lax.map(of_seed, (params, keys))


def _metrics(state: Any) -> dict[str, jax.Array]:
    """What the clips recorded, by seed; nothing where there is none."""
    try:
        return jax.vmap(optclip.metrics)(state)
    except ValueError:
        return {}


@partial(jax.jit, static_argnums=0)
def _held_out(model: Model, params: Any, text: jax.Array) -> jax.Array:
    """The loss on all of the held-out text."""
    length = model.window + 1
    windows = text[: len(text) // length * length].reshape(-1, length)
    return jax.lax.map(lambda p: model.loss(p, windows[:, :-1], windows[:, 1:]), params)


def kept(run: Run, plan: Plan, unigram_loss: float) -> Row:
    clean = plan.kinds() == CLEAN
    return {
        "held_out": run.held_out.tolist(),
        "lost_to": lost_to(smoothed(run.loss, clean), plan),
        "rate": rate(run.metrics, plan.steps),
        "diverged": [not loss <= unigram_loss for loss in run.held_out.tolist()],
        "norm": float(np.median(run.norm[:, clean][:, SETTLING:])),
    }


def smoothed(loss: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """The running mean of the losses of clean batches; others leave it as it is."""
    found, mean = [], loss[:, 0]
    for value, is_clean in zip(loss.T, clean, strict=True):
        if is_clean:
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        found.append(mean)
    return np.stack(found, axis=1)


def lost_to(smooth: np.ndarray, plan: Plan) -> dict[str, list[int]]:
    """By kind: the steps from a spike to the next that are above its own level."""
    events = plan.events()
    ends = [*(step for step, _ in events), plan.steps][1:]
    found: dict[str, list[int]] = {}
    for (step, kind), end in zip(events, ends, strict=True):
        level = smooth[:, step - 1 : step]
        # Not >, because of NaN.
        counts = (~(smooth[:, step:end] <= level)).sum(axis=1)
        found[kind] = (counts + found.get(kind, 0)).tolist()
    return found


def rate(metrics: Mapping[str, np.ndarray], steps: int) -> list[float] | None:
    """The fraction of steps skipped, or in which the first clip acted, if any."""
    if "skip/skipped" in metrics:
        return (metrics["skip/skipped"] / steps).tolist()
    rates = {key: value for key, value in metrics.items() if "/rate" in key}
    if not rates:
        return None
    first = next(iter(rates)).partition("/")[0]
    same = [value for key, value in rates.items() if key.startswith(f"{first}/")]
    return np.max(same, axis=0).tolist()


def rows(tiny: bool) -> Iterator[Row]:
    corpus, plan = read_corpus(), spiked(32 if tiny else STEPS)
    models, made, seeds = MODELS, methods(), range(2 if tiny else SEEDS)
    if tiny:
        models = (RNN,)
        made = {name: made[name] for name in ("no clip", "olmo_skip")}

    def trained(job: tuple[Model, str, Plan]) -> Row:
        model, name, plan = job
        run = train(model, made[name], plan, corpus, seeds)
        head = {"model": model.name, "method": name, "spikes": bool(plan.events())}
        return {**head, **kept(run, plan, corpus.unigram_loss)}

    jobs = [(model, "no clip", Plan(plan.steps)) for model in models]
    jobs += itertools.product(models, made, [plan])
    # Two at a time: while one is compiled, which takes one core.
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(trained, jobs)


def table(rows: Sequence[Row]) -> str:
    """A line for each method, the lowest losses first; columns for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    calm = [row for row in rows if not row["spikes"]]
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        if row["spikes"]:
            by_method.setdefault(row["method"], []).append(row)
    heads = [f"{model}: final loss | steps lost | acted" for model in models]
    found = dict(sorted(by_method.items(), key=lambda item: sum(map(loss, item[1]))))
    found["*no clip, no spikes*"] = calm
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (1 + 3 * len(models)) + "|"]
    lines += [f"| {m} | {' | '.join(map(_cells, each))} |" for m, each in found.items()]
    return "\n".join(lines)


def loss(row: Row) -> float:
    """The median of all seeds; NaN counts as larger than any loss."""
    return float(np.median(np.nan_to_num(_losses(row), nan=np.inf)))


def _losses(row: Row) -> list[float]:
    return [float(x) for x in row["held_out"]]


def _cells(row: Row) -> str:
    """Medians: the loss with its range, steps lost by kind, how often the clip acted."""
    low, high = np.min(_losses(row)), np.max(_losses(row))
    lost = " / ".join(
        f"{np.median(n):.0f}" for n in map(row["lost_to"].get, KINDS) if n
    )
    rate = f"{np.median(row['rate']):.1%}" if row["rate"] else ""
    return f"{loss(row):.3f} ({low:.3f} to {high:.3f}) | {lost} | {rate}"
