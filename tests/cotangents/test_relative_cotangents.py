"""Thresholds that are multiples of the array itself, and the settings of papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import clip_cotangent
from tests.support import backprop, helpers
from tests.support.covering import RUNS

RNG = np.random.default_rng(3)
COTANGENT = (RNG.normal(size=(6, 5, 8)) * np.exp(RNG.normal(size=(6, 5, 1)))).astype(
    np.float32
)
COTANGENT[:3, :2] = 0  # Padding, of a fifth of all tokens.


def pulled(cotangent, *args, **options):
    x = jnp.zeros(cotangent.shape, cotangent.dtype)
    return jax.vjp(lambda x: clip_cotangent(x, *args, **options), x)[1](cotangent)[0]


def norms_of(cotangent, axis=-1):
    wide = cotangent.astype(np.float64)
    return np.sqrt(np.sum(wide**2, axis=axis, keepdims=True))


@pytest.mark.covering(
    relative=("rms", "median", 0.0, 0.25, 0.9, 1.0),
    axis=(-1, (0, 2), ()),
    factor=(0.5, 0.9),
    run=RUNS,
)
def test_rows_above_a_multiple_are_scaled_to_it(relative, axis, factor, run):
    norms = np.abs(COTANGENT) if axis == () else norms_of(COTANGENT, axis)
    limit = factor * backprop.reference(norms.astype(np.float64), relative)
    by_hand = backprop.by_value(limit) if axis == () else backprop.hard(limit, axis)
    found = run(lambda g: pulled(g, factor, axis=axis, relative=relative))(COTANGENT)
    assert helpers.differs(found, COTANGENT)
    np.testing.assert_allclose(found, by_hand(COTANGENT), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-15, 1e-6, 2.0**16, 1e30])
@pytest.mark.parametrize("relative", ["rms", "median", 0.9])
def test_the_scale_of_a_loss_changes_nothing(relative, scale):
    found = pulled(COTANGENT * np.float32(scale), 0.9, relative=relative)
    expected = pulled(COTANGENT, 0.9, relative=relative)
    scaled = np.asarray(expected, np.float64) * np.float32(scale)
    size = np.abs(scaled).max()
    np.testing.assert_allclose(found, scaled, rtol=2e-6, atol=2e-7 * size)


def test_in_half_precision_with_a_scaled_loss():
    half = (COTANGENT / 8).astype(np.float16)
    found = pulled(half * np.float16(2**10), 1.0, relative="median")
    wide = half.astype(np.float64) * 2**10
    limit = backprop.reference(norms_of(wide), "median")
    np.testing.assert_allclose(found, backprop.hard(limit)(wide), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("relative", ["rms", "median", 0.9])
def test_rows_that_are_not_finite_are_not_compared_with(relative):
    cotangent = COTANGENT.copy()
    cotangent[4, 4, 0], cotangent[5, 0, 0] = np.inf, np.nan
    found = pulled(cotangent, 0.9, relative=relative, nonfinite="zero")
    known = np.where(np.isfinite(norms_of(cotangent)), cotangent, 0)
    limit = 0.9 * backprop.reference(norms_of(known), relative)
    np.testing.assert_allclose(found, backprop.hard(limit)(known), rtol=2e-6)


@pytest.mark.parametrize("relative", ["rms", "median", 0.9])
def test_of_nothing_there_is_no_reference(relative):
    zeros = np.zeros((3, 4), np.float32)
    np.testing.assert_array_equal(pulled(zeros, 1.0, relative=relative), zeros)
    nothing = np.zeros((0, 4), np.float32)
    assert pulled(nothing, 1.0, relative=relative).shape == (0, 4)


def test_an_infinite_factor_clips_nothing_and_0_all():
    for relative in ("rms", "median"):
        found = pulled(COTANGENT, np.inf, relative=relative)
        np.testing.assert_array_equal(found, COTANGENT)
        np.testing.assert_array_equal(pulled(COTANGENT, 0.0, relative=relative), 0)


def test_a_factor_of_a_reference_beyond_float32_still_zeroes_an_inf():
    cotangent = np.array([[3e38, 0], [2e38, 0], [np.inf, 1]], np.float32)
    found = pulled(cotangent, 100.0, relative="rms", nonfinite="zero")
    np.testing.assert_array_equal(
        found, np.where(cotangent == np.inf, 0, cotangent) * [[1], [1], [0]]
    )


def test_a_function_sees_0_for_what_is_not_finite():
    cotangent = COTANGENT.copy()
    cotangent[4, 4, 0], cotangent[5, 0, 0] = np.inf, np.nan
    found = pulled(cotangent, 0.5, relative=jnp.max, nonfinite="zero")
    known = np.where(np.isfinite(norms_of(cotangent)), cotangent, 0)
    limit = 0.5 * norms_of(known).max()
    np.testing.assert_allclose(found, backprop.hard(limit)(known), rtol=2e-6)
    np.testing.assert_array_equal(pulled(known, 0.0, relative=lambda n: jnp.inf), 0)


@pytest.mark.parametrize("relative", ["rms", "median", 0.3])
def test_healthy_input_makes_no_nan_on_the_way(relative):
    with jax.debug_nans(True):
        zeros = jnp.zeros((3, 4))
        np.testing.assert_array_equal(pulled(zeros, 1.0, relative=relative), 0)
        found = pulled(COTANGENT, 0.9, relative=relative)
    assert helpers.differs(found, COTANGENT)


@pytest.mark.parametrize("wrapped", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("where", ["relative", "response", "function"])
def test_traced_numbers_may_stand_anywhere(wrapped, where):
    def value(x, q):
        how = {
            "relative": {"relative": q},
            "response": {"response": optclip.responses.Smooth(q)},
            "function": {"relative": lambda norms: q * jnp.max(norms)},
        }[where]
        return jnp.sum(clip_cotangent(x, 0.5, **how) * COTANGENT)

    def scanned(x, q):
        def step(total, row):
            return total + wrapped(value)(row[None], q), None

        return jax.lax.scan(step, 0.0, x)[0]

    for function in (wrapped(value), scanned):
        found = jax.jit(jax.grad(function))(jnp.zeros((1, 6, 5, 8))[0], 0.75)
        assert helpers.differs(found, COTANGENT)
        plain = jax.grad(value)(jnp.zeros((6, 5, 8)), 0.75)
        if function is not scanned:
            np.testing.assert_allclose(found, plain, rtol=1e-6)


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


@pytest.mark.parametrize("dtype", [np.int32, bool])
@pytest.mark.parametrize("under", TRACED)
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
    with jax.check_tracer_leaks():
        found = jax.grad(lambda x: total(x, jnp.asarray(flags, dtype), COTANGENT)[0])(
            jnp.zeros(COTANGENT.shape)
        )
    expected = COTANGENT.astype(np.float64)
    for i in np.flatnonzero(flags):
        limit = 0.5 * norms_of(expected[i]).max()
        halved = backprop.hard(limit)(expected[i])
        expected[i] = backprop.hard(4.0)(halved)
        assert helpers.differs(halved, COTANGENT[i])
    assert np.any(norms_of(COTANGENT[flags == 1]) > 8)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_derivatives_go_through_the_reference():
    """Twice as large a loss has twice as large a gradient: that of degree 1."""
    for relative in ("rms", "median", 0.8):

        def gradient(size, relative=relative):
            return jnp.sum(pulled(size * COTANGENT, 0.9, relative=relative))

        slope = jax.jit(jax.grad(gradient))(1.0)
        np.testing.assert_allclose(slope, gradient(1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("answer", ["x", jnp.ones(2), None])
def test_a_function_returns_one_number(answer):
    with pytest.raises(TypeError, match="What `relative` returns must be one real num"):
        clip_cotangent(COTANGENT, 1.0, relative=lambda norms: answer)


# The settings that are published, each in one line.


def test_graves_sonnet_lasagne_and_rlax_clip_by_value():
    """Graves 2013, section 2.1; `snt.clip_gradient`, `rlax.clip_gradient`, `grad_clipping`.

    Those of Sonnet and rlax with the same bound on both sides, as they are used.
    """
    found = pulled(COTANGENT, 1.0, axis=())
    np.testing.assert_array_equal(found, np.clip(COTANGENT, -1, 1))


def test_axlearn_zeroes_the_tokens_with_the_largest_norms(run):
    """`gradient_monitor.top_k_clip_fn` of AXLearn, with k = 4."""
    found = run(
        lambda g: pulled(
            g, 1.0, relative=lambda norms: jnp.sort(norms)[-5], response="drop"
        )
    )(COTANGENT)
    norms = norms_of(COTANGENT)
    wanted = np.where(norms > np.sort(norms.ravel())[-5], 0, COTANGENT)
    np.testing.assert_array_equal(found, wanted)
    assert np.sum(np.any(wanted != COTANGENT, -1)) == 4


def test_kaldi_zeroes_what_is_large_now_and_then_and_scales_the_rest():
    """`BackpropTruncationComponent`: scaled to 30, above 15 zeroed every 20 frames."""

    def value(h, t):
        limit = jnp.where(t % 20 == 0, 15.0, jnp.inf)
        h = clip_cotangent(clip_cotangent(h, limit, response="drop"), 30.0)
        return jnp.sum(h * cotangent)

    cotangent = 10 * COTANGENT
    gradient = jax.jit(jax.grad(value))
    norms = norms_of(cotangent)
    assert np.sum(norms > 30) > 1
    assert np.sum((norms > 15) & (norms < 30)) > 1
    h = jnp.zeros(cotangent.shape)
    found = gradient(h, 3)
    np.testing.assert_allclose(found, backprop.hard(30.0)(cotangent), rtol=1e-6)
    np.testing.assert_array_equal(gradient(h, 40), backprop.drop(15.0)(cotangent))
