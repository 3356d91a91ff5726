"""Derivatives at the threshold, at zeros, and at the ends of the range."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from optclip import responses
from tests.support import helpers, oracles
from tests.support.registry import square_root_capper

POLICIES = ("propagate", "zero", "drop", "raise")

UNIT = np.array([0.6, -0.8, 0.0])


def clip(x, c, **kwargs):
    tx = optclip.clip_by(c, record=False, **kwargs)
    return tx.update(x, tx.init(x))[0]


def weighed(x):
    """A number that depends on each element by a weight of its own."""
    return jnp.sum(jnp.asarray(x, jnp.float32) * jnp.arange(1.0, x.size + 1))


# A response; its coefficient at n = c; that times how it changes with n / c.
AT_THE_THRESHOLD = {
    "hard": ("hard", 1.0, 0.0),
    "user": (square_root_capper, 1.0, 0.0),
    "smooth": ("smooth", 2**-0.5, -(2**-1.5)),
    "smooth-1": (responses.Smooth(1.0), 0.5, -0.25),
    "normalize": ("normalize", 1.0, -1.0),
}


@pytest.mark.parametrize("name", AT_THE_THRESHOLD)
def test_the_derivative_at_the_threshold_is_that_of_the_inside(name):
    """That of the inside for a clip with a kink; elsewhere there is only one."""
    response, k, change = AT_THE_THRESHOLD[name]
    x = jnp.array([3.0, -4.0, 0.0])
    by_updates, by_threshold = jax.jit(
        jax.jacobian(lambda x, c: clip(x, c, response=response), (0, 1))
    )(x, jnp.float32(5.0))
    expected = k * np.eye(3) + change * np.outer(UNIT, UNIT)
    np.testing.assert_allclose(by_updates, expected, atol=1e-6)
    np.testing.assert_allclose(by_threshold, -change * UNIT, atol=1e-6)


@pytest.mark.parametrize("layer", ["pure", "optax"])
def test_elements_at_the_bound_have_the_derivative_of_the_inside(layer):
    def bounded(x, c):
        if layer == "pure":
            return F.clip_by_value(x, lower=-c, upper=c)
        return clip(x, c, over="element")

    x = jnp.array([0.5, 1.0, -1.0, 2.0, -2.0])
    by_updates, by_bound = jax.jit(jax.jacobian(bounded, (0, 1)))(x, 1.0)
    np.testing.assert_array_equal(by_updates, np.diag([1, 1, 1, 0, 0]))
    np.testing.assert_array_equal(by_bound, [0, 0, 0, 1, -1])


@pytest.mark.parametrize(
    ("response", "over"),
    [
        ("hard", "element"),
        ("smooth", "element"),
        ("normalize", "element"),
        ("normalize", "tree"),
        (responses.Smooth(0.5), "tree"),
        ("hard", "tree"),
    ],
)
def test_a_threshold_of_zero_has_the_derivative_from_above(response, over):
    """All is zero whatever the updates; the threshold's own is that from above."""
    x = jnp.array([3.0, -4.0, 0.0])
    slopes = jax.jacobian(lambda x, c: clip(x, c, over=over, response=response), (0, 1))
    by_updates, by_threshold = helpers.quick_jit(slopes)(x, 0.0)
    np.testing.assert_array_equal(by_updates[:2], np.zeros((2, 3)))
    direction = np.sign(x) if over == "element" else UNIT
    np.testing.assert_allclose(by_threshold, direction, rtol=1e-6)


def test_an_infinite_threshold_has_the_derivative_of_nothing_done():
    x = jnp.array([1.0, jnp.inf, 1e30, 0.0])

    def clips(x, c):
        return {policy: clip(x, c, nonfinite=policy) for policy in POLICIES}

    slopes = jax.jit(jax.jacobian(clips))
    for policy, slope in slopes(x, jnp.inf).items():
        np.testing.assert_array_equal(slope, np.eye(4), err_msg=policy)
    # Below the largest float the same program does clip.
    for slope in slopes(jnp.array([3.0, 4.0, 0.0, 0.0]), 1.0).values():
        np.testing.assert_allclose(slope[:2, :2] @ np.array([3, 4]), 0, atol=1e-6)


# From 1e-5 to 1e25 in float32; the threshold as a share of the norm.
SCALES = np.array([1e-5, 1.0, 1e12, 1e25], np.float32)
SHARES = np.array([2.0, 0.5, 1e-6, 1e-12], np.float32)


class Order(NamedTuple):
    """The order of a norm, of which a response sees but a number."""

    p: float
    traits: tuple[str, ...] = ("norm",)

    @property
    def name(self) -> str:
        return f"{self.p:g}"


ORDERS = [Order(1.0), Order(2.0), Order(3.0), Order(np.inf)]


