"""Random cases: real steps of Keras 3 optimizers and of optax chained behind our clips.

The parameters are compared after every step. Epsilons are the same where both put them
in the same place; where they do not (Adam) they are too small to be seen.
"""

import functools
import itertools

import numpy as np
import optax
import pytest

import optclip

from . import ours
from .cases import F32, draw, eps, norm, wide
from .libraries import load

keras = load("keras")
tf = load("tensorflow")

LR, STEPS, SHAPES = 0.05, 4, [(3, 4), (3,), ()]
TINY = 1e-30

# The clips are stated once, so that each pair is compiled once.
CLIPS = {
    "clipnorm": optclip.clip_by_norm,
    "global_clipnorm": optclip.clip_by_global_norm,
    "clipvalue": optclip.clip_by_value,
}

# Each step adds a few roundings, relative to how far the parameter has come by then.
ULPS = 8

SGD = keras.optimizers.SGD
ROOT = {"epsilon": 1e-7}

# name: (Keras, its settings, optax).
OPTIMIZERS = {
    "sgd": (SGD, {}, functools.partial(optax.sgd, LR)),
    "momentum": (
        SGD,
        {"momentum": 0.9},
        functools.partial(optax.sgd, LR, momentum=0.9),
    ),
    "adam": (
        keras.optimizers.Adam,
        {"epsilon": TINY},
        functools.partial(optax.adam, LR, eps=TINY),
    ),
    "adamw": (
        keras.optimizers.AdamW,
        {"epsilon": TINY, "weight_decay": 0.1},
        functools.partial(optax.adamw, LR, eps=TINY, weight_decay=0.1),
    ),
    "rmsprop": (
        keras.optimizers.RMSprop,
        {"centered": True, "momentum": 0.9, **ROOT},
        functools.partial(optax.rmsprop, LR, eps=1e-7, centered=True, momentum=0.9),
    ),
    "adagrad": (
        keras.optimizers.Adagrad,
        ROOT,
        functools.partial(optax.adagrad, LR, eps=1e-7),
    ),
}


def limits(which, grads, factor):
    """A threshold of about the steps' own size: some are above it, some are not."""
    if which == "clipvalue":
        sizes = [max(np.abs(g).max() for g in step) for step in grads]
    elif which == "clipnorm":
        sizes = [norm(step[:1]) for step in grads]
    else:
        sizes = [norm(step) for step in grads]
    return float(np.float32(np.median(sizes) * factor))


def keras_path(optimizer, params, grads, *, apply_gradients):
    """The parameters after each step of a Keras optimizer."""
    variables = [keras.Variable(p, dtype="float32") for p in params]
    path = []
    for step in grads:
        tensors = [tf.constant(g) for g in step]
        if apply_gradients:
            optimizer.apply_gradients(zip(tensors, variables, strict=True))
        else:
            optimizer.apply(tensors, variables)
        path.append([v.numpy() for v in variables])
    return path


def trials(start, count):
    """Parameters of size 1, and gradients of sizes up to 10 times apart."""
    for seed in range(start, start + count):
        case = draw(seed, SHAPES, F32)
        rng = case.rng
        params = [np.asarray(rng.normal(size=s), F32) for s in SHAPES]
        size = 10 ** rng.uniform(-2, 2)
        grads = [
            [np.asarray(rng.normal(size=s) * size * k, F32) for s in SHAPES]
            for k in 10 ** rng.uniform(-0.5, 0.5, STEPS)
        ]
        factor = float(10 ** rng.uniform(-1, 1))
        yield case, params, grads, factor


