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
class Spam(Oracle):
    """Huang et al. 2025, arXiv:2501.06842: clip elements to sqrt(theta v).

    v is the second moment before this step. A reset at every `every`-th step (counted
    from 1) sets v to 0. As in the authors' code, nothing is clipped in the first
    `warmup - 1` steps and in the `warmup` steps from a reset on.
    """

    theta: float = 5000.0
    b2: float = 0.999
    warmup: int = 20
    every: int = 500
    v: Any = None

    def take(self, g: np.ndarray) -> np.ndarray:
        if self.v is None or self.steps % self.every == 0:
            self.v = np.zeros_like(g)
        left = g
        if min(self.steps, self.steps % self.every) >= self.warmup:
            over = g**2 > self.theta * self.v
            left = np.where(over, np.sign(g) * np.sqrt(self.theta * self.v), g)
        self.v = self.b2 * self.v + (1 - self.b2) * left**2
        return left


@dataclasses.dataclass
class StableSpamMax(Oracle):
    """Huang et al. 2025, arXiv:2502.17055, AdaClip: clip to an average maximum."""

    theta: float = 0.999
    m: float = 0.0
    maxima: int = 0

    def take(self, g: np.ndarray) -> np.ndarray:
        top = float(np.max(np.abs(g)))
        if top == 0:
            return g  # In optclip a gradient of zero does not enter the average.
        self.maxima += 1
        self.m = self.theta * self.m + (1 - self.theta) * top
        limit = self.m / (1 - self.theta**self.maxima)
        over = np.abs(g) > limit
        return np.where(over, g / top * limit, g) if over.any() else g


@dataclasses.dataclass
class StableSpamNorm(Oracle):
    """The same paper's AdaGN: the norm becomes mhat / (sqrt(vhat) + eps)."""

    g1: float = 0.7
    g2: float = 0.9
    eps: float = 1e-8
    m: float = 0.0
    v: float = 0.0

    def take(self, g: np.ndarray) -> np.ndarray:
        norm = float(np.sqrt(np.sum(g**2)))
        self.m = self.g1 * self.m + (1 - self.g1) * norm
        self.v = self.g2 * self.v + (1 - self.g2) * norm**2
        mean = self.m / (1 - self.g1**self.steps)
        square = self.v / (1 - self.g2**self.steps)
        return g / norm * mean / (np.sqrt(square) + self.eps) if norm > 0 else g


@dataclasses.dataclass
class Aggc(Oracle):
    """AGGC: keep norms of groups between two multiples of their averages.

    The average starts at 0; a group whose average is 0 is not scaled.
    """

    high: float
    low: float
    decay: float
    min_norm: float = 0.0
    max_shrink: float = 0.0
    max_growth: float = np.inf
    average: Any = None

    def take(self, norms: np.ndarray) -> np.ndarray:
        if self.average is None:
            self.average = np.zeros_like(norms)
        scales = np.ones_like(norms)
        for i, (n, average) in enumerate(zip(norms, self.average, strict=True)):
            upper = self.high * average
            lower = max(self.min_norm, self.low * average)
            if average > 0 and n > upper:
                scales[i] = max(upper / n, self.max_shrink)
            elif average > 0 and 0 < n < lower:
                scales[i] = min(lower / n, self.max_growth)
        left = norms * scales
        self.average = self.decay * self.average + (1 - self.decay) * left
        return scales


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


def clippy(delta: np.ndarray, w: np.ndarray) -> float:
    """Tang et al. 2023, arXiv:2302.09178: the scale of a tensor's update."""
    moved = delta != 0
    allowed = 0.5 * np.abs(w[moved]) + 0.01
    return float(np.min(allowed / np.abs(delta[moved]), initial=1.0))


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
