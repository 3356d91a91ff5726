"""Draw random cases with NumPy, the same on every machine."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

F32, F64 = np.dtype("float32"), np.dtype("float64")
F16, BF16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
DTYPES = [F32, F64, BF16, F16]

# From scalars to four dimensions.
TREE = [(), (5,), (2, 3, 2, 4), (3, 4), (60,)]


def eps(dtype: Any) -> float:
    """Return one unit in the last place of 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def wide(leaf: Any) -> np.ndarray:
    """Convert an array of any of the libraries to float64, exactly."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().double()
    if hasattr(leaf, "numpy"):
        leaf = leaf.numpy()
    return np.asarray(leaf).astype(np.float64)


def norm(leaves: Sequence[np.ndarray], ord: float = 2.0) -> float:
    """Return the norm over all leaves, in float64."""
    flat = np.concatenate([np.abs(wide(x)).ravel() for x in leaves] or [np.zeros(0)])
    peak = flat.max(initial=0.0)
    if peak == 0 or ord == np.inf:
        return float(peak)
    return float(peak * ((flat / peak) ** ord).sum() ** (1 / ord))


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold arrays and a threshold of `factor` times their norm."""

    seed: int
    dtype: np.dtype
    leaves: list[np.ndarray]
    factor: float

    def threshold(self, norm: float) -> float:
        """Return a threshold that the dtype represents exactly."""
        return float(np.asarray((norm or 1.0) * self.factor).astype(self.dtype))


def many(
    count: int, dtype: np.dtype, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Case]:
    """Yield cases with magnitudes from 1e-6 to 1e6, with x64 enabled for float64."""
    half = dtype in (F16, BF16)
    with jax.enable_x64(dtype == F64):
        for seed in range(count):
            rng = np.random.default_rng(seed)
            scale = 10.0 ** (rng.uniform(-1.0, 0.3) if half else rng.uniform(-6, 6))
            leaves = [_leaf(rng, shape, scale, dtype) for shape in shapes]
            # Above the threshold in every second case, and otherwise inside.
            size = rng.uniform(0.03, 0.5 if half else 3) * (-1) ** (seed + 1)
            yield Case(seed, dtype, leaves, 10**size)


def _leaf(rng, shape, scale, dtype) -> np.ndarray:
    if dtype in (F16, BF16):
        # Away from zero, where float16 is subnormal and loses its digits.
        x = rng.uniform(0.3, 1.0, shape) * rng.choice([-1, 1], shape)
    else:
        x = rng.normal(size=shape) * 10 ** rng.uniform(-1, 1)
    x = np.where(rng.random(shape) < 0.05, 0.0, x)
    return np.asarray(x * scale * (rng.random() > 0.03)).astype(dtype)
