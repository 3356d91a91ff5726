"""The shipped responses, their names, and responses that users write."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional, responses
from optclip._responses import _responses
from tests.support import helpers, oracles
from tests.support.registry import LargestSoFar, square_root_capper

NORMS = np.float32([0.0, 1e-30, 0.5, 1.0, 1.0000001, 3.0, 1e10, 1e36])
THRESHOLDS = np.float32([1.0, 0.25, 7.0])
F32 = float(np.finfo(np.float32).max)


def smooth_8(n, c):
    return min(1, c / n) / (1 + min(n / c, c / n) ** 8) ** (1 / 8) if n else 1.0


def into_band(n, c, low=0.0, shrink=0.0, growth=F32):
    if n > c:
        return max(c / n, shrink)
    return max(1.0, min(max(0.5 * c, low) / n, growth)) if n else 1.0


FORMULAS = [
    (_responses.Hard(), oracles.hard),
    (_responses.Smooth(), oracles.smooth),
    (_responses.Normalize(), oracles.normalized),
    (_responses.Smooth(1.0), lambda n, c: 1 / (1 + n / c)),
    (_responses.Smooth(8.0), smooth_8),
    (_responses.Drop(), lambda n, c: float(n <= c)),
    (_responses.Tanh(), lambda n, c: c * math.tanh(n / c) / n if n else 1.0),
    (responses.band(0.5), into_band),
    (
        responses.band(0.5, min_norm=0.6, max_shrink=0.2, max_growth=3.0),
        functools.partial(into_band, low=0.6, shrink=0.2, growth=3.0),
    ),
]


@pytest.mark.parametrize(
    "make",
    [
        lambda how: optclip.clip_by_value(lower=-2.0, upper=1.0, response=how),
        lambda how: optclip.clip_by_singular_value(1.0, response=how),
        lambda how: optclip.per_example.clipped_grad(jnp.sum, 1.0, response=how),
    ],
)
def test_subclass_of_shipped_response_is_rejected_like_its_base(make):
    class Nearly(_responses.Proportional):
        pass

    with pytest.raises(ValueError, match=r"bounds|single singular value|response"):
        make(Nearly())


@pytest.mark.parametrize(("response", "formula"), FORMULAS)
def test_coefficient_matches_formula(response, formula):
    """Thresholds are 0, inf and NaN too; slopes are finite at a norm of zero."""
    slopes = jax.value_and_grad(response.coefficient, (0, 1))
    compiled = helpers.quick_jit(jax.vmap(jax.vmap(slopes, (0, None)), (None, 0)))
    edges = np.float32([0.0, np.inf, np.nan])
    found, (by_norm, by_c) = compiled(NORMS, np.append(THRESHOLDS, edges))
    expected = [[formula(float(n), float(c)) for n in NORMS] for c in THRESHOLDS]
    np.testing.assert_allclose(found[:3], expected, rtol=1e-6)
    at_zero = np.float32(getattr(response, "max_shrink", 0.0))
    np.testing.assert_array_equal(found[3][3:], at_zero)
    np.testing.assert_array_equal(found[4], 1.0)
    assert np.all(np.isnan(found[5][1:]))
    assert np.all(np.isfinite([by_norm[:3, 0], by_c[:3, 0]]))


@pytest.mark.parametrize("response", ["hard", "smooth", "normalize"])
def test_coefficient_near_smallest_float_is_accurate(response):
    x = np.full(1024, 1e30, np.float32)
    clipped = helpers.quickly_clipped(optclip.clip_by(1e-6, response=response), x)
    np.testing.assert_allclose(oracles.norm(clipped), 1e-6, rtol=1e-5)


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_user_response_is_not_applied_to_zeros(c):
    """So c / n, which is 0 / 0 there, gives no NaN, nor does its derivative."""
    zeros = np.zeros(3, np.float32)

    def total(x):
        clipped = clip(x, c, lambda n, c: jnp.minimum(1.0, c / n))
        return jnp.sum(clipped), clipped

    slope, clipped = helpers.quick_jit(jax.grad(total, has_aux=True))(zeros)
    np.testing.assert_array_equal(clipped, zeros)
    # At a threshold of 0 the result is 0 everywhere.
    np.testing.assert_array_equal(slope, np.full(3, c > 0))


def test_hard_element_at_bound_keeps_sign_of_zero():
    x, one = jnp.float32(-0.0), jnp.float32(1.0)
    assert np.signbit(_responses.Hard().element(x, -one, jnp.float32(0.0)))
    assert not np.signbit(_responses.Hard().element(-x, jnp.float32(-0.0), one))


def test_normalize_elements_move_to_bounds():
    x = np.float32([-0.5, -2.0, 0.0, 0.5, 3.0])
    moved = _responses.Normalize().element(x, np.float32(-1.0), np.float32(2.0))
    np.testing.assert_array_equal(moved, [-1, -1, 0, 2, 2])
    moved = _responses.Normalize().element(x, np.float32(-1.0), np.float32(np.inf))
    np.testing.assert_array_equal(moved, [-1, -1, 0, 0.5, 3])


CURVES = {
    "softsign": lambda r: r / (1 + np.abs(r)),
    "smooth": lambda r: r / np.hypot(1, r),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("size", [1e-10, 1.0, 1e30])
def test_curves_of_elements_match_formula(name, size):
    """The curve is the same at every scale, odd, and straight near zero."""
    x = np.array([-3.0, -1.0, -1e-3, 0.0, 1e-6, 0.5, 40.0])
    given = np.append(x * size, 1e-15).astype(np.float32)
    clipped = helpers.quickly_clipped(optclip.clip_by_value(size, response=name), given)
    threshold = float(np.float32(size))
    expected = threshold * CURVES[name](given.astype(np.float64) / threshold)
    np.testing.assert_allclose(clipped, expected, rtol=2e-6, atol=size * 1e-20)
    if size > 1:
        np.testing.assert_allclose(clipped[-1], 1e-15, rtol=1e-6)


def test_drop_elements_zeroes_those_beyond_bounds():
    tx = optclip.clip_by_value(lower=-1.0, upper=2.0, response="drop")
    x = np.float32([-1.5, -1.0, 0.0, 2.0, 2.5, np.inf, np.nan])
    clipped = helpers.quickly_clipped(tx, x)
    np.testing.assert_array_equal(clipped, [0.0, -1.0, 0.0, 2.0, 0.0, 0.0, np.nan])
    bounds = np.float32([np.nan, 1.0])
    for lower, upper in ((-bounds, 1.0), (-1.0, bounds)):
        kept = _responses.Drop().element(jnp.zeros(2), jnp.asarray(lower), upper)
        np.testing.assert_array_equal(np.isnan(kept), [True, False])


def test_proportional_slices_beside_infinite_one_are_scaled():
    clip = optclip.clip_by(1.0, over=optclip.axes(0), response="proportional")
    clipped = helpers.quickly_clipped(clip, np.float32([[3.0, np.inf], [4.0, 0.0]]))
    np.testing.assert_allclose(clipped[:, 0], [0.6, 0.8], rtol=1e-6)
    assert np.all(np.isnan(clipped[:, 1]))


def test_band_with_scheduled_lower_edge_follows_schedule():
    """So do a detached one and a user's subclass."""

    class Nearly(_responses.Band):
        pass

    band = responses.band(lambda step: 0.25 * (step + 1))
    for response in (band, responses.detached(band), Nearly(low=band.low)):
        tx = optclip.clip_by_global_norm(4.0, response=response)
        update, state = helpers.quick_jit(tx.update), tx.init(np.zeros(1, np.float32))
        for expected in (1.0, 2.0, 3.0):
            clipped, state = update(np.float32([0.1]), state)
            np.testing.assert_allclose(clipped, [expected], rtol=1e-6)


