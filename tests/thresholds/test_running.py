"""The weights of running averages, traced or not, and means over roots of squares."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import thresholds
from optclip.thresholds import _running
from tests.support import helpers
from tests.support.running_rules import scanned, updated


def weights(decay):
    """Of a plain average, and of one without bias after so many norms."""
    norm = jnp.float32(1.0)
    counts = [jnp.int32(n) for n in range(6)]
    debiased = [jnp.stack(_running.debiased_weights(decay, n, norm)) for n in counts]
    return jnp.stack(_running.weights(decay, norm)), jnp.stack(debiased)


traced_weights = helpers.quick_jit(weights)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_weights_of_an_average_are_exact(decay, traced):
    known = helpers.quick_jit(lambda: weights(decay))
    plain, debiased = traced_weights(decay) if traced else known()
    np.testing.assert_allclose(plain, [decay, 1 - decay], rtol=1e-4 if traced else 1e-7)
    for n, found in enumerate(debiased):
        taken = 1 / (n + 1) if decay == 1 else (1 - decay) / (1 - decay ** (n + 1))
        rtol = 1e-4 if traced else 1e-6
        np.testing.assert_allclose(found, [1 - taken, taken], rtol=rtol, atol=1e-7)


def test_a_mean_over_rms_is_that_by_hand():
    rule = thresholds.mean_over_rms(eps=0.0)
    limit, memory = updated(rule, 0.0, rule.init(jnp.float32(0)))
    assert limit == 0.0
    limit, _ = updated(rule, 2.0, memory)
    mean, square = 2 * 0.3 / (1 - 0.49), 4 * 0.1 / (1 - 0.81)
    np.testing.assert_allclose(limit, mean / math.sqrt(square), rtol=1e-6)
    rule = thresholds.mean_over_rms(eps=2.0)
    limit, _ = updated(rule, 3.0, rule.init(jnp.float32(0)))
    np.testing.assert_allclose(limit, 3.0 / (3.0 + 2.0), rtol=1e-6)


def test_an_average_of_equal_norms_is_that_norm():
    """Weights rounded each for itself let it drift, and read as clipping."""
    rooms = {
        thresholds.ema_of_max(): 2e-7,
        thresholds.ema(1.0, decay=0.9999, warmup=0): 1e-6,
        thresholds.moment(2.0, decay=0.9): 1e-6,
    }
    for rule, rtol in rooms.items():
        tx = optclip.clip_by(rule, over="leaf")
        for norm in (0.1, 3.3, 7.7):
            rows = np.full((20_000, 1), norm, np.float32)
            _, metrics, _ = scanned(tx)(rows)
            late = {key: x[-1] for key, x in metrics.items()}
            np.testing.assert_allclose(late["clip/threshold"], norm, rtol=rtol)
            assert late["clip/rate"] in (0, 1), (rule, norm)


@pytest.mark.parametrize(
    "rule", [thresholds.mean_over_rms, lambda d: thresholds.ema_of_max(d)]
)
def test_a_traced_decay_is_as_one_that_is_known(rule):
    def run(decay):
        tx = optclip.clip_by_norm(rule(decay))
        state = tx.init(jnp.zeros(1))
        found = []
        for norm in (3.0, 5.0, 2.0, 9.0):
            _, state = tx.update(jnp.array([norm]), state)
            found.append(optclip.metrics(state)["clip/threshold"])
        return jnp.stack(found)

    expected = helpers.quick_jit(lambda: run(0.75))()
    np.testing.assert_allclose(helpers.quick_jit(run)(0.75), expected, rtol=1e-5)
