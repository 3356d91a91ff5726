"""Compare training steps of each library with optax steps after optclip's clipping."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import optclip

from .cases import F32, draw, eps, wide
from .clips import keras, tensor, tf, torch

COUNT, STEPS, SHAPES = 6, 4, [(3, 4), (3,), ()]
LR, TINY = 0.05, 1e-30


def keras_path(make, settings, clip):
    def path(params, grads, limit):
        optimizer = make(LR, **settings, **{clip: limit})
        variables = [keras.Variable(p, dtype="float32") for p in params]
        for step in grads:
            optimizer.apply([tf.constant(g) for g in step], variables)
            yield [v.numpy() for v in variables]

    return path


def torch_path(make, settings, clip):
    def path(params, grads, limit):
        params = [torch.nn.Parameter(tensor(p)) for p in params]
        optimizer = make(params, lr=LR, **settings)
        for step in grads:
            for param, g in zip(params, step, strict=True):
                param.grad = tensor(g)
            clip(params, limit)
            optimizer.step()
            yield [p.detach().numpy().copy() for p in params]

    return path


def optax_path(make_optimizer, make_clip):
    """Compile one step, with the threshold traced."""

    def chain(limit):
        return optax.chain(make_clip(limit), make_optimizer())

    @jax.jit
    def advance(params, state, grads, limit):
        updates, state = chain(limit).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def path(params, grads, limit):
        state = chain(1.0).init(params)
        for step in grads:
            params, state = advance(params, state, step, limit)
            yield params

    return path


K, T, UTILS = keras.optimizers, torch.optim, torch.nn.utils
by_leaf, by_value = optclip.clip_by_norm, optclip.clip_by_value
by_norm = functools.partial(optclip.clip_by_global_norm, eps=1e-6)
sgd = functools.partial(optax.sgd, LR)


def decayed():
    return optax.chain(optax.add_decayed_weights(0.1), sgd(momentum=0.9))


def rmsprop():
    return optax.rmsprop(LR, eps=1e-7, centered=True, momentum=0.9)


def twice(limit):
    return optax.MultiSteps(optax.chain(optclip.clip_by_global_norm(limit), sgd()), 2)


def if_finite():
    return optax.apply_if_finite(optax.rmsprop(LR), 3)


# The libraries add their epsilons in different places, so these are negligibly small.
# Adam's betas are exact in binary, since optax computes 1 - 0.999 in float32.
PAIRS = {
    "keras sgd": (keras_path(K.SGD, {}, "clipnorm"), sgd, by_leaf),
    "keras momentum": (
        keras_path(K.SGD, {"momentum": 0.9}, "clipvalue"),
        lambda: sgd(momentum=0.9), by_value,
    ),
    "keras adamw": (
        keras_path(K.AdamW, {"epsilon": TINY, "weight_decay": 0.1}, "global_clipnorm"),
        lambda: optax.adamw(LR, eps=TINY, weight_decay=0.1),
        optclip.clip_by_global_norm,
    ),
    "keras rmsprop": (
        keras_path(
            K.RMSprop, {"centered": True, "momentum": 0.9, "epsilon": 1e-7}, "clipvalue"
        ),
        rmsprop, by_value,
    ),
    "keras adagrad": (
        keras_path(K.Adagrad, {"epsilon": 1e-7}, "clipnorm"),
        lambda: optax.adagrad(LR, eps=1e-7), by_leaf,
    ),
    "keras accumulation": (
        keras_path(K.SGD, {"gradient_accumulation_steps": 2}, "global_clipnorm"),
        optax.identity, twice,
    ),
    "torch nesterov": (
        torch_path(T.SGD, {"momentum": 0.9, "nesterov": True}, UTILS.clip_grad_norm_),
        lambda: sgd(momentum=0.9, nesterov=True), by_norm,
    ),
    "torch weight decay": (
        torch_path(
            T.SGD, {"momentum": 0.9, "weight_decay": 0.1}, UTILS.clip_grad_value_
        ),
        decayed, by_value,
    ),
    "torch adam": (
        torch_path(T.Adam, {"betas": (0.5, 0.75)}, UTILS.clip_grad_norm_),
        lambda: optax.adam(LR, b1=0.5, b2=0.75), by_norm,
    ),
    "optax adamw": (
        optax_path(lambda: optax.adamw(LR), optax.clip_by_global_norm),
        lambda: optax.adamw(LR), optclip.clip_by_global_norm,
    ),
    "optax rmsprop": (
        optax_path(if_finite, optax.clip_by_block_rms), if_finite, optclip.clip_by_rms,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_steps_after_clip_match_library(name):
    """Each step adds a few roundings, relative to the distance covered so far."""
    theirs, *parts = PAIRS[name]
    ours, changed = optax_path(*parts), 0
    for seed in range(20_000, 20_000 + COUNT):
        rng = draw(seed, SHAPES, F32).rng
        start = [np.asarray(rng.normal(size=s), F32) for s in SHAPES]
        size = 10 ** rng.uniform(-2, 2)
        grads = [
            [np.asarray(rng.normal(size=s) * size * k, F32) for s in SHAPES]
            for k in 10 ** rng.uniform(-0.5, 0.5, STEPS)
        ]
        limit = float(np.float32(size * 10 ** rng.uniform(-0.7, 0.7)))
        expected = [[wide(p) for p in params] for params in theirs(start, grads, limit)]
        distance = [np.abs(wide(p)) for p in start]
        path = itertools.pairwise([[wide(p) for p in start], *expected])
        for params, (before, after) in zip(
            ours(start, grads, limit), path, strict=True
        ):
            for i, p in enumerate(params):
                distance[i] = distance[i] + np.abs(after[i] - before[i])
                assert np.all(np.abs(wide(p) - after[i]) <= 8 * eps(F32) * distance[i])
        *_, unclipped = ours(start, grads, np.inf)
        changed += any(
            np.any(np.abs(wide(a) - b) > 1000 * eps(F32) * d)
            for a, b, d in zip(unclipped, after, distance, strict=True)
        )
    assert changed >= COUNT / 2
