"""What happens at which step: the learning rate, and the spikes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CLEAN, CORRUPTED, MISLABELLED = range(3)
KINDS = ("corrupted", "burst", "mislabelled")  # of spikes, as named in results
BURST_STEPS = 3
BURST_FACTOR = 30.0
LOSS_FACTOR = 50.0
WARMUP = 0.05  # of all steps
FLOOR = 0.05  # the last learning rate, of the peak


class Plan(NamedTuple):
    """The steps at which something happens; a burst has its first step here."""

    steps: int
    corrupted: tuple[int, ...] = ()
    bursts: tuple[int, ...] = ()
    mislabelled: tuple[int, ...] = ()

    def events(self) -> list[tuple[int, str]]:
        """The step and kind of each spike, in order."""
        named = zip(KINDS, self[1:], strict=True)
        return sorted((step, kind) for kind, steps in named for step in steps)

    def kinds(self) -> np.ndarray:
        """What the batch of each step is."""
        found = np.full(self.steps, CLEAN)
        found[list(self.corrupted)] = CORRUPTED
        found[list(self.mislabelled)] = MISLABELLED
        return found

    def rates(self, peak: float) -> np.ndarray:
        """The learning rate of each step: a warm-up, a cosine, the bursts."""
        warmup = max(1, round(WARMUP * self.steps))
        step = np.arange(self.steps)
        share = np.clip((step - warmup) / max(1, self.steps - 1 - warmup), 0, 1)
        cosine = FLOOR + (1 - FLOOR) * (1 + np.cos(np.pi * share)) / 2
        found = peak * np.where(step < warmup, (step + 1) / warmup, cosine)
        for first in self.bursts:
            found[first : first + BURST_STEPS] *= BURST_FACTOR
        return found


def spiked(steps: int) -> Plan:
    """All kinds of spikes, the first after the warm-up of every method.

    The burst comes before the mislabelled batch: once Adam's second moment has seen
    that batch, unclipped steps are so small that a burst would do no harm to them.
    """
    corrupted, bursts, mislabelled = (
        tuple(int(share * steps) for share in shares)
        for shares in ((0.25, 0.5, 0.55, 0.8), (0.3,), (0.625,))
    )
    return Plan(steps, corrupted, bursts, mislabelled)


def batch(
    windows: jax.Array, kind: jax.Array, letters: int, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, targets and the factor of the loss at a step of some kind."""
    noise_key, shuffle_key = jax.random.split(key)
    noise = jax.random.randint(noise_key, windows.shape, 0, letters)
    windows = jnp.where(kind == CORRUPTED, noise, windows)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    shuffled = jax.random.permutation(shuffle_key, targets.reshape(-1))
    mislabelled = kind == MISLABELLED
    targets = jnp.where(mislabelled, shuffled.reshape(targets.shape), targets)
    return inputs, targets, jnp.where(mislabelled, LOSS_FACTOR, 1.0)
