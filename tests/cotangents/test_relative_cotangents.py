"""Thresholds relative to the norms of the array itself."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import clip_cotangent
from tests.support import backprop
from tests.support.helpers import differs, quick_jit

RNG = np.random.default_rng(3)
COTANGENT = (RNG.normal(size=(6, 5, 8)) * np.exp(RNG.normal(size=(6, 5, 1)))).astype(
    np.float32
)
COTANGENT[:3, :2] = 0  # Padding, a fifth of all tokens.
RELATIVES = ("rms", "median", 0.9)


def pulled(cotangent, *args, **options):
    x = jnp.zeros(cotangent.shape, cotangent.dtype)
    return jax.vjp(lambda x: clip_cotangent(x, *args, **options), x)[1](cotangent)[0]


@functools.cache
def clipped(relative, **options):
    """Return a compiled function of the cotangent and the factor."""
    return quick_jit(lambda g, factor: pulled(g, factor, relative=relative, **options))


def norms_of(cotangent, axis=-1):
    return np.linalg.norm(cotangent.astype(np.float64), axis=axis, keepdims=True)


@pytest.mark.covering(relative=(*RELATIVES, 0.0), axis=(-1, (0, 2), ()))
def test_relative_threshold_equals_formula(relative, axis):
    norms = np.abs(COTANGENT) if axis == () else norms_of(COTANGENT, axis)
    for factor in (0.5, 0.9):
        limit = factor * backprop.reference(norms.astype(np.float64), relative)
        by_hand = backprop.by_value(limit) if axis == () else backprop.hard(limit, axis)
        found = clipped(relative, axis=axis)(COTANGENT, factor)
        assert differs(found, COTANGENT)
        np.testing.assert_allclose(found, by_hand(COTANGENT), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("relative", RELATIVES)
def test_relative_threshold_scales_with_loss(relative):
    expected = np.float64(clipped(relative, axis=-1)(COTANGENT, 0.9))
    for scale in np.float32([1e-15, 1e-6, 2.0**16, 1e30]):
        found = clipped(relative, axis=-1)(COTANGENT * scale, 0.9)
        scaled = expected * scale
        atol = 2e-7 * np.abs(scaled).max()
        np.testing.assert_allclose(found, scaled, rtol=2e-6, atol=atol)


def test_relative_threshold_in_half_precision_equals_formula():
    half = (COTANGENT / 8).astype(np.float16)
    found = clipped("median")(half * np.float16(2**10), 1.0)
    wide = half.astype(np.float64) * 2**10
    limit = backprop.reference(norms_of(wide), "median")
    np.testing.assert_allclose(found, backprop.hard(limit)(wide), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("relative", [*RELATIVES, jnp.max])
def test_relative_threshold_skips_nonfinite_rows(relative):
    cotangent = COTANGENT.copy()
    cotangent[4, 4, 0], cotangent[5, 0, 0] = np.inf, np.nan
    found = clipped(relative, nonfinite="zero")(cotangent, 0.5)
    known = np.where(np.isfinite(norms_of(cotangent)), cotangent, 0)
    level = 1.0 if callable(relative) else relative
    limit = 0.5 * backprop.reference(norms_of(known), level)
    np.testing.assert_allclose(found, backprop.hard(limit)(known), rtol=2e-6)


@pytest.mark.parametrize("relative", RELATIVES)
def test_relative_threshold_of_zeros_or_inf_is_never_nan(relative):
    """Without norms or arrays, and with a factor of 0 or inf, no operation is NaN."""
    run = clipped(relative, axis=-1)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(run(0 * COTANGENT, 1.0), 0)
        np.testing.assert_array_equal(run(COTANGENT, 0.0), 0)
        np.testing.assert_array_equal(run(COTANGENT, np.inf), COTANGENT)
    nothing = np.zeros((0, 4), np.float32)
    found = jax.eval_shape(lambda: pulled(nothing, 1.0, relative=relative))
    assert found.shape == (0, 4)


def test_relative_threshold_beyond_float32_still_zeroes_inf():
    cotangent = np.array([[3e38, 0], [2e38, 0], [np.inf, 1]], np.float32)
    found = clipped("rms", nonfinite="zero")(cotangent, 100.0)
    np.testing.assert_array_equal(found[:2], cotangent[:2])
    np.testing.assert_array_equal(found[2], 0)
    # Of 0 times an infinite reference.
    infinite = quick_jit(lambda g: pulled(g, 0.0, relative=lambda norms: jnp.inf))
    np.testing.assert_array_equal(infinite(cotangent[:2]), 0)


@pytest.mark.parametrize("where", ["relative", "response"])
def test_relative_and_response_take_traced_numbers_in_scan(where):
    def value(x, q):
        how = {"relative": q}
        if where == "response":
            how = {"response": optclip.responses.Smooth(q)}
        return jnp.sum(clip_cotangent(x, 0.5, **how) * COTANGENT[0])

    def scanned(x, q):
        step = jax.checkpoint(lambda total, row: (total + value(row, q), None))
        return jax.lax.scan(step, 0.0, x)[0]

    found = quick_jit(jax.grad(scanned))(np.zeros((2, 5, 8), np.float32), 0.75)
    plain = quick_jit(jax.grad(value))(np.zeros((5, 8), np.float32), 0.75)
    assert differs(plain, COTANGENT[0])
    np.testing.assert_allclose(found, np.stack([plain, plain]), rtol=1e-6)


def scanned(value):
    return lambda *args: jax.lax.scan(lambda t, row: (t + value(*row), None), 0.0, args)


def in_turn(wrapped):
    return lambda *args: [sum(wrapped(*row) for row in zip(*args, strict=True))]


TRACED = {
    "scan": scanned,
    "checkpoint": lambda value: in_turn(jax.checkpoint(value)),
    "vmap": lambda value: lambda *args: [jnp.sum(jax.vmap(value)(*args))],
    "jit": lambda value: in_turn(jax.jit(value)),
    "cond": lambda value: scanned(
        lambda *row: jax.lax.cond(row[0][0, 0] == 0, value, lambda *_: 0.0, *row)
    ),
}


@pytest.mark.parametrize(
    ("under", "dtype"), [*((under, np.int32) for under in TRACED), ("scan", bool)]
)
def test_clip_cotangent_function_of_traced_whole_numbers_clips_by_them(under, dtype):
    """A response and a reference that close over an int or a bool, one per example."""

    def value(x, flag, g):
        def response(norm, limit):
            return jnp.where(flag == 1, jnp.minimum(1, limit / norm), 1.0)

        def relative(norms):
            return jnp.where(flag == 1, jnp.max(norms), jnp.inf)

        x = clip_cotangent(x, 4.0, response=response)
        return jnp.sum(clip_cotangent(x, 0.5, relative=relative) * g)

    flags = np.arange(6) % 2
    total = TRACED[under](value)
    given = np.zeros_like(COTANGENT), jnp.asarray(flags, dtype), COTANGENT
    # Each check for leaks collects garbage, 0.2 s for a heap that is not frozen.
    gc.freeze()
    try:
        with jax.check_tracer_leaks():
            found = quick_jit(jax.grad(lambda *args: total(*args)[0]))(*given)
    finally:
        gc.unfreeze()
    expected = COTANGENT.astype(np.float64)
    for i in np.flatnonzero(flags):
        limit = 0.5 * norms_of(expected[i]).max()
        halved = backprop.hard(limit)(expected[i])
        expected[i] = backprop.hard(4.0)(halved)
        assert differs(halved, COTANGENT[i])
    assert np.any(norms_of(COTANGENT[flags == 1]) > 8)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("relative", RELATIVES)
def test_relative_threshold_derivative_goes_through_reference(relative):
    """Doubling the loss doubles the gradient."""

    def gradient(size):
        return jnp.sum(pulled(size * COTANGENT, 0.9, relative=relative))

    total, slope = quick_jit(jax.value_and_grad(gradient))(1.0)
    np.testing.assert_allclose(slope, total, rtol=1e-4, atol=1e-4)
