"""Random cases and the suite of optax 0.2.8: ours are drop-ins for its clips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip

from . import ours
from .cases import BF16, DTYPES, F16, F32, F64, TREES, draw, eps, many, norm, wide

# Each side has a norm within one ULP and two or three roundings. In bfloat16 and
# float16 optax rounds the norm, the quotient and the product; ours rounds once.
ULPS = {F32: 4, F64: 4, BF16: 4, F16: 4}


def named(value):
    return str(value)


@functools.cache
def theirs(make):
    """One of optax's clips, compiled, its threshold traced."""
    return jax.jit(lambda tree, limit: make(limit).update(tree, optax.EmptyState())[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_clip_by_global_norm(tally, dtype):
    """None among the leaves; the norm is that of `optax.tree.norm`."""
    found = tally("optax")
    clip, measure = ours.both("clip_by_global_norm"), jax.jit(optax.tree.norm)
    for case in many(150, dtype, 40_000):
        limit = case.threshold(norm(case.leaves))
        tree = [*case.leaves, None]
        *expected, kept = theirs(optax.clip_by_global_norm)(tree, limit)
        (plain, our_norm), updates = clip(tree, limit)
        assert kept is None is plain[-1] is updates[-1]
        found.close(case, [our_norm], [measure(tree)], ULPS[dtype], what="norm")
        for clipped in (plain[:-1], updates[:-1]):
            found.close(case, clipped, expected, ULPS[dtype] + case.near)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_clip(tally, dtype):
    """To the bit."""
    found = tally("optax")
    for case in many(100, dtype, 41_000):
        limit = case.threshold(max(np.abs(wide(x)).max() for x in case.leaves))
        expected = theirs(optax.clip)(case.leaves, limit)
        for clipped in ours.values()(case.leaves, -limit, limit):
            found.same(case, clipped, expected)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_clip_by_block_rms(tally, dtype):
    found = tally("optax")
    clip = ours.both("clip_by_rms")
    for case in many(100, dtype, 42_000, TREES[-2:]):
        first = slice(1)
        limit = case.threshold(norm(case.leaves[first]) / case.leaves[0].size ** 0.5)
        expected = theirs(optax.clip_by_block_rms)(case.leaves, limit)
        for clipped in clip(case.leaves, limit):
            found.close(case, clipped, expected, ULPS[dtype] + case.near)
        found.count(case, clipped[first], case.leaves[first])
    found.finish(clipped=0.4, untouched=0.3)


def test_per_example_clip(tally):
    """The clip of differentially private SGD is ours under vmap, summed."""
    found = tally("optax")
    expected_of = jax.jit(optax.per_example_global_norm_clip)

    @jax.jit
    def clip(tree, limit):
        each = jax.vmap(lambda g: ours.functional.clip_by_global_norm(g, limit)[0])
        return each(tree)

    for case in many(100, F32, 43_000, [[(6, 4), (6, 2, 3)]]):
        sizes = [norm([x[i] for x in case.leaves]) for i in range(6)]
        limit = case.threshold(max(sizes) if case.where == "inside" else sizes[0])
        expected, _ = expected_of(case.leaves, limit)
        clipped = clip(case.leaves, limit)
        scale = [np.abs(wide(x)).sum(axis=0) for x in clipped]
        sums = [x.sum(axis=0) for x in clipped]
        found.close(case, sums, expected, ULPS[F32] + case.near, scale)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


LR, STEPS, SHAPES = 0.05, 5, [(3, 4), (3,), ()]

PAIRS = {
    "global_norm": (optclip.clip_by_global_norm, optax.clip_by_global_norm),
    "value": (optclip.clip_by_value, optax.clip),
    "rms": (optclip.clip_by_rms, optax.clip_by_block_rms),
}

OPTIMIZERS = {
    "adamw": functools.partial(optax.adamw, LR, weight_decay=0.1),
    "rmsprop_if_finite": lambda: optax.apply_if_finite(optax.rmsprop(LR), 3),
}


@pytest.mark.parametrize("which", PAIRS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(tally, name, which):
    """The same chain with either clip in it: the parameters after each step."""
    found = tally("optax")
    mine_clip, their_clip = PAIRS[which]
    mine_parts = ours.step(mine_clip, OPTIMIZERS[name])
    their_parts = ours.step(their_clip, OPTIMIZERS[name])
    for seed in range(44_000, 44_030):
        case = draw(seed, SHAPES, F32)
        rng = case.rng
        start = [np.asarray(rng.normal(size=s), F32) for s in SHAPES]
        size = 10 ** rng.uniform(-2, 2)
        steps = [
            [np.asarray(rng.normal(size=s) * size * k, F32) for s in SHAPES]
            for k in 10 ** rng.uniform(-0.5, 0.5, STEPS)
        ]
        limit = float(np.float32(size * 10 ** rng.uniform(-1, 1.5)))
        mine = ours.train(mine_parts, start, steps, limit)
        expected = ours.train(their_parts, start, steps, limit)
        free = ours.train(mine_parts, start, steps, np.inf)
        path = [start, *expected]
        for t in range(STEPS):
            scale = [sum(np.abs(wide(p[i])) for p in path[: t + 2]) for i in range(3)]
            found.close(case, mine[t], expected[t], 8, scale, f"step {t}")
        found.cases += 1
        found.clipped += any(
            np.any(np.abs(wide(a) - wide(b)) > 1000 * eps(F32) * d)
            for a, b, d in zip(mine[-1], free[-1], scale, strict=True)
        )
    found.finish(clipped=0.4, untouched=0.1)


# The suite of optax: `_clipping_test.py`.

UPDATES = (jnp.array([500.0, 5.0]), jnp.array([300.0, 3.0]))


def updated(tx, updates):
    return tx.update(updates, tx.init(updates))[0]


@pytest.mark.parametrize("make", [optax.clip, optclip.clip_by_value])
def test_suite_clip(make):
    for found, x in zip(updated(make(1e6), UPDATES), UPDATES, strict=True):
        np.testing.assert_array_equal(found, x)
    for found in updated(make(1.0), UPDATES):
        np.testing.assert_array_equal(found, np.ones(2))


def rms(tree):
    return [float(np.sqrt(np.mean(wide(x) ** 2))) for x in tree]


@pytest.mark.parametrize(
    ("make", "measure"),
    [
        (optax.clip_by_block_rms, rms),
        (optclip.clip_by_rms, rms),
        (optax.clip_by_global_norm, lambda tree: [norm(tree)]),
        (optclip.clip_by_global_norm, lambda tree: [norm(tree)]),
    ],
)
def test_suite_smaller_and_smaller(make, measure):
    """Thresholds 1/i for i to 50: met each time, and clipping again and again drifts not."""
    clip = jax.jit(lambda updates, limit: updated(make(limit), updates))
    updates = UPDATES
    for i in range(1, 51):
        updates = clip(updates, 1 / i)
        np.testing.assert_allclose(measure(updates), 1 / i, rtol=1e-6)
        for a, b in zip(updates, clip(UPDATES, 1 / i), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)
