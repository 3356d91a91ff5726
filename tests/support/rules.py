"""Implement the published rules in NumPy float64, from their papers.

Nothing here imports optclip. Each oracle takes one norm per step and returns the
paper's threshold. Like optclip, it does not learn from norms that are zero or not
finite, which the papers do not mention. `NORMS` has heavy tails, spikes of a thousand,
NaN, inf, zeros and a shift of level.
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


def teaches(norm: Any) -> Any:
    """Return whether a rule learns from a norm."""
    return np.isfinite(norm) & (norm != 0)


@dataclasses.dataclass
class AutoClip:
    """Seetharaman et al. 2020: the percentile of all norms including the current."""

    q: float
    window: int
    history: list[float] = dataclasses.field(default_factory=list)

    def step(self, norm: float) -> float:
        norms = [*self.history, norm] if math.isfinite(norm) else self.history
        if teaches(norm):
            self.history = norms
        return float(np.quantile(norms[-self.window :], self.q))


@dataclasses.dataclass
class Levanter:
    """The mean + k deviations of the last norms; inf before half a window."""

    k: float
    window: int
    history: list[float] = dataclasses.field(default_factory=list)

    def step(self, norm: float) -> float:
        last = np.asarray(self.history[-self.window :])
        if teaches(norm):
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
        sound = bool(teaches(norm))
        if len(self.first) < self.warmup:
            if sound:
                self.first.append(norm)
                self.mean = float(np.mean(self.first))
                self.variance = float(np.var(self.first))
            return self.max_norm
        limit = self._limit(norm if sound else 0.0)
        if sound and not (self.skip_spikes and limit < math.inf):
            left = min(norm, limit)
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
    steps: Any = 0
    average: Any = None

    def step(self, norms: np.ndarray) -> np.ndarray:
        seen = np.where(np.isfinite(norms), norms, 0.0)
        if self.average is None:
            self.average = np.full_like(seen, math.inf)
        total = math.sqrt(float(np.sum(seen**2)))
        is_over = (total > self.max_norm) & (seen > 0)
        factor = self.max_norm / total if total > self.max_norm else 1.0
        early = np.where(is_over, seen * factor, math.inf)
        is_early = self.steps < self.warmup
        limits = np.where(is_early, early, self.ratio * self.average)
        left = np.minimum(seen, limits)
        # The average starts with the first finite norm that is not 0.
        start = np.where(np.isinf(self.average), left, self.average)
        late = self.decay * start + (1 - self.decay) * left
        new = np.where(is_early, np.minimum(start, left), late)
        self.average = np.where(teaches(norms) & (left > 0), new, self.average)
        self.steps = self.steps + teaches(norms)
        return limits
