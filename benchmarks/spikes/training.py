"""Train one model with one method, all seeds at once.

Two compiled calls make a step: the gradients, compiled once a model, and the update,
compiled once a method. Both take the seeds one after the other, as training would: side
by side each branch in a clip is computed for all, and its compilation takes minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks.spikes.methods import Method, descent
from benchmarks.spikes.models import Model
from benchmarks.spikes.plan import Plan, batch
from examples.train_char_rnn import Corpus


class Run(NamedTuple):
    """What came of all seeds; the first axis of each array is the seed."""

    loss: np.ndarray  # of each step's batch, before it is learnt
    norm: np.ndarray  # of each step's gradient
    held_out: np.ndarray
    metrics: Mapping[str, np.ndarray]  # of the clips after the last step


def train(
    model: Model, method: Method, plan: Plan, corpus: Corpus, seeds: Sequence[int]
) -> Run:
    """Train from several seeds; all methods see the same weights and batches."""
    optimizer = method.make(descent())
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    letters = len(corpus.alphabet)
    params = jax.vmap(model.init, in_axes=(0, None))(keys, letters)
    state = jax.vmap(optimizer.init)(params)
    update = _update(optimizer)
    rates = plan.rates(model.learning_rate).astype(np.float32)
    seen = []
    for now in enumerate(plan.kinds()):
        loss, norm, grads = _gradients(model, letters, params, keys, now, corpus.train)
        params, state = update(grads, state, params, loss, rates[now[0]])
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

    def of_seed(given: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array, Any]:
        params, key = given
        inputs, targets, factor = _batch(model, letters, key, now, text)

        def scaled_loss(params: Any) -> jax.Array:
            return factor * model.loss(params, inputs, targets)

        loss, grads = jax.value_and_grad(scaled_loss)(params)
        return loss, optclip.functional.global_norm(grads), grads

    return jax.lax.map(of_seed, (params, keys))


def _batch(
    model: Model, letters: int, key: jax.Array, now: Any, text: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a step learns from: windows from anywhere in the text, or a spike."""
    step, kind = now
    data_key, noise_key = jax.random.split(jax.random.fold_in(key, step))
    last = len(text) - model.window
    starts = jax.random.randint(data_key, (model.batch, 1), 0, last)
    windows = text[starts + jnp.arange(model.window + 1)]
    return batch(windows, kind, letters, noise_key)


def _update(optimizer: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    """What brings parameters and state to the next step."""

    @jax.jit
    def update(grads: Any, state: Any, params: Any, loss: Any, rate: Any) -> Any:
        def of_seed(given: Any) -> tuple[Any, Any]:
            grads, state, params, loss = given
            found, state = optimizer.update(grads, state, params, value=loss, rate=rate)
            return optax.apply_updates(params, found), state

        return jax.lax.map(of_seed, (grads, state, params, loss))

    return update


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
