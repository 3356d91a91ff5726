"""What float64 says, to judge every contender by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trees

Tree = Any
Arrays = Sequence[np.ndarray]
Inspect = Callable[[Any], dict[str, Any]]

# Of the norm, so that the clip is active: no power of two, by which scaling is exact.
SHARE = 0.4
FLOAT32 = 1e-6  # what the norm and the factor, both of float32, may be off together
SAMPLE = 1 << 14  # elements looked at in each leaf


def judged(name: str, error: float, allowed: float) -> dict[str, Any]:
    """The error as a part of a row; optclip's own must be within its bound."""
    if name.startswith("optclip") and not error <= allowed:
        raise AssertionError(f"{name} is off by {error}, more than {allowed}")
    return {"error": error}


def places(size: int, count: int = SAMPLE) -> np.ndarray:
    """Which elements of so many to look at: all, or some from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, count)).astype(np.int64))


def rounding(dtype: Any) -> float:
    """By how much rounding to a dtype may move a number, relative to it."""
    return float(jnp.finfo(dtype).eps) / 2


class Oracle:
    """What float64 says of a tree, to judge all contenders by."""

    def __init__(self, source: Tree, dtype: str) -> None:
        self.arrays: Arrays = jax.tree.leaves(source)
        self.dtype = dtype
        self.norm = trees.exact_norm(self.arrays)
        self.limit = SHARE * self.norm

    def of_norm(self, name: str) -> Inspect:
        """How far a norm is off."""

        def inspect(norm: Any) -> dict[str, Any]:
            return judged(name, abs(float(norm) - self.norm) / self.norm, FLOAT32)

        return inspect

    def of_clipped(self, name: str) -> Inspect:
        """How far the elements of a clipped tree are off."""
        factors = [np.full(1, SHARE)] * len(self.arrays)
        return elements_check(name, self.arrays, scaled_by(self.arrays, factors))


def scaled_by(arrays: Arrays, factors: Arrays) -> list[np.ndarray]:
    """The sampled elements of each leaf times its factors: one, or one for each row."""
    found = []
    for x, by in zip(arrays, factors, strict=True):
        at = places(x.size)
        found.append(
            x.reshape(-1)[at].astype(np.float64) * by[at // (x.size // by.size)]
        )
    return found


def elements_check(name: str, source: Arrays, expected: Arrays) -> Inspect:
    """The largest error of an element, relative to it, against the expected sample."""

    def inspect(tree: Tree) -> dict[str, Any]:
        worst, excess = 0.0, 0.0
        for x, got, want in zip(source, jax.tree.leaves(tree), expected, strict=True):
            taken = np.asarray(got).reshape(-1)[places(x.size)].astype(np.float64)
            least = float(jnp.finfo(x.dtype).tiny)
            off = np.max(np.abs(taken - want) / np.maximum(np.abs(want), least))
            worst = np.maximum(worst, off)  # unlike Python's, which may drop a NaN
            excess = np.maximum(excess, off / (rounding(x.dtype) + FLOAT32))
        # Rounded once from float32, so twice in all: the second may tip a tie.
        judged(name, float(excess), 1.001)
        return {"error": float(worst)}

    return inspect


def scope_check(name: str, scope: str, source: Tree, limit: float) -> Inspect:
    """The same for a clip by scope."""
    arrays = jax.tree.leaves(source)
    if scope == "value":
        sample = scaled_by(arrays, [np.ones(1)] * len(arrays))
        return elements_check(name, arrays, [np.clip(x, -limit, limit) for x in sample])
    factors = [
        limit / np.maximum(norms, limit) for norms in exact_scope_norms(scope, arrays)
    ]
    return elements_check(name, arrays, scaled_by(arrays, factors))


def exact_scope_norms(scope: str, arrays: Arrays) -> list[np.ndarray]:
    """What each leaf is clipped by: its own norm, its rows', its group's or its RMS."""
    if scope == "axis":
        return [_row_norms(x) for x in arrays]
    if scope == "group":
        groups = [np.array([trees.exact_norm(arrays[i::3])]) for i in range(3)]
        return [groups[i % 3] for i in range(len(arrays))]
    found = [np.array([trees.exact_norm([x])]) for x in arrays]
    if scope == "rms":
        return [norm / np.sqrt(x.size) for norm, x in zip(found, arrays, strict=True)]
    return found


def _row_norms(array: np.ndarray) -> np.ndarray:
    """Norms over the last axis."""
    rows = array.reshape(-1, array.shape[-1])
    parts = np.array_split(rows, 1 + rows.size // (1 << 22))
    norms = [np.linalg.norm(part.astype(np.float64), axis=-1) for part in parts]
    return np.concatenate(norms)
