"""New parameters are rounded once to their dtype, over its whole range."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers, oracles

FORMATS = [*oracles.NARROW, "float32"]
TO_UNIT_NORM = optclip.constrain(
    optax.identity(), optclip.clip_by(1.0, response="normalize")
)


def assert_leads_to(wanted, updates, params):
    """Compare updates with those that lead to the rounded `wanted` parameters."""
    for dtype, p in params.items():
        exact = oracles.rounded(wanted[dtype], dtype) - helpers.as_float64(p)
        exact = oracles.rounded(exact, updates[dtype].dtype)
        np.testing.assert_array_equal(helpers.as_float64(updates[dtype]), exact, dtype)


@pytest.fixture(params=["same", "float32", "float64"])
def dtypes(request):
    """Return the dtype of the updates of the parameters of each dtype."""
    with jax.enable_x64(request.param == "float64"):
        yield {
            x: x if request.param == "same" else request.param
            for x in FORMATS
            if x != "float32" or request.param == "float64"
        }


def test_constrained_parameters_are_rounded_once(dtypes):
    """They start on the other side of zero, and exceed a bound per element."""
    wide = "float64" if "float64" in dtypes.values() else "float32"
    bounds = {x: oracles.between(x, wide) for x in dtypes}
    starts = {x: -oracles.rounded(b, x) for x, b in bounds.items()}
    # Twice a number of at most 1 is exact in all formats.
    starts = {
        x: np.where((abs(p) >= oracles.LEAST) & (abs(p) <= 1), p, 0).astype(x)
        for x, p in starts.items()
    }
    far = {
        x: (np.sign(bounds[x]) * float(jnp.finfo(u).max)).astype(u)
        for x, u in dtypes.items()
    }
    clip = optclip.clip_by_value(
        lower=jax.tree.map(lambda b: np.minimum(b, 0), bounds),
        upper=jax.tree.map(lambda b: np.maximum(b, 0), bounds),
    )
    tx = optclip.constrain(optax.identity(), clip)
    updates, _ = helpers.optimized_jit(tx.update)(far, tx.init(starts), starts)
    assert_leads_to(bounds, updates, starts)


def test_scaled_attention_heads_are_rounded_once(dtypes):
    """Largest logits 16 times the threshold scale queries and keys by a quarter."""
    numbers = {x: oracles.numbers_of(x) for x in dtypes}
    heads = {x: n[None, n >= 4 * oracles.LEAST].astype(x) for x, n in numbers.items()}
    params, names = {"query": heads, "key": heads}, ("query", "key")
    layers = {
        x: optclip.Heads(*(f"{name}/{x}" for name in names), axis=0) for x in dtypes
    }
    tx = optclip.clip_attention_logits(100.0, layers)
    zeros = {x: np.zeros(p.shape, dtypes[x]) for x, p in heads.items()}
    logits = dict.fromkeys(dtypes, np.float32([1600]))
    updates, _ = helpers.optimized_jit(tx.update)(
        dict.fromkeys(names, zeros), tx.init(params), params, logits=logits
    )
    wanted = {x: helpers.as_float64(p) / 4 for x, p in heads.items()}
    for name in names:
        assert_leads_to(wanted, updates[name], heads)


def test_rounding_has_the_derivative_of_unrounded_parameters():
    def updates(u, params):
        return TO_UNIT_NORM.update(u, TO_UNIT_NORM.init(params), params)[0]

    params = np.array([3e-5, 2, -3], np.float16)
    exact = params.astype(np.float32)
    jacobians = [
        helpers.quick_jit(jax.jacobian(updates))(np.float32([1e-5, 1, 1]), p)
        for p in (params, exact)
    ]
    np.testing.assert_array_equal(*jacobians)
    assert np.all(np.diagonal(jacobians[0]) != 0)