# `detached`: the coefficient is a constant to JAX.

X = np.float32([[3.0, 0.1], [4.0, 0.2]])
SCOPES = {
    "tree": "tree",
    "leaf": "leaf",
    "axes": optclip.axes(0),
    "element": "element",
}


def clip(x, c, response, **kwargs):
    return helpers.clipped(
        optclip.clip_by(c, response=response, record=False, **kwargs), x
    )


def value_and_slope(function, x):
    """Return the forward-mode Jacobian, which must agree with reverse mode."""

    def both(x):
        return function(x), jax.jacfwd(function)(x), jax.jacrev(function)(x)

    n = x.size
    value, *sides = helpers.quick_jit(both)(x)
    forward, reverse = (np.float64(side).reshape(n, n) for side in sides)
    atol = 1e-6 * np.max(np.abs(forward))
    np.testing.assert_allclose(forward, reverse, rtol=0, atol=atol)
    return value, forward


@pytest.mark.parametrize(
    ("over", "response"),
    [
        ("tree", "smooth"),
        ("leaf", square_root_capper),
        ("axes", "hard"),
        ("element", "hard"),
        ("element", "normalize"),
    ],
)
def test_detached_derivative_is_coefficient(over, response):
    def clipped(x, response):
        return clip(x, 1.0, response, over=SCOPES[over], norm="l2")

    def both(x):
        return clipped(x, response), jax.jacfwd(lambda x: clipped(x, response))(x)

    attached, with_clip = helpers.quick_jit(both)(X)
    detached = responses.detached(response)
    found, slope = value_and_slope(lambda x: clipped(x, detached), X)
    helpers.assert_close(found, attached, ulps=2)
    assert helpers.differs(found, X)
    exact = np.diag(np.ravel(np.float64(attached) / X))
    np.testing.assert_allclose(slope, exact, rtol=1e-6)
    assert np.max(np.abs(with_clip.reshape(4, 4) - exact)) > 0.05


