"""Rules that skip whole steps, in NumPy float64; nothing here is ours.

Each oracle says of one step whether it is skipped. One with a NaN or inf always is,
and leaves the memory as it was.
"""

import dataclasses
import math

import numpy as np

from tests.support import methods


@dataclasses.dataclass
class OlmoSkip:
    """OLMo-core: a loss or a norm far above the last ones, in deviations.

    The deviation is the unbiased one (`ddof` 1), and every finite value is remembered,
    of a skipped step too. Nothing is skipped before half a window, nor by a deviation
    that too few values leave undefined.
    """

    window: int = 128
    sigma: float = 6.0
    ddof: int = 1
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)

    def step(self, loss: float, norm: float) -> bool:
        if not methods.sound(loss, norm):
            return True
        far = self._far(loss, self.losses) or self._far(norm, self.norms)
        self.losses.append(loss)
        self.norms.append(norm)
        return far

    def _far(self, value: float, seen: list[float]) -> bool:
        last = np.asarray(seen[-self.window :])
        if len(last) + 1 < max(2, self.window // 2) or len(last) <= self.ddof:
            return False
        deviation = float(np.std(last, ddof=self.ddof))
        return value > float(np.mean(last)) + self.sigma * deviation


@dataclasses.dataclass
class AxlearnSkip:
    """axlearn: a norm at least `multiplier` times the average of those not skipped.

    The average's decay is corrected for its start, so it is the plain mean at first.
    Its code starts the average at 1; here nothing is skipped before the first norm.
    """

    multiplier: float = 20.0
    decay: float = 0.99
    count: int = 0
    mean: float = math.inf

    def step(self, norm: float) -> bool:
        if not methods.sound(norm) or norm >= self.multiplier * self.mean:
            return True
        d, t = self.decay, self.count
        kept = d * (1 - d**t) / (1 - d ** (t + 1))
        self.mean = norm if t == 0 else kept * self.mean + (1 - kept) * norm
        self.count += 1
        return False
