"""Thresholds relative to the norms of the array itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import clip_cotangent
from tests.support import backprop
from tests.support.helpers import differs, quick_jit

SIZES = np.exp(np.random.default_rng(0).normal(size=(6, 5, 1)))
COTANGENT = (np.random.default_rng(1).normal(size=(6, 5, 8)) * SIZES).astype(np.float32)
COTANGENT[:3, :2] = 0  # Padding, a fifth of all tokens.
RELATIVES = ("median", jnp.max)


def pulled(cotangent, *args, **options):
    x = jnp.zeros(cotangent.shape, cotangent.dtype)
    return jax.vjp(lambda x: clip_cotangent(x, *args, **options), x)[1](cotangent)[0]


def pulled_by_all(cotangent, factor, **options):
    return [pulled(cotangent, factor, relative=r, **options) for r in RELATIVES]


@functools.cache
def clipped(**options):
    """Return a compiled function of the cotangent and the factor."""
    return quick_jit(functools.partial(pulled_by_all, **options))


def norms_of(cotangent, axis=-1):
    squares = np.float64(cotangent) ** 2
    return np.sqrt(np.sum(squares, axis, keepdims=True))


def reference(cotangent, relative, axis=-1):
    norms = norms_of(cotangent, axis)
    counted = norms[(norms > 0) & np.isfinite(norms)]
    return np.max(counted) if relative is jnp.max else np.median(counted)


@pytest.mark.parametrize("axis", [-1, (0, 2), ()])
def test_relative_threshold_equals_formula(axis):
    for factor in (0.5, 0.9):
        clips = clipped(axis=axis)(COTANGENT, factor)
        for relative, found in zip(RELATIVES, clips, strict=True):
            limit = factor * reference(COTANGENT, relative, axis)
            expected = backprop.hard(limit, axis)(COTANGENT)
            assert differs(found, COTANGENT)
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


def test_relative_threshold_scales_with_loss():
    expected = clipped(axis=-1)(COTANGENT, 0.9)
    for scale in np.float32([1e-15, 1e-6, 2.0**16, 1e30]):
        clips = clipped(axis=-1)(COTANGENT * scale, 0.9)
        for found, unscaled in zip(clips, expected, strict=True):
            scaled = np.float64(unscaled) * scale
            atol = 2e-7 * np.abs(scaled).max()
            np.testing.assert_allclose(found, scaled, rtol=2e-6, atol=atol)


def test_relative_threshold_skips_nonfinite_rows():
    cotangent = COTANGENT.copy()
    cotangent[4, 4, 0], cotangent[5, 0, 0] = np.inf, np.nan
    known = np.where(np.isfinite(norms_of(cotangent)), cotangent, 0)
    clips = clipped(nonfinite="zero")(cotangent, 0.5)
    for relative, found in zip(RELATIVES, clips, strict=True):
        limit = 0.5 * reference(known, relative)
        np.testing.assert_allclose(found, backprop.hard(limit)(known), rtol=2e-6)


def test_relative_threshold_of_zeros_or_inf_is_never_nan():
    """Without norms or arrays, and with a factor of 0 or inf, no operation is NaN."""
    run, zeros = clipped(axis=-1), 0 * COTANGENT
    cases = (zeros, 1.0, zeros), (COTANGENT, 0.0, zeros), (COTANGENT, np.inf, COTANGENT)
    with jax.debug_nans(True):
        for cotangent, factor, expected in cases:
            for found in run(cotangent, factor):
                np.testing.assert_array_equal(found, expected)
    nothing = np.zeros((0, 4), np.float32)
    found = jax.eval_shape(lambda: pulled(nothing, 1.0, relative="median"))
    assert found.shape == (0, 4)


def test_relative_threshold_beyond_float32_still_zeroes_inf():
    cotangent = np.array([[3e38, 0], [2e38, 0], [np.inf, 1]], np.float32)
    found = quick_jit(lambda g: pulled(g, 100.0, relative="median", nonfinite="zero"))(
        cotangent
    )
    np.testing.assert_array_equal(found[:2], cotangent[:2])
    np.testing.assert_array_equal(found[2], 0)
    # Of 0 times an infinite reference.
    infinite = quick_jit(lambda g: pulled(g, 0.0, relative=lambda norms: jnp.inf))
    np.testing.assert_array_equal(infinite(cotangent[:2]), 0)


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
    ("under", "dtype"),
    [
        *((under, np.int32) for under in TRACED),
        *(("scan", bool), ("scan", np.float32), ("checkpoint", np.float32)),
    ],
)
def test_clip_cotangent_function_of_traced_numbers_clips_by_them(under, dtype):
    """A response and a reference that close over a number or bool, one per example."""

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
    found = quick_jit(jax.grad(lambda *args: total(*args)[0]))(*given)
    expected = COTANGENT.astype(np.float64)
    for i in np.flatnonzero(flags):
        limit = 0.5 * norms_of(expected[i]).max()
        halved = backprop.hard(limit)(expected[i])
        expected[i] = backprop.hard(4.0)(halved)
        assert differs(halved, COTANGENT[i])
    assert np.any(norms_of(COTANGENT[flags == 1]) > 8)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_relative_threshold_derivative_goes_through_reference():
    """Doubling the loss doubles the gradient."""

    def gradients(size):
        return jnp.stack([jnp.sum(g) for g in pulled_by_all(size * COTANGENT, 0.9)])

    totals = quick_jit(gradients)(1.0)
    slopes = quick_jit(jax.jacrev(gradients))(1.0)
    np.testing.assert_allclose(slopes, totals, rtol=1e-4, atol=1e-4)
