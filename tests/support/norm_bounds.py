"""Compute how far norms exceed the threshold after clipping, on random trees."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optclip.functional import clip_by_global_norm, clip_by_norm, global_norm
from tests.support import helpers, norm_errors

DTYPES = ["float32", "bfloat16", "float16", "complex64", "float64", *helpers.FP8]
SHAPES = [(5, 8), (24,)]
SIZE = sum(math.prod(shape) for shape in SHAPES)
BATCH = 2_500


class Batch(NamedTuple):
    """Hold many stacked trees, and a threshold for each."""

    tree: list[jax.Array]
    threshold: jax.Array


class Outcome(NamedTuple):
    """Hold the result of `judge` for each tree of a batch."""

    excess: np.ndarray  # The norm over the threshold, minus 1.
    is_normal: np.ndarray  # Whether no clipped element is subnormal.
    clipped: np.ndarray


def batches(dtype: str, count: int, p: float) -> Iterator[Batch]:
    for seed in range(math.ceil(count / BATCH)):
        rng = np.random.default_rng(seed)
        tree = _split(jnp.asarray(_values(rng, dtype), dtype))
        norms = np.asarray(norms_of(tree, p), np.float64)
        yield Batch(tree, jnp.asarray(_thresholds(rng, norms), real_of(dtype)))


def room(dtype: str, p: float) -> float:
    """Return the documented excess without `strict`, with the rounding of elements."""
    bound = 2e-5 if p in (2, math.inf) else 2e-4
    if dtype == "float64":
        bound *= 2.0**-29
    return (1 + bound) * (1 + float(jnp.finfo(dtype).eps) / 2) - 1


def real_of(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _values(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """Draw values of every magnitude of the dtype, from several distributions."""
    info = jnp.finfo(dtype)
    # Includes subnormal numbers.
    lowest, highest = info.minexp - info.nmant - 1, info.maxexp - 1
    if info.maxexp >= jnp.finfo("float32").maxexp:
        highest -= 7  # So that the norm is finite.
    center = rng.integers(lowest, highest, size=(BATCH, 1))
    # Half of all trees have the magnitude of usual gradients.
    usual = rng.integers(max(lowest, -24), min(highest, 8), size=(BATCH, 1))
    center = np.where(rng.random((BATCH, 1)) < 0.5, center, usual)
    mantissa = rng.normal(size=(BATCH, SIZE))
    kind = rng.integers(5, size=(BATCH, 1))
    mantissa = np.where(kind == 1, mantissa[:, :1], mantissa)
    spread = rng.integers(-12, 1, size=(BATCH, SIZE))
    mantissa = np.where(kind == 2, np.ldexp(mantissa, spread), mantissa)
    mantissa = np.where((kind == 3) & (rng.random((BATCH, SIZE)) < 0.9), 0, mantissa)
    mantissa = np.where(kind == 4, rng.integers(1, 4, size=(BATCH, SIZE)), mantissa)
    largest = float(np.ldexp(1.0, highest))
    values = np.clip(np.ldexp(mantissa, center), -largest, largest)
    if np.issubdtype(jnp.dtype(dtype), np.complexfloating):
        values = values / 2 + 1j * np.flip(values, axis=1) / 2
    return values


def _thresholds(rng: np.random.Generator, norms: np.ndarray) -> np.ndarray:
    """Draw thresholds at the measured norm, close to it, far below, 0, or anywhere."""
    fractions = np.array([1, 1 - 1e-7, 1 + 1e-7, 1 - 1e-6, 0.3, 1e-3, 1e-9, 1e-30, 0.9])
    near = norms * rng.choice(fractions, size=norms.shape)
    anything = 10.0 ** rng.uniform(-45, 38, size=norms.shape)
    pick = rng.random(norms.shape)
    thresholds = np.where(pick < 0.9, near, np.where(pick < 0.98, anything, 0.0))
    return np.minimum(thresholds, 3e38)


def _split(stacked: jax.Array) -> list[jax.Array]:
    first = math.prod(SHAPES[0])
    parts = stacked[:, :first], stacked[:, first:]
    return [p.reshape(BATCH, *s) for p, s in zip(parts, SHAPES, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def norms_of(tree: list[jax.Array], p: float) -> jax.Array:
    return jax.lax.map(functools.partial(global_norm, ord=p), tree)


@functools.partial(jax.jit, static_argnames=("strict", "p"))
def clipped(batch: Batch, *, strict: bool, p: float = 2.0) -> list[jax.Array]:
    """Clip tree by tree, since vmap would run both sides of each branch."""

    def one(single: Batch) -> list[jax.Array]:
        return clip_by_global_norm(*single, ord=p, strict=strict)[0]

    return jax.lax.map(one, batch)


def judge(batch: Batch, out: list[jax.Array], p: float = 2.0) -> Outcome:
    """Compute the relative excess of each true norm over its threshold."""
    limit = np.asarray(batch.threshold, np.longdouble)
    before, after = _rows(batch.tree), _rows(out)
    ratio = _norm(after, p) / np.where(limit > 0, limit, 1)
    excess = np.where(limit > 0, ratio - 1, np.where(_norm(after, p) > 0, np.inf, -1))
    dtype = batch.tree[0].dtype
    tiny = float(jnp.finfo(dtype).tiny)
    wanted = before * (limit / np.maximum(_norm(before, p), 1e-300))[:, None]
    is_normal = np.all((before == 0) | (wanted >= 2 * tiny), axis=1)
    # At smaller thresholds, squares that are flushed to zero change the norm.
    is_normal &= limit > (2.0**-460 if dtype == np.float64 else 2.0**-40)
    changed = np.any(before != after, axis=1)
    return Outcome(excess, is_normal, changed)


def _rows(tree: list[jax.Array]) -> np.ndarray:
    """Return the moduli, a row per tree, in extended precision (64-bit mantissa)."""
    kind = np.clongdouble if jnp.iscomplexobj(tree[0]) else np.longdouble
    narrow = np.complex128 if jnp.iscomplexobj(tree[0]) else np.float64
    flat = [np.asarray(x).astype(narrow).reshape(BATCH, -1) for x in tree]
    return np.abs(np.concatenate(flat, axis=1).astype(kind))


def _norm(rows: np.ndarray, p: float) -> np.ndarray:
    if p == math.inf:
        return rows.max(axis=1)
    return np.sum(rows**p, axis=1) ** (1 / np.longdouble(p))


def worst(dtype: str, count: int, *, strict: bool, p: float = 2.0) -> Any:
    """Return the largest excess, the trees above the threshold and the clipped trees.

    Without `strict`, the excess covers trees without subnormal outputs.
    """
    largest, num_clipped, num_above = -math.inf, 0, 0
    for batch in batches(dtype, count, p):
        outcome = judge(batch, clipped(batch, strict=strict, p=p), p)
        covered = outcome.is_normal & outcome.clipped
        if strict:
            num_above += int(np.sum(outcome.excess > 0))
            covered = np.ones_like(outcome.clipped)
        num_clipped += int(np.sum(outcome.clipped))
        largest = max(largest, float(np.max(outcome.excess, where=covered, initial=-1)))
    return largest, num_above, num_clipped


def worst_of_slices(name: str, p: float) -> float:
    """Return the largest excess, with `strict`, of slices that round one way."""
    x, axis = norm_errors.slices(name)
    clip = jax.jit(functools.partial(clip_by_norm, axis=axis, ord=p, strict=True))
    measured = norm_errors.measured_along(axis, p)(x)
    worst = -math.inf
    # At the measured norm, nothing is clipped if the measurement is too small.
    for limit in (measured, 0.7 * measured):
        out = clip(x, limit)
        ratio = norm_errors.norms_along(out, axis, p) / np.asarray(limit)
        worst = max(worst, float(np.max(ratio)) - 1)
    return worst


def worst_one_way(shapes: str, p: float) -> float:
    """Return the largest excess, with `strict`, of trees that round one way."""
    clip = jax.jit(functools.partial(clip_by_global_norm, ord=p, strict=True))
    excess = []
    for values in norm_errors.VALUES_ONE_WAY:
        tree = norm_errors.Case(shapes, "float32", values).tree()
        measured = norm_errors.norm_of_order(p)(tree)
        # At the measured norm, nothing is clipped if the measurement is too small.
        for limit in (measured, 0.7 * measured):
            out, _ = clip(tree, limit)
            excess.append(norm_errors.true_norm(out, p) / float(limit) - 1)
    return max(excess)
