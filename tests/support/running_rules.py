"""Learned rules, run alone on norms and memories and in a clipping transformation."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optclip import _thresholds
from optclip import thresholds as T
from tests.support import helpers
from tests.support.steps import history

INF = math.inf
DIRECTION = np.array([0.6, -0.8])
# Rules that learn from zeros.
WITH_ZEROS = {
    "mean_over_rms": T.mean_over_rms(),
    "moment": T.moment(decay=0.5),
    "previous_norm": T.previous_norm(1.0),
    "second_moment": _thresholds.second_moment(4.0, 0.5, warmup=0),
}
RULES = {
    "ema": T.ema(1.1, 0.5, warmup=0),
    "ema, debiased": T.ema(1.1, 0.5, warmup=0, start="debiased"),
    "ema, warm": T.ema(1.1, 0.5, warmup=3, max_norm=np.inf),
    "ema, zero": T.ema(1.1, 0.5, warmup=0, start="zero"),
    "ema_of_max": _thresholds.ema_of_max(0.5),
    "mean_plus_std": T.mean_plus_std(1.0, 4, warmup=2),
    "of_gradients": T.of_gradients(T.ema(1.1, 0.5, warmup=0)),
    "quantile": T.quantile(0.5, 4),
    "quantile, traced": T.quantile(jnp.float32(0.3), 3),
    "zscore": T.zscore(1.5, 0.9, 3),
    "zscore, mean": T.zscore(1.0, 0.5, 2, "mean"),
    "zscore, percentile": T.zscore(1.0, 0.5, 2, "percentile", skip_spikes=True),
} | WITH_ZEROS


@dataclasses.dataclass(frozen=True)
class UserRule:
    """Build a user's rule from an initial memory and a function."""

    memory: Any
    function: Any

    def init(self, norm):
        return self.memory

    def update(self, seen, memory):
        return self.function(seen, memory)


def seen(norm, *, step=0, finite=True):
    norm = jax.tree.map(jnp.float32, norm)
    return T.Seen(
        norm, jax.tree.map(lambda x: jnp.full(x.shape, finite), norm),
        lambda limits: jax.tree.map(jnp.minimum, norm, limits), lambda tree: tree,
        updates=None, params=None, step=jnp.int32(step), extra={},
    )  # fmt: skip


@functools.cache
def compiled(rule):
    def update(norm, finite, step, memory):
        return rule.update(seen(norm, finite=finite, step=step), memory)

    return helpers.quick_jit(update)


def updated(rule, norm, memory, *, step=0, finite=True):
    """Return the threshold and the new memory, from a program that all steps share."""
    norm = jax.tree.map(np.float32, norm)
    return compiled(rule)(norm, finite, np.int32(step), memory)


def gradient(norm):
    """Return a vector of this norm, with one NaN or inf for a non-finite norm."""
    vector = norm * DIRECTION if math.isfinite(norm) else [1.0, norm]
    return np.asarray(vector, np.float32)


def thresholds_of(tx, norms):
    """Return each step's threshold, whether it clipped, and the last state."""
    updates = np.stack([gradient(n) for n in norms])
    outs, metrics, state = history(tx, updates)
    limits, measured = (
        np.asarray(metrics[f"clip/{key}"], np.float64) for key in ("threshold", "norm")
    )
    finite = np.isfinite(measured)
    left = np.linalg.norm(np.asarray(outs, np.float64)[finite], axis=1)
    np.testing.assert_allclose(left, np.minimum(measured, limits)[finite], rtol=1e-6)
    return limits, measured > limits, state


def limits_of(rule, norms):
    """Return the threshold of each step; numbers of the rule may be traced."""

    def step(memory, norm):
        return rule.update(seen(norm), memory)[::-1]

    return jax.lax.scan(step, rule.init(jnp.float32(0)), jnp.float32(norms))[1]
