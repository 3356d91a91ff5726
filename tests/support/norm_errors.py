"""Compute the rounding errors of norms, in units of float32's last place."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip import norms
from optclip.functional import global_norm
from tests.support import helpers, oracles

DTYPES = ["float32", "bfloat16", "float16", "complex64", *helpers.FP8]

ORDERS = [1.0, 2.0, math.inf, 0.5, 1.5, 3.0]

# The shapes of a tree's leaves, below and above 4,096 elements.
SHAPES = {
    "scalar": [()],
    "32": [(32,)],
    "1000": [(1000,)],
    "30x50": [(30, 50)],
    "63x65": [(63, 65)],
    "15x16x17": [(15, 16, 17)],
    "3x3x16x16": [(3, 3, 16, 16)],
    "4096": [(4096,)],
    "8191": [(8191,)],
    "100003": [(100_003,)],
    "3x3x64x128": [(3, 3, 64, 128)],
    "7 leaves": [(k, 11) for k in (1, 2, 30, 400, 0, 5000, 9)],
    "1000 leaves": [(1 + k % 13,) for k in range(1000)],
    "4000 leaves": [(1 + k % 13,) for k in range(4000)],
    "1e7": [(10_000_000,)],
    "1e7 in 1000": [(10_000,)] * 1000,
}
FEW = ["1000", "30x50", "7 leaves"]
# A thousand leaves take half a minute per order to compile.
MANY = ["1000 leaves", "4000 leaves", "1e7 in 1000"]


def tree_of(shapes: str, dtype: str, values: str) -> list[np.ndarray]:
    """Return leaves of these shapes, dtype and distribution of values."""
    sizes = [math.prod(shape) for shape in SHAPES[shapes]]
    info = jnp.finfo(dtype)
    x = np.asarray(ALL_VALUES[values](sum(sizes)))
    if values == "smallest":
        # The smallest number of a narrow dtype, or one whose square is normal.
        x = x * max(float(info.smallest_subnormal), 2.0**-60)
    x = np.clip(x, -float(info.max), float(info.max))
    parts = np.split(x, np.cumsum(sizes)[:-1])
    if dtype == "complex64" and values != "smallest":
        parts = [part * np.exp(1j * np.arange(part.size)) for part in parts]
    # NumPy compiles no conversion per shape.
    return [
        part.reshape(shape).astype(jnp.dtype(dtype))
        for part, shape in zip(parts, SHAPES[shapes], strict=True)
    ]


def _one_large(n: int) -> np.ndarray:
    return np.concatenate([[1.0], np.full(max(n - 1, 0), 1.3 * 2.0**-13)])[:n]


def _one_way(small: float) -> Callable[[int], np.ndarray]:
    return lambda n: np.where(np.arange(n) == 0, 1.0, small)


def _random(n: int) -> np.random.Generator:
    return np.random.default_rng(n)


VALUES = {
    "normal": lambda n: _random(n).normal(size=n),
    "equal": lambda n: np.full(n, 0.1),
    "uniform": lambda n: _random(n).uniform(0.5, 1, size=n),
    "one large": _one_large,
    "lognormal": lambda n: np.exp(3 * _random(n).normal(size=n)),
    "sorted": lambda n: np.sort(_random(n).uniform(size=n)),
    "small": lambda n: _random(n).normal(size=n) * 2.0**-40,
    "huge": lambda n: _random(n).uniform(-1, 1, size=n) * 2.0**126,
    "both": lambda n: np.ldexp(_random(n).normal(size=n), np.arange(n) % 150 - 50),
    "smallest": lambda n: np.full(n, 1.0),
}
# Found by search: every addition of a small number to the large one rounds the same
# way, so that errors accumulate.
ONE_WAY = [2.0**e for e in (-23.67, -19.63, -15.05, -14.6752, -13.2381)]
VALUES_ONE_WAY = {f"one way, {small:.2g}": _one_way(small) for small in ONE_WAY}
ALL_VALUES = {**VALUES, **VALUES_ONE_WAY}

# The same for slices: XLA adds more numbers one by one along columns than along rows.
SLICES_ONE_WAY = [*ONE_WAY, 1.7500878779761485e-07, 1.2324837023138935e-06]
SLICES = {"columns": (8192, 0), "long columns": (65536, 0), "rows": (8192, 1)}


@functools.cache
def norm_of_order(p: float) -> Any:
    return jax.jit(helpers.without_promotion(functools.partial(global_norm, ord=p)))


def worst(
    shapes: list[str], dtype: str, orders: list[float], values: Iterable[str] = VALUES
) -> np.ndarray:
    """Return the largest error for each order, in units of float32's last place."""
    trees = [tree_of(name, dtype, each) for name in shapes for each in values]
    return np.array([max(_error(tree, p) for tree in trees) for p in orders])


def _error(tree: list[np.ndarray], p: float) -> float:
    exact = oracles.tree_norm(helpers.as_float64(tree), p)
    measured = float(norm_of_order(p)(tree))
    if exact > float(np.finfo(np.float32).max):
        return 0.0 if measured == math.inf else math.inf
    return abs(measured - exact) / float(np.spacing(np.float32(exact)))


def slices(name: str) -> tuple[jax.Array, int]:
    """Return a leaf and an axis along which its slices round one way."""
    size, axis = SLICES[name]
    columns = [_one_way(small)(size) for small in SLICES_ONE_WAY]
    mixed = np.where(np.arange(size) % 16 == 0, 3.9080750e-07, 7.4592819e-08)
    columns.append(np.where(np.arange(size) == 0, 1.0, mixed))
    return jnp.asarray(np.stack(columns, 1 - axis), jnp.float32), axis


def norms_along(x: jax.Array, axis: int, p: float) -> np.ndarray:
    powers = np.abs(np.asarray(x)).astype(np.longdouble) ** p
    return np.sum(powers, axis, keepdims=True) ** (1 / np.longdouble(p))


@functools.cache
def measured_along(axis: int, p: float) -> Any:
    def measured(x: jax.Array) -> jax.Array:
        return norms.measure([norms.Block([x], (axis,))], p)[0]

    return jax.jit(helpers.without_promotion(measured))


def worst_of_slices(name: str, p: float) -> float:
    x, axis = slices(name)
    exact, measured = norms_along(x, axis, p), measured_along(axis, p)(x)
    return float(np.max(np.abs(np.asarray(measured) / exact - 1))) * 2**23


# The documented error on any CPU, in units of float32's last place: 1e-5 relative for
# the orders 2 and inf, 1e-4 for others.
ROOM = {"exact": 1e-5 * 2**23, "others": 1e-4 * 2**23}