@pytest.mark.parametrize("which", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(tally, name, which):
    found = tally("keras")
    make, settings, make_optax = OPTIMIZERS[name]
    parts = ours.step(CLIPS[which], make_optax)
    for case, params, grads, factor in trials(20_000, 16):
        limit = limits(which, grads, factor)
        optimizer = make(LR, **settings, **{which: limit})
        theirs = keras_path(
            optimizer, params, grads, apply_gradients=bool(case.seed % 2)
        )
        mine = ours.train(parts, params, grads, limit)
        free = ours.train(parts, params, grads, np.inf)
        travelled = distances([params, *theirs])
        for t in range(STEPS):
            found.close(case, mine[t], theirs[t], ULPS, travelled[t], f"step {t}")
        found.cases += 1
        found.clipped += apart(mine[-1], free[-1], travelled[-1])
    found.finish(clipped=0.4, untouched=0.1)


def distances(path):
    """How far each parameter has come by each step, with where it started."""
    path = [[wide(p) for p in params] for params in path]
    total, out = [np.abs(p) for p in path[0]], []
    for before, after in itertools.pairwise(path):
        total = [
            d + np.abs(b - a) for d, b, a in zip(total, before, after, strict=True)
        ]
        out.append(total)
    return out


def apart(mine, other, travelled):
    """Whether the clip changed where the parameters ended, well beyond roundings."""
    return any(
        np.any(np.abs(wide(a) - wide(b)) > 1000 * eps(F32) * d)
        for a, b, d in zip(mine, other, travelled, strict=True)
    )


def accumulated(threshold):
    """Keras sums gradients first and clips their mean; so does MultiSteps."""
    return optax.MultiSteps(
        optax.chain(optclip.clip_by_global_norm(threshold), optax.sgd(LR)), 2
    )


def test_accumulated_steps(tally):
    found = tally("keras")
    parts = ours.step(accumulated, optax.identity)
    for case, params, grads, factor in trials(21_000, 30):
        limit = limits("global_clipnorm", grads, factor)
        optimizer = SGD(LR, global_clipnorm=limit, gradient_accumulation_steps=2)
        theirs = keras_path(optimizer, params, grads, apply_gradients=False)
        mine = ours.train(parts, params, grads, limit)
        free = ours.train(parts, params, grads, np.inf)
        travelled = distances([params, *theirs])
        for t in range(STEPS):
            found.close(case, mine[t], theirs[t], ULPS, travelled[t], f"step {t}")
        found.cases += 1
        found.clipped += apart(mine[-1], free[-1], travelled[-1])
    found.finish(clipped=0.4, untouched=0.1)


@pytest.mark.parametrize(
    ("which", "gradient", "expected"),
    [
        ("clipnorm", [100.0, 100.0], [0.5**0.5, 0.5**0.5]),
        ("clipvalue", [100.0, 100.0], [1.0, 1.0]),
        ("global_clipnorm", [50.0, 100.0], [0.2**0.5, 0.8**0.5]),
    ],
)
def test_suite(which, gradient, expected):
    """The cases of Keras' `optimizer_test.py`, one whole step at a rate of 1."""
    start = [np.zeros(2, F32)]
    grads = [[np.array(gradient, F32)]]
    theirs = keras_path(SGD(1.0, **{which: 1.0}), start, grads, apply_gradients=False)
    chain = optax.chain(CLIPS[which](1.0), optax.sgd(1.0))
    mine, _ = chain.update(grads[0], chain.init(start))
    for found in (theirs[0][0], mine[0]):
        np.testing.assert_allclose(-np.asarray(found), expected, rtol=2 * eps(F32))


def test_a_gradient_that_is_none():
    """Keras leaves its variable out, with a warning; ours keeps the None."""
    params = [np.ones(2, F32), np.ones(2, F32)]
    grad = np.array([3.0, 4.0], F32)
    variables = [keras.Variable(p) for p in params]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        SGD(1.0, global_clipnorm=1.0).apply_gradients(
            zip([tf.constant(grad), None], variables, strict=True)
        )
    chain = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(1.0))
    (update, none), _ = chain.update([grad, None], chain.init(params))
    assert none is None
    np.testing.assert_array_equal(variables[1].numpy(), params[1])
    for found in (params[0] + update, variables[0].numpy()):
        np.testing.assert_allclose(found, [0.4, 0.2], rtol=4 * eps(F32))
