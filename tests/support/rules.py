"""Implement the published rules in NumPy float64, from their papers.

Nothing here imports optclip. Each oracle takes one norm per step and returns the
paper's threshold. `NORMS` has heavy tails, spikes of a thousand, NaN, inf, zeros and a
shift of level.
"""

import dataclasses
import math
from typing import Any

import numpy as np


def _norms() -> np.ndarray:
    rng = np.random.default_rng(0)
    norms = np.abs(rng.standard_t(2.5, size=240)) + 0.2
    norms[120:] *= 6.0
    norms[[30, 150]] *= 1000.0
    norms[[40, 41, 160]] = 0.0
    norms[[50, 170]] = np.nan
    norms[[60, 61, 180]] = np.inf
    # A warm-up of 25 steps ends at a spike.
    norms[25] = 50.0
    return norms.astype(np.float32).astype(np.float64)


NORMS = _norms()


@dataclasses.dataclass
class AutoClip:
    """Seetharaman et al. 2020: the percentile of all norms including the current."""

    q: float
    window: int
    history: list[float] = dataclasses.field(default_factory=list)

    def step(self, norm: float) -> float:
        if math.isfinite(norm):
            self.history.append(norm)
        return float(np.quantile(self.history[-self.window :], self.q))


@dataclasses.dataclass
class Levanter:
    """The mean + k deviations of the last norms; inf before half a window."""

    k: float
    window: int
    history: list[float] = dataclasses.field(default_factory=list)

    def step(self, norm: float) -> float:
        last = np.asarray(self.history[-self.window :])
        if math.isfinite(norm):
            self.history.append(norm)
        if len(last) < max(2, self.window // 2):
            return math.inf
        return float(np.mean(last) + self.k * np.std(last))


@dataclasses.dataclass
class ZClip:
    """Kumar et al. 2025, equations 4 to 9, with the modes and the cap of its code."""

    z: float
    decay: float
    warmup: int
    mode: str = "reciprocal"
    max_norm: float = math.inf
    skip_spikes: bool = False
    first: list[float] = dataclasses.field(default_factory=list)
    mean: float = 0.0
    variance: float = 0.0

    def step(self, norm: float) -> float:
        sound = math.isfinite(norm)
        if len(self.first) < self.warmup:
            if sound:
                self.first.append(norm)
                self.mean = float(np.mean(self.first))
                self.variance = float(np.var(self.first))
            return self.max_norm
        limit = self._limit(norm if sound else 0.0)
        if sound and not (self.skip_spikes and limit < math.inf):
            left = min(norm, limit)
            if self.mean == self.variance == 0:
                self.mean = left  # optclip restarts the mean after only zeros.
            self.mean += (1 - self.decay) * (left - self.mean)
            square = (left - self.mean) ** 2
            self.variance += (1 - self.decay) * (square - self.variance)
        return min(limit, self.max_norm)

    def _limit(self, norm: float) -> float:
        deviation = math.sqrt(self.variance)
        if deviation == 0:
            return math.inf  # optclip does not clip while all norms are equal.
        score = (norm - self.mean) / (deviation + 1e-6)
        if self.mode == "percentile":
            edge = self.mean + self.z * deviation
            return edge if norm > edge else math.inf
        if score <= self.z:
            return math.inf
        pull = 0.0 if self.mode == "mean" else self.z**2 / score
        return self.mean + pull * deviation


@dataclasses.dataclass
class AdaGC:
    """Wang et al. 2025, algorithm 1: one threshold per tensor."""

    ratio: float
    decay: float
    warmup: int
    max_norm: float
    steps: int = 0
    average: Any = None

    def step(self, norms: np.ndarray) -> np.ndarray:
        sound = bool(np.all(np.isfinite(norms)))
        seen = np.where(np.isfinite(norms), norms, 0.0)
        if self.average is None:
            self.average = np.full_like(seen, math.inf)
        total = math.sqrt(float(np.sum(seen**2)))
        if self.steps < self.warmup:
            over = total > self.max_norm
            factor = self.max_norm / total if over else 1.0
            limits = seen * factor if over else np.full_like(seen, math.inf)
        else:
            limits = self.ratio * self.average
        if sound:
            self._learn(np.minimum(seen, limits))
        return limits

    def _learn(self, left: np.ndarray) -> None:
        # The average starts with the first finite norm that is not 0.
        start = np.where(np.isinf(self.average), left, self.average)
        if self.steps < self.warmup:
            new = np.minimum(start, left)
        else:
            new = self.decay * start + (1 - self.decay) * left
        self.average = np.where(left > 0, new, self.average)
        self.steps += 1
