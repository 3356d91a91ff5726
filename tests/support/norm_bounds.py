"""Compute how far norms exceed the threshold after clipping, on random trees."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip.functional import clip_by_global_norm, clip_by_norm, global_norm
from tests.support import helpers, norm_errors, oracles

DTYPES = ["float32", "bfloat16", "float16", "complex64", "float64", *helpers.FP8]
SIZE = 64
BATCH = 2_500


def room(dtype: str, p: float) -> float:
    """Return the documented excess without `strict`, with the rounding of elements."""
    bound = 2e-5 if p in (2, math.inf) else 2e-4
    if dtype == "float64":
        bound *= 2.0**-29
    return (1 + bound) * (1 + float(jnp.finfo(dtype).eps) / 2) - 1


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
    shape = (BATCH, SIZE)
    normal = rng.normal(size=shape)
    kinds = [
        normal,
        np.broadcast_to(normal[:, :1], shape),
        np.ldexp(normal, rng.integers(-12, 1, size=shape)),
        np.where(rng.random(shape) < 0.9, 0, normal),
        rng.integers(1, 4, size=shape),
    ]
    mantissa = np.choose(rng.integers(5, size=(BATCH, 1)), kinds)
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


def _leaves(row: jax.Array) -> list[jax.Array]:
    return [row[:40].reshape(5, 8), row[40:]]


@functools.partial(jax.jit, static_argnums=1)
def norms_of(rows: jax.Array, p: float) -> jax.Array:
    return jax.lax.map(lambda row: global_norm(_leaves(row), ord=p), rows)


@functools.partial(jax.jit, static_argnames=("strict", "p"))
def clipped(rows: jax.Array, limits: jax.Array, *, strict: bool, p: float) -> jax.Array:
    """Clip tree by tree, since vmap would run both sides of each branch."""

    def one(row: jax.Array, limit: jax.Array) -> jax.Array:
        leaves, _ = clip_by_global_norm(_leaves(row), limit, ord=p, strict=strict)
        return jnp.concatenate([leaf.ravel() for leaf in leaves])

    return jax.lax.map(lambda pair: one(*pair), (rows, limits))


def _moduli(rows: jax.Array) -> np.ndarray:
    """Return the moduli in extended precision (64-bit mantissa)."""
    kind = np.clongdouble if jnp.iscomplexobj(rows) else np.longdouble
    return np.abs(helpers.as_float64(rows).astype(kind))


def _norm(rows: np.ndarray, p: float) -> np.ndarray:
    if p == math.inf:
        return rows.max(axis=1)
    return np.sum(rows**p, axis=1) ** (1 / np.longdouble(p))


def worst(dtype: str, count: int, *, strict: bool, p: float = 2.0) -> Any:
    """Return the largest excess, the trees above the threshold and the clipped trees.

    The excess is the true norm over the threshold, minus 1. Without `strict`, it covers
    trees without subnormal outputs.
    """
    largest, num_clipped, num_above = -math.inf, 0, 0
    for seed in range(math.ceil(count / BATCH)):
        rng = np.random.default_rng(seed)
        rows = jnp.asarray(_values(rng, dtype), dtype)
        measured = np.asarray(norms_of(rows, p), np.float64)
        drawn = _thresholds(rng, measured)
        limits = jnp.asarray(drawn, "float64" if dtype == "float64" else "float32")
        out = clipped(rows, limits, strict=strict, p=p)
        before, after = _moduli(rows), _moduli(out)
        limit = np.asarray(limits, np.longdouble)
        norm, is_positive = _norm(after, p), limit > 0
        ratio = norm / np.where(is_positive, limit, 1)
        excess = np.where(is_positive, ratio - 1, np.where(norm > 0, np.inf, -1))
        changed = np.any(before != after, axis=1)
        covered = np.ones_like(changed)
        if not strict:
            wanted = before * (limit / np.maximum(_norm(before, p), 1e-300))[:, None]
            least = 2 * float(jnp.finfo(dtype).tiny)
            covered = changed & np.all((before == 0) | (wanted >= least), axis=1)
            # Norms of orders below 1 may exceed the largest number.
            covered &= np.isfinite(measured)
            # At smaller thresholds, squares that are flushed to zero change the norm.
            covered &= limit > (2.0**-460 if dtype == "float64" else 2.0**-40)
        num_above += int(np.sum(excess > 0))
        num_clipped += int(np.sum(changed))
        largest = max(largest, float(np.max(excess, where=covered, initial=-1)))
    return largest, num_above, num_clipped


def worst_of_slices(name: str, p: float) -> float:
    """Return the largest excess, with `strict`, of slices that round one way."""
    x, axis = norm_errors.slices(name)
    clip = jax.jit(functools.partial(clip_by_norm, axis=axis, ord=p, strict=True))
    measured = norm_errors.measured_along(axis, p)(x)
    return _worst(clip, x, measured, lambda y: norm_errors.norms_along(y, axis, p))


def worst_one_way(shapes: str, p: float) -> float:
    """Return the largest excess, with `strict`, of trees that round one way."""
    clip = jax.jit(functools.partial(clip_by_global_norm, ord=p, strict=True))

    def worst(values: str) -> float:
        tree = norm_errors.tree_of(shapes, "float32", values)
        measured = norm_errors.norm_of_order(p)(tree)
        return _worst(
            lambda *given: clip(*given)[0],
            tree,
            measured,
            lambda y: oracles.tree_norm(helpers.as_float64(y), p),
        )

    return max(map(worst, norm_errors.VALUES_ONE_WAY))


def _worst(clip: Any, x: Any, measured: Any, norm: Any) -> float:
    # At the measured norm, nothing is clipped if the measurement is too small.
    limits = measured, 0.7 * measured
    ratios = [norm(clip(x, limit)) / np.asarray(limit) for limit in limits]
    return float(np.max(ratios)) - 1
