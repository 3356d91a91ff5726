"""The coefficient and its product round once; with `strict`, never above the bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import functional as F
from tests.support import helpers, oracles


@functools.cache
def clip(p=2.0, **how):
    return helpers.quick_jit(lambda x, c: F.clip_by_global_norm(x, c, ord=p, **how)[0])


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "float16"])
def test_strict_rounds_small_formats_towards_zero(dtype):
    x = np.array([6.0, 3.0, -1.5, 0.5, 4.0]).astype(jnp.dtype(dtype))
    for c in (0.9, 2.2, 5.0, 7.1):
        assert 0.3 * c < oracles.norm(helpers.as_float64(clip(strict=True)(x, c))) <= c


@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_strict_bound_is_rounded_to_next_number_towards_zero(wide):
    """The pattern before -0 or 0 is a NaN in some formats, and debug_nans raises."""
    bounds = {x: oracles.between(x, "float32") for x in oracles.NARROW}
    x = {k: np.full(b.shape, jnp.finfo(k).max, k) for k, b in bounds.items()}
    x = {k: np.where(bounds[k] < 0, -v, v) for k, v in x.items()}
    by_value = functools.partial(F.clip_by_value, strict=True)
    with jax.debug_nans(True), jax.enable_x64(wide == "float64"):
        limits = jax.tree.map(lambda b: abs(b).astype(wide), bounds)
        # Unoptimized, XLA's select doubles numbers of float8_e5m2fnuz.
        clipped = helpers.optimized_jit(by_value)(x, limits)
    for k, b in bounds.items():
        steps = oracles.step(b, k)
        expected = np.trunc(b / steps) * steps
        np.testing.assert_array_equal(helpers.as_float64(clipped[k]), expected, k)


@pytest.mark.parametrize(
    ("dtype", "c", "strict"),
    [
        ("float32", 2.0**-60, False),
        ("float32", 2.0**-36, True),
        ("float64", 2.0**-500, False),
        ("float64", 2.0**-450, True),
    ],
)
def test_smallest_nonzero_threshold_is_applied(dtype, c, strict):
    with jax.enable_x64(dtype == "float64"):
        x = np.array([3.0, 4.0], dtype)
        # A Python number is rounded before the comparison, a traced one after it.
        by_number = functools.partial(F.clip_by_global_norm, strict=strict)
        for by in (clip(strict=strict), lambda x, c: by_number(x, c)[0]):
            clipped = np.asarray(by(x, c), np.float64) / c
            rtol = 1.3e-4 if strict else 3e-6
            np.testing.assert_allclose(np.linalg.norm(clipped), 1, rtol=rtol)
            assert not np.any(by(x, c * 0.99))


@pytest.mark.parametrize(
    ("norm", "c", "eps"), [(5e-6, 1e-6, 1e-6), (5.0, 1e-10, 0.5), (5.0, 1e-18, 1)]
)
def test_eps_is_added_to_norm(norm, c, eps):
    """As in PyTorch: the clipped norm is a little below the threshold."""
    x = np.array([0.6, 0.8]) * norm
    clipped = clip(eps=eps)(np.float32(x), c)
    np.testing.assert_allclose(clipped, x * c / (norm + eps), rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "eps", "limit", "expected"),
    [
        # Without eps the bounds are exact.
        *(([-np.inf, 3], zero, 0.1, [-0.1, 0.1]) for zero in (0, np.float32(0))),
        ([-np.inf, 3], jnp.float32(0), 0.1, [-0.1, 0.1]),
        ([-3, 0.5, 3], 1.0, 1.0, [-3 / 4, 1 / 3, 3 / 4]),
    ],
)
def test_eps_is_added_to_modulus_of_each_element(x, eps, limit, expected):
    clipped, _ = F.clip_by(np.float32(x), limit, over="element", eps=eps)
    np.testing.assert_allclose(clipped, np.float32(expected), rtol=1e-6 * (eps > 0))


def test_traced_eps_below_zero_counts_as_zero():
    """It cannot raise an error, and added to the norm it would prevent clipping."""

    def by_eps(x, eps):
        return F.clip_by_global_norm(x, 1.0, eps=eps, strict=True)[0]

    x, compiled = np.float32([3.0, 4.0]), helpers.quick_jit(by_eps)
    np.testing.assert_array_equal(compiled(x, -4.5), compiled(x, 0.0))
    assert oracles.norm(compiled(x, -4.5)) <= 1.0


@pytest.mark.parametrize("bound", [0.0, 1e-40, 2.0**-126])
def test_strict_bounds_hold_near_smallest_numbers(bound, run):
    """Subnormal elements, which CPUs treat as zeros, may exceed a subnormal bound."""
    x = np.float32([1e-38, -1e-39, 1.0])
    by = run(lambda x: F.clip_by_value(x, lower=-bound, upper=bound, strict=True))
    clipped = helpers.as_float64(by(x))
    assert np.all(np.abs(clipped) <= np.float64(np.float32(bound)))
    assert helpers.differs(clipped, x)
    if bound >= 2.0**-126:
        np.testing.assert_array_equal(clipped[:2], np.float64(x[:2]))


@pytest.mark.parametrize("bound", [2**24 + 1, 2**24 + 3, 2**31 - 1, 7])
def test_strict_integer_bound_is_rounded_towards_zero(bound):
    """float32 holds 24 binary digits, and rounds 2**24 + 3 up."""
    updates = np.float32([2.0**32, -(2.0**32)])
    clipped = F.clip_by_value(updates, jnp.int32(bound), strict=True)
    expected = np.float32(bound)
    if int(expected) > bound:
        expected = np.nextafter(expected, np.float32(0))
    np.testing.assert_array_equal(clipped, [expected, -expected])
    small = F.clip_by_value(updates, jnp.int16(7), strict=True)
    np.testing.assert_array_equal(small, [7, -7])
    lowest = F.clip_by_value(updates, lower=jnp.int32(-(2**31)), strict=True)
    assert lowest[1] == -(2.0**31)


def test_float64_thresholds_of_float32_leaves_are_strict_bounds():
    with jax.enable_x64(True):
        x = jnp.ones(1, jnp.float32)
        for tenth in (0.1, jnp.float64(0.1)):
            clipped = F.clip_by_value(x, lower=-tenth, upper=tenth, strict=True)
            assert 0.0999999 < float(clipped[0]) <= 0.1
        assert F.clip_by_value(x, lower=-0.5, upper=0.5, strict=True) == 0.5
        mixed = {"a": np.linspace(1, 2, 9, dtype=np.float32), "b": np.float64([1.0])}
        for c in np.linspace(0.9, 1.1, 20):
            with jax.numpy_dtype_promotion("strict"):
                clipped = np.concatenate([*clip(strict=True)(mixed, c).values()])
            assert 0.999 * c < oracles.norm(np.float64(clipped)) <= c
        clipped = clip()(jnp.full(9, 1e38, jnp.float32), jnp.float64(1.5e38))
        np.testing.assert_allclose(clipped, np.full(9, 5e37), rtol=1e-6)