def test_detached_derivative_is_coefficient_at_every_distance():
    """This also holds for coefficients stored as two factors, and at zero."""
    slope = helpers.quick_jit(
        jax.jacobian(lambda x: clip(x, 1.0, responses.detached()))
    )
    for times in (0.0, 0.5, 1.0, 1e6, 2.0**60, 1e25):
        exact = np.eye(2, dtype=np.float32) * min(1.0, 1 / max(times, 1))
        x = np.float32(times) * np.float32([0.6, -0.8])
        np.testing.assert_allclose(slope(x), exact, rtol=1e-6)


def test_detached_threshold_has_zero_derivative():
    """Rules, which compute thresholds from updates, have no derivative either."""
    by_threshold = jax.grad(lambda c: jnp.sum(clip(X, c, responses.detached())))
    assert helpers.quick_jit(by_threshold)(1.0) == 0
    _, slope = value_and_slope(
        lambda x: clip(x, LargestSoFar(), responses.detached()), X
    )
    np.testing.assert_allclose(slope, 0.5 * np.eye(4), rtol=1e-6)


class Unhashable:
    """A function without a hash, such as one that holds arrays."""

    __hash__ = None

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


class OfElements:
    """A user's response with a function of elements."""

    coefficient = Unhashable(lambda norm, threshold: threshold / norm)
    element = Unhashable(lambda x, lower, upper: jnp.clip(x, lower, upper))


def test_response_without_hash_clips_elements_and_is_recorded():
    tx = optclip.clip_by(1.0, over="element", response=OfElements())
    updates = np.float32([0.5, -3, 2])
    out, state = tx.update(updates, tx.init(updates))
    np.testing.assert_array_equal(out, [0.5, -1, 1])
    assert optclip.metrics(state)["clip/norm"] == 3


