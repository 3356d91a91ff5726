"""Implement clipping in NumPy float64, from the formulas.

Every oracle takes and returns a nested dict or list of NumPy float64 arrays.
"""

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import helpers

# The formats below 32 bits with a zero and a sign that XLA supports.
NARROW = ["float4_e2m1fn", *helpers.FP8, "float16", "bfloat16"]
# XLA on CPU flushes numbers of float32 below half of this one.
LEAST = 2 * helpers.TINY


def norm(values: np.ndarray, p: float = 2.0) -> float:
    """Compute (sum |x|^p)^(1/p) by exact summation of scaled powers."""
    size = np.abs(np.asarray(values)).ravel().astype(np.float64)
    largest = float(size.max(initial=0.0))
    if p == math.inf or largest == 0.0:
        return largest
    return largest * math.fsum((size / largest) ** p) ** (1 / p)


def tree_norm(tree: chex.ArrayTree, p: float = 2.0) -> float:
    leaves = [np.ravel(x) for x in jax.tree.leaves(tree)]
    return norm(np.concatenate(leaves) if leaves else np.zeros(0), p)


def hard(n: float, c: float) -> float:
    return 1.0 if n <= c else c / n


def smooth(n: float, c: float) -> float:
    return c / math.hypot(c, n) if n else 1.0


def normalized(n: float, c: float) -> float:
    return c / n if n else 1.0


def by_value(tree: chex.ArrayTree, lower: float, upper: float) -> chex.ArrayTree:
    return jax.tree.map(lambda x: np.maximum(np.minimum(x, upper), lower), tree)


def by_leaf(
    tree: chex.ArrayTree,
    c: float,
    measure: Callable[[np.ndarray], float] = norm,
    response: Callable[[float, float], float] = hard,
) -> chex.ArrayTree:
    return jax.tree.map(lambda x: x * response(measure(x), c), tree)


def rms(x: np.ndarray) -> float:
    return norm(x) / math.sqrt(max(x.size, 1))


def average_norm(x: np.ndarray) -> float:
    return norm(x) / max(x.size, 1)


def by_first_axis(
    tree: chex.ArrayTree, c: float, measure: Callable[[np.ndarray], float] = norm
) -> chex.ArrayTree:
    """Clip with one norm per slice along axis 0."""

    def clip(x: np.ndarray) -> np.ndarray:
        factors = np.apply_along_axis(lambda v: hard(measure(v), c), 0, x)
        return x * factors

    return jax.tree.map(clip, tree)


def by_tree(
    tree: chex.ArrayTree,
    c: float,
    p: float = 2.0,
    response: Callable[[float, float], float] = hard,
) -> chex.ArrayTree:
    factor = response(tree_norm(tree, p), c)
    return jax.tree.map(lambda x: x * factor, tree)


def by_top_key(tree: chex.ArrayTree, c: float) -> chex.ArrayTree:
    """Clip with one norm per entry of the outermost dict."""
    return {key: by_tree(part, c) for key, part in tree.items()}


def by_matrix(tree: chex.ArrayTree, c: float) -> chex.ArrayTree:
    """Clip by the spectral norm of each matrix over the last two axes."""

    def clip(x: np.ndarray) -> np.ndarray:
        if x.ndim < 2:
            return x * hard(norm(x), c) if x.ndim else x
        top = np.linalg.norm(x, 2, axis=(-2, -1), keepdims=True) if x.size else 1.0
        return x * np.where(top > c, c / np.where(top > c, top, 1.0), 1.0)

    return jax.tree.map(clip, tree)


def by_singular_value(
    tree: chex.ArrayTree,
    c: float,
    response: Callable[[float, float], float] = hard,
) -> chex.ArrayTree:
    """Clip each singular value of each matrix over the last two axes."""

    def clip(x: np.ndarray) -> np.ndarray:
        if not x.size or not x.ndim:
            return x
        if x.ndim == 1:
            return x * response(norm(x), c)
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        left = np.vectorize(lambda n: n * response(n, c), otypes=[float])(s)
        return u * left[..., None, :] @ vt

    return jax.tree.map(clip, tree)


def step(values: np.ndarray, dtype: chex.ArrayDType) -> np.ndarray:
    """Return the distance of the numbers of a dtype next to each value."""
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(values)
    return np.ldexp(1.0, np.maximum(exponent - 1, int(info.minexp)) - info.nmant)


def rounded(values: np.ndarray, dtype: chex.ArrayDType) -> np.ndarray:
    """Round to the numbers of a dtype, ties to even, without a largest number."""
    steps = step(values, dtype)
    return np.round(values / steps) * steps


def numbers_of(dtype: chex.ArrayDType) -> np.ndarray:
    """Return positive numbers of a dtype, of all exponents."""
    info = jnp.finfo(dtype)
    digits = np.linspace(1, 2 ** (info.nmant + 1) - 1, 20).round()
    exponents = np.arange(int(info.minexp), int(info.maxexp) + 1) - info.nmant
    numbers = np.unique(np.ldexp(digits, exponents[:, None]))
    return numbers[numbers <= float(info.max)]


def between(dtype: chex.ArrayDType, wide: chex.ArrayDType) -> np.ndarray:
    """Return numbers of `wide` at, next to and half-way between those of a dtype."""
    numbers = numbers_of(dtype)
    middle = numbers + step(numbers, dtype) / 2
    near = [middle * (1 + sign * 2.0**-22) for sign in (-1, 0, 1)]
    x = np.concatenate([numbers, *near])
    least = LEAST if wide == "float32" else 0
    x = x[(x <= float(jnp.finfo(dtype).max)) & (x >= least)]
    return np.concatenate([x, -x]).astype(wide)