@pytest.mark.covering(response=["hard", "smooth", "normalize"], order=ORDERS)
def test_derivatives_scale_with_updates_and_threshold(response, order):
    """A clip scales with updates and threshold together, and so its slopes do."""
    p = order.p

    def derivatives(scale, share):
        def clipped(x):
            n = scale * jnp.float32(oracles.norm(UNIT, p))
            return clip(x, share * n, response=response, norm=p)

        x = scale * jnp.asarray(UNIT, jnp.float32)
        # Forwards over reverse, along the updates themselves: no unit is left.
        return jax.jvp(jax.jacobian(clipped), (x,), (x,))

    found = jax.jit(jax.vmap(jax.vmap(derivatives, (None, 0)), (0, None)))
    slope, bend = (np.asarray(part, np.float64) for part in found(SCALES, SHARES))
    assert np.all(np.isfinite(slope))
    assert np.all(np.isfinite(bend))
    # Exact at scale 1 by tests/clip/test_derivatives.py; the others must agree with it.
    for part in (slope, bend):
        size = np.max(np.abs(part[1]), axis=(-2, -1), keepdims=True)
        off = np.abs(part - part[1]) / np.maximum(size, 1e-30)
        assert np.max(off) < 1e-5
    k = SHARES if response == "normalize" else np.minimum(SHARES, 1)
    k = SHARES / np.hypot(SHARES, 1) if response == "smooth" else k
    across = slope[..., 2, 2]  # of the zero element: the coefficient itself
    np.testing.assert_allclose(across, np.broadcast_to(k, across.shape), rtol=1e-5)


def test_far_above_the_threshold_only_the_direction_counts():
    """None along the updates, the coefficient across."""
    x = jnp.asarray(np.ldexp(np.array([1.0, 0.0], np.float32), 60))

    def clips(x):
        return [clip(x, 1.0, response=r) for r in ("hard", "smooth", "normalize")]

    times = np.array([0.99, 1.0, 1.01, 1e6, 1e18], np.float32)
    slopes = jax.jit(jax.vmap(jax.jacobian(clips)))(times[:, None] * x)
    for slope in slopes:
        found = np.asarray(slope, np.float64) * 2.0**60 * times[:, None, None]
        exact = np.broadcast_to([[0, 0], [0, 1]], found.shape)
        np.testing.assert_allclose(found, exact, atol=1e-5)


def test_a_smooth_clip_bends_however_small_the_updates():
    """That of g / (1 + n) is -2 beside zero, where it rounds to g."""
    bend = jax.jit(
        jax.grad(jax.grad(lambda x: clip(x, 1.0, response=responses.Smooth(1.0))))
    )
    for x in (1e-2, 1e-6, 1e-9, 1e-15):
        np.testing.assert_allclose(bend(x), -2 / (1 + x) ** 3, rtol=1e-5)


@pytest.mark.parametrize(
    "response", ["hard", "smooth", "normalize", square_root_capper]
)
def test_no_step_on_the_way_is_nan(response):
    """No NaN even in what is computed and not used, at any magnitude."""

    def number(x, c):
        return weighed(clip(x, c, response=response))

    def all_of_them(x):
        slope = jax.grad(number, (0, 1))
        return slope(x, 1.0), jax.jvp(lambda x: slope(x, 1.0), (x,), (x,))

    with jax.debug_nans(True):
        for scale in (0.0, 1e-15, 0.1, 10.0, 1e8):
            found = all_of_them(jnp.array([3.0, 4.0, 0.0]) * scale)
            assert all(np.all(np.isfinite(f)) for f in jax.tree.leaves(found))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strict_has_the_derivative_of_the_clip(dtype):
    """Rounding towards zero is not seen in it."""
    x = jnp.array([3.0, -4.0, 0.0], dtype)

    def slopes(strict):
        return jax.jacobian(lambda x, c: clip(x, c, strict=strict), (0, 1))(x, 2.0)

    for found, wanted in zip(slopes(True), slopes(False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-4)
        assert np.any(np.abs(wanted) > 0.1)


@pytest.mark.parametrize(
    "clip",
    [F.clip_by_norm, lambda x, c: F.clip_by_global_norm(x, c)[0]],
    ids=["leaf", "tree"],
)
def test_the_derivative_is_that_of_the_formula_at_every_size(clip):
    """Of x c / n the slope is (w - u (u.w)) c / n with u = x / n."""
    x = np.array([4.0, -3.0, 1.0])
    w = np.array([1.0, -2.0, 0.5])
    n = oracles.norm(x)
    expected = (w - x * (x @ w) / n**2) * 0.5 / n
    weights = jnp.asarray(w, jnp.float32)
    slope = jax.jit(jax.grad(lambda x, c: jnp.sum(clip(x, c) * weights)))
    for size in (1e-15, 1e-4, 1.0, 1e4, 1e18, 1e30):
        found = slope(jnp.asarray(x * size, jnp.float32), 0.5 * size)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)
