"""The coefficient and its product: rounded once, never above the threshold if strict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import functional as F
from tests.support import helpers, oracles
from tests.support.covering import RUNS


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "float16"])
def test_strict_rounds_small_formats_towards_zero(dtype):
    x = jnp.array([6.0, 3.0, -1.5, 0.5, 4.0], dtype)
    for c in (0.9, 2.2, 5.0, 7.1):
        found, _ = F.clip_by_global_norm(x, c, strict=True)
        assert 0.3 * c < oracles.norm(helpers.as_float64(found)) <= c


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
def test_strict_takes_the_next_number_towards_zero(dtype):
    bits = jnp.finfo(dtype).bits
    numbers = np.arange(2 ** (bits - 1), dtype=f"uint{bits}").view(jnp.dtype(dtype))
    numbers = numbers.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    x = jnp.asarray(np.random.default_rng(1).normal(size=99), dtype)
    found, _ = F.clip_by_global_norm(x, 1.7, strict=True)
    wide = np.abs(helpers.as_float64(x))
    exact = wide * (1.7 / oracles.norm(wide))
    # The guard band is 1.22e-4 wide.
    least, most = (
        numbers[np.searchsorted(numbers, exact * k, "right") - 1]
        for k in (1 - 1.3e-4, 1)
    )
    size = np.abs(helpers.as_float64(found))
    assert np.all((least <= size) & (size <= most))
    assert np.all(size < wide)


@pytest.mark.parametrize(
    ("dtype", "c", "strict"),
    [
        ("float32", 2.0**-60, False),
        ("float32", 2.0**-36, True),
        ("float64", 2.0**-500, False),
        ("float64", 2.0**-450, True),
    ],
)
def test_the_smallest_threshold_that_is_not_zero(dtype, c, strict):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.array([3.0, 4.0], dtype)
        for given in (float, lambda c: jnp.asarray(c, dtype)):
            found, _ = F.clip_by_global_norm(x, given(c), strict=strict)
            size = np.linalg.norm(np.asarray(found, np.float64) / c)
            np.testing.assert_allclose(size, 1, rtol=1.3e-4 if strict else 3e-6)
            below, _ = F.clip_by_global_norm(x, given(c * 0.99), strict=strict)
            assert not np.any(below)


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strict_leaves_little_less_and_clips_once(dtype, p):
    loss = {"float32": 1.3e-4, "float64": 2e-12}[dtype]
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        clip = jax.jit(lambda x, c: F.clip_by_global_norm(x, c, ord=p, strict=True)[0])
        for _ in range(20):
            x = jnp.asarray(rng.normal(size=50), dtype)
            c = 0.7 * np.linalg.norm(np.asarray(x, np.float64), ord=p)
            found = clip(x, c)
            size = np.linalg.norm(np.asarray(found, np.float64), ord=p)
            assert c * (1 - loss) <= size <= c
            np.testing.assert_array_equal(clip(found, c), found)


def test_strict_and_a_given_norm_exclude_each_other():
    with pytest.raises(ValueError, match="Only one of strict=True and use_norm="):
        F.clip_by_global_norm(jnp.ones(2), 1.0, use_norm=2.0, strict=True)


@pytest.mark.covering(dtype=["bfloat16", "float16", "float8_e4m3fn"], run=RUNS)
def test_scaled_wide_and_rounded_once(dtype, run):
    """Not in the leaf's own dtype, where the coefficient would be rounded too."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=999), dtype)
    wide = np.asarray(x).astype(np.float64)
    clip = run(lambda x: F.clip_by_global_norm(x, 7.7)[0])
    exact = wide * (7.7 / np.linalg.norm(wide))
    # The norm is float32: a product close to a tie may go to the other side.
    assert np.mean(np.asarray(clip(x)) != exact.astype(x.dtype)) < 0.01


@pytest.mark.parametrize(
    ("norm", "c", "eps"), [(5e-6, 1e-6, 1e-6), (5.0, 1e-10, 0.5), (5.0, 1e-18, 1)]
)
def test_eps_is_added_to_the_norm(norm, c, eps):
    """As in PyTorch, so that the norm left is a little below the threshold."""
    x = np.array([0.6, 0.8]) * norm
    found, _ = F.clip_by_global_norm(jnp.float32(x), c, eps=eps)
    np.testing.assert_allclose(found, x * c / (norm + eps), rtol=1e-6)


def test_a_traced_eps_below_zero_counts_as_zero():
    """It is not checked, and would switch the clip off."""
    clip = jax.jit(lambda x, e: F.clip_by_global_norm(x, 1.0, eps=e, strict=True)[0])
    x = jnp.array([3.0, 4.0])
    np.testing.assert_array_equal(clip(x, -4.5), clip(x, 0.0))
    assert oracles.norm(clip(x, -4.5)) <= 1.0


@pytest.mark.parametrize("bound", [0.0, 1e-40, 2e-38])
def test_strict_bounds_near_the_smallest_numbers(bound, run):
    """What a CPU takes for zeros is above such a bound all the same."""
    x = jnp.array([1e-38, -1e-39, 1.0])
    clip = run(lambda x: F.clip_by_value(x, lower=-bound, upper=bound, strict=True))
    found = helpers.as_float64(clip(x))
    assert np.all(np.abs(found) <= np.float64(np.float32(bound)))
    assert helpers.differs(found, x)


def test_a_wide_jax_number_is_a_threshold_like_any():
    with jax.enable_x64(True):
        x = jnp.ones(1, jnp.float32)
        for tenth in (0.1, jnp.float64(0.1)):
            found = F.clip_by_value(x, lower=-tenth, upper=tenth, strict=True)
            assert 0.0999999 < float(found[0]) <= 0.1
        assert F.clip_by_value(x, lower=-0.5, upper=0.5, strict=True) == 0.5
        huge = jnp.full(9, 1e38, jnp.float32)
        found, _ = F.clip_by_global_norm(huge, jnp.float64(1.5e38))
        assert np.all(found < 5.1e37)
