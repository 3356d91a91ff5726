"""What float64 says, to judge every contender by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import trees

Tree = Any

# Of the norm, so that the clip is active: no power of two, by which scaling is exact.
SHARE = 0.4


class Oracle:
    """What float64 says of a tree, to judge all contenders by."""

    def __init__(self, source: Tree, dtype: str) -> None:
        self.arrays = jax.tree.leaves(source)
        self.norm = trees.exact_norm(self.arrays)
        self.limit = SHARE * self.norm
        self._dtype = dtype

    def of_norm(self, name: str) -> Callable[[Any], dict[str, Any]]:
        """How far a norm is off."""

        def inspect(norm: Any) -> dict[str, Any]:
            error = abs(float(norm) - self.norm) / self.norm
            if name == "optclip" and self._dtype == "f32" and not error <= 1e-6:
                raise AssertionError(f"optclip's norm is off by {error}")
            return {"norm_error": error}

        return inspect

    def of_clipped(self, name: str) -> Callable[[Any], dict[str, Any]]:
        """How far the norm of a clipped tree is off the threshold."""

        def inspect(tree: Tree) -> dict[str, Any]:
            off = abs(trees.exact_norm(jax.tree.leaves(tree)) - self.limit) / self.limit
            if name == "optclip" and self._dtype == "f32" and not off <= 1e-6:
                raise AssertionError(f"optclip's clipped tree is off by {off}")
            return {"clipped_error": off}

        return inspect


def scope_norm(scope: str, arrays: Sequence[np.ndarray], limit: float) -> float:
    """The norm of a whole tree after an exact clip by scope."""
    if scope == "group":
        found = [trees.exact_norm(arrays[i::3]) for i in range(3)]
    elif scope == "axis":
        found = np.concatenate([_row_norms(x) for x in arrays])
    elif scope == "value":
        return trees.exact_norm([np.clip(x, -limit, limit) for x in arrays])
    else:
        found = [trees.exact_norm([x]) for x in arrays]
    limits = np.asarray(limit, np.float64)
    if scope == "rms":
        limits = limits * np.sqrt([x.size for x in arrays])
    return float(np.linalg.norm(np.minimum(np.asarray(found), limits)))


def _row_norms(array: np.ndarray) -> np.ndarray:
    """Norms over the last axis."""
    rows = array.reshape(-1, array.shape[-1])
    parts = np.array_split(rows, 1 + rows.size // (1 << 22))
    norms = [np.linalg.norm(part.astype(np.float64), axis=-1) for part in parts]
    return np.concatenate(norms)


def scope_check(
    scope: str, source: Tree, limit: float
) -> Callable[[Tree], dict[str, Any]]:
    """How far the norm of a clipped tree is off that of an exact clip."""
    expected = scope_norm(scope, jax.tree.leaves(source), limit)

    def inspect(tree: Tree) -> dict[str, Any]:
        off = abs(trees.exact_norm(jax.tree.leaves(tree)) - expected) / expected
        return {"clipped_error": off}

    return inspect