def test_detached_function_scales_outside_of_jit():
    response = responses.detached(lambda norm, threshold: threshold / norm)
    out, _ = optclip.functional.clip_by(np.float32([3, 4]), 1.0, response=response)
    np.testing.assert_allclose(out, [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("size", [1, 5])
def test_response_that_branches_on_traced_norms_is_rejected(size):
    def branching(norm, threshold):
        return threshold / norm if norm > threshold else 1.0

    tx = optclip.clip_by_norm(1.0, response=branching)
    updates = [np.float32([3, 4])] * size
    with pytest.raises(TypeError, match=r"not branch on values.*Use jnp.where"):
        jax.jit(tx.update).lower(updates, tx.init(updates))


# `signed = True`: the threshold is a parameter, such as an exponent.

UNSIGNED = SimpleNamespace(coefficient=lambda norm, p: norm ** (p - 1))
POWER = SimpleNamespace(signed=True, **vars(UNSIGNED))
OF_ELEMENTS = SimpleNamespace(
    **vars(POWER),
    element=lambda x, lower, p: jnp.sign(x) * jnp.where(x == 0, 1, jnp.abs(x)) ** p,
)
PAIR = {"a": np.float32([[3, -4], [0, 2]]), "b": np.float32([0.25, -8])}


SIGNED_SCOPES = {
    "tree": ("tree", POWER, lambda x: np.sqrt(93.0625)),
    "leaf": ("leaf", responses.detached(POWER), np.linalg.norm),
    "axes": (optclip.axes(-1), POWER, lambda x: np.linalg.norm(x, axis=-1)[..., None]),
    "element": ("element", POWER, lambda x: np.abs(x) + (x == 0)),
    "moved": ("element", OF_ELEMENTS, lambda x: np.abs(x) + (x == 0)),
}
FORMS = {
    "number": float,
    "array": np.float32,
    "schedule": lambda p: lambda step: p + 0.0 * step,
    "rule": lambda p: SimpleNamespace(
        init=lambda norm: (), update=lambda seen, m: (p, m)
    ),
    "scaled": lambda p: optclip.thresholds.scaled(p / 2, 2.0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scope", SIGNED_SCOPES)
def test_signed_response_receives_parameter(scope, form):
    over, response, norm = SIGNED_SCOPES[scope]
    for p in (0.25, -1e-9, -2.0):
        tx = optclip.clip_by(FORMS[form](p), over=over, response=response)
        out, _ = helpers.quick_jit(tx.update)(PAIR, tx.init(PAIR))
        powered = jax.tree.map(lambda x, p=p: x * norm(x) ** (p - 1), PAIR)
        helpers.assert_close(out, powered, ulps=40)
        pure = functools.partial(functional.clip_by, over=over, response=response)
        for run in (pure, helpers.quick_jit(pure)):
            helpers.assert_close(run(PAIR, np.float32(p))[0], powered, ulps=40)


@pytest.mark.parametrize(
    "call",
    [
        lambda how: optclip.clip_by({"a": -0.25, "b": None}, over="leaf", response=how),
        lambda how: functional.clip_by_singular_value(PAIR, -0.25, response=how),
        lambda how: optclip.clip_cotangent(PAIR, -0.25, response=how),
    ],
)
def test_negative_constant_names_signed_attribute(call):
    call(POWER)
    for how in (UNSIGNED, UNSIGNED.coefficient, responses.detached(UNSIGNED)):
        with pytest.raises(ValueError, match=r"at least 0, got -0\.25.*signed = True"):
            call(how)
    with pytest.raises(ValueError, match=r"`strict`.*signed"):
        optclip.clip_by(1.0, strict=True, response=POWER)
    with pytest.raises(ValueError, match="which its threshold bounds"):
        optclip.per_example.clipped_grad(jnp.sum, 1.0, response=POWER)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_signed_response_keeps_nan_and_policy(nonfinite):
    cases = [
        (np.nan, 3, np.nan),
        (-np.inf, 3, np.nan),
        (np.inf, 3, 3),
        (-2, np.inf, 0.0 if nonfinite == "zero" else np.nan),
    ]
    for p, x, expected in [*cases, (-2, 0, 0)]:
        clip = functools.partial(
            functional.clip_by, response=POWER, nonfinite=nonfinite
        )
        np.testing.assert_array_equal(jax.jit(clip)(np.float32([x]), p)[0], [expected])


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("rank", [1, 5, 12])
def test_power_of_singular_values_matches_decomposition(size, rank):
    """DynMuon: the exponent falls from 0.25 to -0.25. Spectra span three decades."""
    draw = np.random.default_rng(0).standard_normal
    left, right = (np.linalg.qr(draw((n, 12)))[0] for n in (12, 20))
    values = size * np.geomspace(1, 1e-3, 12) * (np.arange(12) < rank)
    x = np.float32((left * values) @ right.T)
    tx = optclip.clip_by_singular_value(lambda step: 0.25 - 0.25 * step, response=POWER)
    state = tx.init(x)
    for p in (0.25, 0.0, -0.25):
        out, state = tx.update(x, state)
        wanted = (left[:, :rank] * values[:rank] ** p) @ right[:, :rank].T
        atol = 1e-4 * np.linalg.norm(wanted)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=atol)
