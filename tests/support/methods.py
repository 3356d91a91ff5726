"""Implement whole methods in NumPy float64, from their papers' equations.

Nothing here imports optclip. Each oracle has its own state and takes the arrays of one
step. `GRADIENTS` have heavy tails, spikes of a thousand, zeros, NaN, inf and a shift of
level.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 240


def _as_float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(np.float64)


def _gradients() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    levels = np.where(np.arange(STEPS) < 120, 1.0, 6.0)
    levels[[30, 150]] *= 1000.0
    levels[[40, 41, 160]] = 0.0
    trees = [
        {"w": n * rng.standard_t(2.5, (4, 3)), "b": n * rng.standard_t(2.5, 3)}
        for n in levels
    ]
    trees[50]["w"][1, 2] = np.nan
    trees[170]["b"][0] = np.nan
    trees[60]["w"][3, 0] = np.inf
    trees[61]["b"][2] = -np.inf
    trees[180]["w"][0, 1] = np.inf
    return [{k: _as_float32(x) for k, x in tree.items()} for tree in trees]


GRADIENTS = _gradients()


def sound(*arrays: Any) -> bool:
    """Return whether all elements of the arrays are finite."""
    return all(bool(np.all(np.isfinite(array))) for array in arrays)


@dataclasses.dataclass
class Oracle:
    """Return NaN for a step with NaN or inf, which no paper covers.

    Such a step does not change the memory, including its step count.
    """

    steps: int = dataclasses.field(default=0, init=False)

    def step(self, g: np.ndarray, **more: np.ndarray) -> np.ndarray:
        if not sound(g, *more.values()):
            return np.full_like(g, np.nan)
        self.steps += 1
        return self.take(g, **more)


@dataclasses.dataclass
class Acclip(Oracle):
    """Zhang et al. 2020, arXiv:1912.03194: clip the momentum by a moment of |g|."""

    b1: float = 0.9
    b2: float = 0.99
    alpha: float = 1.0
    eps: float = 1e-5
    m: Any = 0.0
    power: Any = 0.0

    def take(self, g: np.ndarray) -> np.ndarray:
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.power = self.b2 * self.power + (1 - self.b2) * np.abs(g) ** self.alpha
        tau = self.power ** (1 / self.alpha)
        return np.minimum(tau / (np.abs(self.m) + self.eps), 1.0) * self.m


@dataclasses.dataclass
class OlmoRatio(Oracle):
    """OLMo's ratio clipping: clip each tensor's norm to `ratio` times its average.

    In optclip a norm of zero does not enter the average.
    """

    ratio: float
    beta: float
    eps: float = 1e-6
    average: float | None = None

    def take(self, g: np.ndarray) -> np.ndarray:
        norm = float(np.sqrt(np.sum(g**2)))
        if norm == 0:
            return g
        average = norm if self.average is None else self.average
        scale = min(1.0, self.ratio * average / (norm + self.eps))
        self.average = self.beta * average + (1 - self.beta) * scale * norm
        return scale * g


@dataclasses.dataclass
class GradientStabilizer(Oracle):
    """Huang et al. 2026, arXiv:2502.17055v3: g / |g| times m / (sqrt(v) + eps)."""

    m: float = 0.0
    v: float = 0.0

    def take(self, g: np.ndarray) -> np.ndarray:
        norm = float(np.sqrt(np.sum(g**2)))
        self.m = 0.7 * self.m + 0.3 * norm
        self.v = 0.9 * self.v + 0.1 * norm**2
        mean, square = self.m / (1 - 0.7**self.steps), self.v / (1 - 0.9**self.steps)
        return g / max(norm, 1e-30) * mean / (np.sqrt(square) + 1e-8)


@dataclasses.dataclass
class StableAdamW(Oracle):
    """Wortsman et al. 2023, arXiv:2304.13013, algorithm 2: the step over -lr."""

    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-6
    weight_decay: float = 0.0
    m: Any = 0.0
    v: Any = 0.0

    def take(self, g: np.ndarray, w: np.ndarray) -> np.ndarray:
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        mean = self.m / (1 - self.b1**self.steps)
        square = self.v / (1 - self.b2**self.steps)
        rms = float(np.sqrt(np.mean(g**2 / np.maximum(square, self.eps**2))))
        update = mean / (np.sqrt(square) + self.eps) + self.weight_decay * w
        return update / max(1.0, rms)


@dataclasses.dataclass
class UClip(Oracle):
    """Elesedy & Hutter 2023, arXiv:2302.02971: carry the clipped part over."""

    clip: Callable[[np.ndarray], np.ndarray]
    carry: Any = 0.0

    def take(self, g: np.ndarray) -> np.ndarray:
        whole = g + self.carry
        left = self.clip(whole)
        self.carry = whole - left
        return left


@dataclasses.dataclass
class SClip(Oracle):
    """Yu, Jakovetić & Kar 2023, arXiv:2310.16920: c y / sqrt(y^2 + tau)."""

    c: float
    tau: float

    def take(self, y: np.ndarray) -> np.ndarray:
        return self.c * y / np.sqrt(y**2 + self.tau)


def spectra(u: np.ndarray, c: float) -> np.ndarray:
    """Jiang, Semenov & Stich 2026, arXiv:2603.14315: (I + u u^T / c^2)^(-1/2) u.

    Of a kernel `(inputs, outputs)`, times the root of their ratio; of a vector as of a
    matrix of one row.
    """
    left, values, right = np.linalg.svd(np.atleast_2d(u), full_matrices=False)
    capped = (left * (values / np.sqrt(1 + (values / c) ** 2))) @ right
    scale = max(1.0, u.shape[-1] / u.shape[-2]) ** 0.5 if u.ndim > 1 else 1.0
    return scale * capped.reshape(u.shape)
