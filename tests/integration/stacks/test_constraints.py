"""Compare constrained parameters with the constraints of Keras."""

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import optclip

BAND = optclip.responses.band(0.5)


def softly(norm, high, low=1.0, rate=0.3):
    norm = jnp.maximum(norm, 1e-30)
    return 1 - rate + rate * jnp.clip(norm, low, high) / norm


def by_norm(limit, response="hard"):
    return optclip.clip_by(limit, over=optclip.axes(0), response=response)


C = keras.constraints
CONSTRAINTS = {
    "MaxNorm": (C.MaxNorm(2, axis=0), by_norm(2.0)),
    "UnitNorm": (C.UnitNorm(axis=0), by_norm(1.0, "normalize")),
    "MinMaxNorm": (C.MinMaxNorm(1, 2, axis=0), by_norm(2.0, BAND)),
    "rate": (C.MinMaxNorm(1, 2, rate=0.3, axis=0), by_norm(2.0, softly)),
    "NonNeg": (C.NonNeg(), optclip.clip_by_value(lower=0.0, upper=np.inf)),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constrain_equals_constraint_of_keras(name):
    """Norms of columns are at least 1: Keras adds 1e-7 to each."""
    theirs, clip = CONSTRAINTS[name]
    rng = np.random.default_rng(4)
    params = rng.normal(size=(8, 6)).astype(np.float32)
    params *= np.float32([0.5, 0.6, 1, 1, 2, 3])
    grads = rng.normal(size=(8, 6)).astype(np.float32)
    tx = optclip.constrain(optax.sgd(0.01), clip)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    plain = params - np.float32(0.01) * grads
    assert np.all(np.linalg.norm(plain, axis=0) >= 1)
    expected = np.asarray(theirs(jnp.asarray(plain)))
    assert np.max(np.abs(expected - plain)) > 1e-2
    np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-6)
