"""The random cases: NumPy only, each the same for its seed on every machine."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

F32, F64 = np.dtype("float32"), np.dtype("float64")
F16, BF16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
DTYPES = [F32, F64, BF16, F16]

# Few, because each is one compilation: scalars to 4-D, alone and together. Dtypes but
# float32 have the last one only.
TREES = [
    [()],
    [(7,)],
    [(3, 4)],
    [(2, 3, 2, 4)],
    [(4, 3), (3,), ()],
    [(), (5,), (2, 3, 2, 4), (3, 4), (60,)],
]


def eps(dtype: Any) -> float:
    """The distance from 1 to the next number of a dtype: one ULP, relatively."""
    return float(ml_dtypes.finfo(dtype).eps)


def wide(leaf: Any) -> np.ndarray:
    """An array of NumPy, JAX, TensorFlow or PyTorch, exactly, in float64."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().double()
    if hasattr(leaf, "numpy"):
        leaf = leaf.numpy()
    return np.asarray(leaf).astype(np.float64)


def norm(leaves: Sequence[np.ndarray], ord: float = 2.0) -> float:
    """The norm of all leaves together, in float64."""
    flat = np.concatenate([np.abs(wide(x)).ravel() for x in leaves] or [np.zeros(0)])
    peak = flat.max(initial=0.0)
    if peak == 0 or ord == np.inf:
        return float(peak)
    return float(peak * ((flat / peak) ** ord).sum() ** (1 / ord))


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays, and where the threshold is to lie: `factor` times their norm.

    `where` is "above" the threshold (the norm is, so it clips), "inside" it, or "near"
    it, `near` ULP off, where either side is right: that many more they may be apart.
    """

    seed: int
    dtype: np.dtype
    leaves: list[np.ndarray]
    where: str
    factor: float
    near: int

    @property
    def rng(self) -> np.random.Generator:
        """For what else a test draws."""
        return np.random.default_rng([self.seed, 1])

    def threshold(self, norm: float) -> float:
        """A Python number that the dtype has, so that no library rounds it."""
        return float(np.asarray((norm or 1.0) * self.factor).astype(self.dtype))

    def __str__(self) -> str:
        shapes = [x.shape for x in self.leaves]
        return f"seed {self.seed}, {self.dtype}, {shapes}, {self.where} {self.factor}"


def draw(seed: int, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> Case:
    """One case: magnitudes 1e-6 to 1e6, a norm above, inside or near the threshold."""
    rng = np.random.default_rng([seed, 0])
    half = dtype in (F16, BF16)
    scale = 10.0 ** (rng.uniform(-1.0, 0.3) if half else rng.uniform(-6, 6))
    where = str(rng.choice(["above", "inside", "near"], p=[0.5, 0.35, 0.15]))
    leaves = [_leaf(rng, shape, scale, dtype) for shape in shapes]
    near = int(rng.integers(0, 5)) if where == "near" else 0
    factor = {
        "above": 10 ** rng.uniform(-1 if half else -3, -0.03),
        "inside": 10 ** rng.uniform(0.03, 0.5 if half else 3),
        "near": 1 + float(rng.choice([-1, 1])) * near * eps(dtype),
    }[where]
    return Case(seed, dtype, leaves, where, float(factor), near)


def _leaf(rng, shape, scale, dtype) -> np.ndarray:
    if dtype in (F16, BF16):
        # Away from zero, where float16 is subnormal and loses its digits.
        x = rng.uniform(0.3, 1.0, shape) * rng.choice([-1, 1], shape)
    else:
        x = rng.normal(size=shape) * 10 ** rng.uniform(-1, 1)
    x = np.where(rng.random(shape) < 0.05, 0.0, x)
    return np.asarray(x * scale * (rng.random() > 0.03)).astype(dtype)


def many(count: int, dtype: np.dtype, start: int, trees=None) -> Iterator[Case]:
    """`count` cases over the shapes in turn, with x64 on for float64."""
    trees = trees or (TREES if dtype == F32 else TREES[-1:])
    with jax.enable_x64(dtype == F64):
        for seed in range(start, start + count):
            yield draw(seed, trees[seed % len(trees)], dtype)
