"""Define the two tasks of `train_backward.py`, with a network for each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_char_rnn as characters

import optclip

LENGTH, UNITS, BATCH = 200, 32, 16  # For the adding problem.

Params = dict[str, jax.Array]


class Task(NamedTuple):
    """Hold a task, its network and the settings to search."""

    title: str
    init: Callable[[jax.Array], Params]
    loss: Callable[..., jax.Array]  # From parameters, a key and an unroll function.
    test_losses: Callable[
        [Params], jax.Array
    ]  # From the stacked parameters of networks.
    optimizer: Callable[[Any], optax.GradientTransformation]
    rates: Sequence[float]
    max_norms: Sequence[float]
    max_cotangents: Sequence[float]
    steps: int
    learned: float  # The loss below which a network has learned.


def unroll(
    max_cotangent: Any, probe: Any, advance: Callable[..., Any], start: Any, inputs: Any
) -> jax.Array:
    """Return the hidden state of each step, with its cotangent clipped per row."""

    def step(carry: Any, inputs: Any) -> Any:
        hidden, probe = carry
        hidden = advance(hidden, inputs)
        hidden, probe = optclip.clip_cotangent(hidden, max_cotangent, probe=probe)
        return (hidden, probe), hidden

    return jax.lax.scan(step, (start, probe), inputs)[1]


def character_task() -> Task:
    corpus = characters.read_corpus()

    def loss(params: Params, key: jax.Array, unrolled: Callable[..., Any]) -> jax.Array:
        windows = characters.draw_windows(corpus.train, key).T
        start = jnp.zeros((windows.shape[1], characters.UNITS))
        hidden = unrolled(
            lambda h, letter: characters.advance(params, h, letter)[0],
            start,
            windows[:-1],
        )
        logits = characters.logits_of(params, hidden)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, windows[1:]
        ).mean()

    return Task(
        "Characters, 64 steps",
        functools.partial(characters.init_params, letters=len(corpus.alphabet)),
        loss,
        functools.partial(characters.held_out_losses, text=corpus.held_out),
        lambda rate: optax.sgd(rate, momentum=characters.MOMENTUM),
        [2.0**i for i in range(-4, 4)], (0.1, 0.25, 1.0), (3e-4, 1e-3, 3e-3), 300,
        corpus.unigram_loss,
    )  # fmt: skip


def adding_task() -> Task:
    def init(key: jax.Array) -> Params:
        drive, head = jax.random.split(key)
        return {
            "drive": 0.01 * jax.random.normal(drive, (2, UNITS)),
            "recur": jnp.eye(UNITS),
            "bias": jnp.zeros(UNITS),
            "head": UNITS**-0.5 * jax.random.normal(head, (UNITS,)),
            "head_bias": jnp.zeros(()),
        }

    def loss(params: Params, key: jax.Array, unrolled: Callable[..., Any]) -> jax.Array:
        def advance(hidden: jax.Array, inputs: jax.Array) -> jax.Array:
            drive = inputs @ params["drive"] + params["bias"]
            return jax.nn.relu(drive + hidden @ params["recur"])

        value_key, first_key, second_key = jax.random.split(key, 3)
        values = jax.random.uniform(value_key, (LENGTH, BATCH))
        first = jax.random.randint(first_key, (BATCH,), 0, LENGTH // 2)
        second = jax.random.randint(second_key, (BATCH,), LENGTH // 2, LENGTH)
        place = jnp.arange(LENGTH)[:, None]
        marks = 1.0 * ((place == first) | (place == second))
        start = jnp.zeros((BATCH, UNITS))
        hidden = unrolled(advance, start, jnp.stack([values, marks], -1))[-1]
        answer = hidden @ params["head"] + params["head_bias"]
        return jnp.mean((answer - jnp.sum(values * marks, axis=0)) ** 2)

    @jax.jit
    @jax.vmap
    def test_losses(params: Params) -> jax.Array:
        plain = functools.partial(unroll, np.inf, optclip.cotangent_probe())
        keys = jax.random.split(jax.random.key(1), 60)
        return jnp.mean(jax.lax.map(lambda key: loss(params, key, plain), keys))

    return Task(
        f"Adding, {LENGTH} steps", init, loss, test_losses, optax.adam,
        (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3), (1.0, 10.0, 100.0), (0.003, 0.03, 0.3),
        2000,
        # Half the error of always answering 1.
        1 / 12,
    )  # fmt: skip
