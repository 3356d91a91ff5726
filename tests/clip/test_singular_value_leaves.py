"""What passes to the bit, dtypes, responses, limits and what is not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import optclip
from optclip import functional as F
from optclip import responses
from tests.clip.test_singular_values import METHODS, matrix
from tests.support import helpers, oracles
from tests.support.registry import square_root_capper

X = (3 * np.random.default_rng(0).normal(size=(3, 4, 6))).astype(np.float32)
methods = pytest.mark.parametrize("method", METHODS)


@functools.cache
def clip(method, **how):
    return helpers.quick_jit(
        functools.partial(F.clip_by_singular_value, method=method, **how)
    )


@methods
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_has_nothing_above_the_cap_is_kept_to_the_bit(method, dtype):
    """Beside others of the batch that are clipped."""
    x = jnp.asarray(X).astype(dtype)
    size = np.linalg.norm(np.float64(x), axis=(1, 2), keepdims=True)[..., 0]
    limits = (size * np.array([[1.01], [0.1], [2.0]])).astype(np.float32)
    found = clip(method)(x, limits)
    helpers.assert_identical(found[::2], x[::2])
    assert helpers.differs(found[1], x[1])
    off = clip(method)(x.at[0, 0, 0].set(jnp.nan), jnp.inf)
    helpers.assert_identical(off, x.at[0, 0, 0].set(jnp.nan))


@methods
@pytest.mark.parametrize("response", ["hard", "soft"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_that_of_what_comes_out(method, response, dtype):
    """Within one unit of the exact cap as it is rounded; products are in float32."""
    rng = np.random.default_rng(1)
    kinds = [np.geomspace(0.1, 50, 12), np.full(12, 3.0), 30 * rng.uniform(size=12)]
    x = jnp.asarray(np.stack([matrix(rng, s, (12, 20)) for s in kinds]), dtype)
    found = clip(method, response=response)(x, 2.0)
    assert found.dtype == dtype
    kept = oracles.smooth if response == "soft" else oracles.hard
    exact = jnp.asarray(oracles.by_singular_value(np.float64(x), 2.0, kept), dtype)
    found, exact = np.float64(found), np.float64(exact)
    unit = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(np.abs(exact) + 1e-30))
    # An element that cancels to almost nothing has what float32 leaves of the others.
    assert np.all(np.abs(found - exact) <= unit + 1e-5)


@methods
@pytest.mark.parametrize("response", ["hard", "soft"])
def test_float64_is_float64(method, response):
    rng = np.random.default_rng(1)
    x = np.stack([matrix(rng, np.geomspace(1e-6, t, 8), (8, 11)) for t in (9.0, 900.0)])
    kept = oracles.smooth if response == "soft" else oracles.hard
    expected = oracles.by_singular_value(x, 1.0, kept)
    with jax.enable_x64(True):
        found = clip(method, response=response)(jnp.asarray(x), 1.0)
    assert found.dtype == "float64"
    np.testing.assert_allclose(
        found, expected, atol=1e-6 if method != "eigh" else 1e-11
    )


@methods
@pytest.mark.parametrize("response", ["hard", "soft"])
def test_complex_matrices(method, response):
    rng = np.random.default_rng(2)
    z = (rng.normal(size=(2, 5, 7)) + 1j * rng.normal(size=(2, 5, 7))) * 3
    u, s, vt = np.linalg.svd(z, full_matrices=False)
    s = np.minimum(s, 2) if response == "hard" else s / np.sqrt(1 + (s / 2) ** 2)
    found = clip(method, response=response)(z.astype(np.complex64), 2.0)
    np.testing.assert_allclose(found, (u * s[:, None, :]) @ vt, atol=2e-5)


@methods
def test_thresholds_at_the_edges(method):
    x = jnp.asarray(X)
    assert not np.any(clip(method)(x, 0.0))
    assert not np.any(clip(method)(x, -1.0)), "traced, below 0 counts as 0"
    assert np.all(np.isnan(clip(method)(x, jnp.nan)))
    zeros = jnp.zeros((2, 4, 6))
    helpers.assert_identical(clip(method)(zeros, jnp.float32([[0.0], [1.0]])), zeros)
    mixed = clip(method)(x, jnp.float32([[0.0], [1.0], [jnp.inf]]))
    assert not np.any(mixed[0])
    expected = oracles.by_singular_value(np.float64(X[1]), 1.0)
    np.testing.assert_allclose(mixed[1], expected, atol=2e-6)
    helpers.assert_identical(mixed[2], x[2])
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="`max_value` must be 0 or more"):
            F.clip_by_singular_value(x, bad, method=method)


RESPONSES = {
    "hard": ("hard", oracles.hard),
    "smooth": ("smooth", oracles.smooth),
    "softsign": ("softsign", lambda n, c: 1 / (1 + n / c)),
    "tanh": ("tanh", lambda n, c: np.tanh(n / c) * c / n),
    "normalize": ("normalize", oracles.normalized),
    "drop": ("drop", lambda n, c: float(n <= c)),
    "band": (responses.band(0.75), lambda n, c: np.clip(n, 0.75 * c, c) / n),
    "detached": (responses.detached("hard"), oracles.hard),
    "user": (square_root_capper, lambda n, c: np.sqrt(min(c / n, 1))),
    "sharp": (responses.Smooth(4.0), lambda n, c: (1 + (n / c) ** 4) ** -0.25),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_any_response_to_one_singular_value(name):
    """Some of them above, some below; what is made larger is so with its rounding."""
    given, kept = RESPONSES[name]
    values = np.array([0.3, 1.0, 1.9, 2.1, 9.0, 40.0])
    x = matrix(np.random.default_rng(4), values, (6, 9)).astype(np.float32)
    found = clip("eigh", response=given)(x, 2.0)
    expected = oracles.by_singular_value(np.float64(x), 2.0, kept)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert helpers.differs(found, x)


@pytest.mark.parametrize("top", [2.0, 900.0])
def test_a_zero_stays_zero_whatever_the_response(top):
    """No response makes a singular value of what rounding left in place of one."""
    x = matrix(np.random.default_rng(4), [0, 0, 0, 1.0, 2.5, top], (6, 9))
    x = x.astype(np.float32)
    found = clip("eigh", response="normalize")(x, 2.0)
    left = np.linalg.svd(np.float64(found), compute_uv=False)
    np.testing.assert_allclose(left, [2, 2, 2, 0, 0, 0], atol=2e-3)


BAD = [jnp.nan, jnp.inf, -jnp.inf]


def test_products_keep_what_the_frobenius_norm_says_is_below_the_cap():
    rng = np.random.default_rng(0)
    for rank in [1, 2, 3] * 10:
        x = np.float32(rng.normal(size=(4, rank)) @ rng.normal(size=(rank, 6)))
        c = np.linalg.norm(np.float64(x)) / (1 - 1e-6)
        helpers.assert_identical(clip("newton_schulz")(x, c), x)
        assert np.any(clip("newton_schulz")(x, c / 3) != x)


@methods
@pytest.mark.parametrize("bad", BAD, ids=["nan", "inf", "-inf"])
def test_one_bad_matrix_of_a_batch(method, bad):
    """The policies: the others are clipped as ever."""
    x = jnp.asarray(X).at[1, 2, 3].set(bad)
    others = oracles.by_singular_value(np.float64(X[::2]), 1.0)
    shown = np.float64(X[1])
    shown[2, 3] = 0
    dropped = oracles.by_singular_value(shown, 1.0)
    expected = {"propagate": jnp.nan, "raise": jnp.nan, "zero": 0.0, "drop": dropped}
    for policy, wanted in expected.items():
        found = clip(method, nonfinite=policy)(x, 1.0)
        np.testing.assert_allclose(found[::2], others, atol=3e-6)
        np.testing.assert_allclose(
            found[1], np.broadcast_to(wanted, (4, 6)), atol=3e-6, err_msg=policy
        )
        helpers.assert_identical(clip(method, nonfinite=policy)(x, jnp.inf), x)
    # inf lets its own matrix through, whatever the threshold of the others.
    limits = jnp.float32([[1.0], [jnp.inf], [1.0]])
    helpers.assert_identical(clip(method)(x, limits)[1], x[1])
    # What is dropped is dropped below the cap too.
    found = clip(method, nonfinite="drop")(x, 1e3)
    np.testing.assert_array_equal(found[1], np.float32(shown))
    helpers.assert_identical(found[::2], x[::2])


@methods
def test_what_is_bad_is_counted_and_raised(method):
    x = jnp.asarray(X).at[1, 2, 3].set(jnp.nan)
    for policy in ("zero", "drop"):
        tx = optclip.clip_by_singular_value(1.0, method=method, nonfinite=policy)
        _, state = tx.update(x, tx.init(x))
        assert optclip.metrics(state)["clip/nonfinite"] == 1
    wrapped = checkify.checkify(
        lambda x: F.clip_by_singular_value(x, 1.0, method=method, nonfinite="raise"),
    )
    assert "non-finite update in the array" in str(wrapped(x)[0].get())


@methods
def test_a_vector_that_is_not_finite(method):
    v = jnp.array([3.0, jnp.inf, 4.0])
    assert np.all(np.isnan(clip(method)(v, 1.0)))
    assert not np.any(clip(method, nonfinite="zero")(v, 1.0))
    found = clip(method, nonfinite="drop")(v, 1.0)
    np.testing.assert_allclose(found, [0.6, 0, 0.8], rtol=1e-6)
