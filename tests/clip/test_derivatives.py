"""First and second derivatives of clipping, in both modes.

The reference is the difference quotient of a NumPy float64 formula; at kinks, zeros and
the ends of the range it is the exact derivative.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from optclip._responses import _responses
from tests.support import covering, differences, helpers, oracles
from tests.support.registry import ENTRIES, Entry, square_root_capper

POLICIES = ("propagate", "zero", "raise")
UNIT = np.array([0.6, -0.8, 0.0])


def clip(x, c, **kwargs):
    return helpers.clipped(optclip.clip_by(c, record=False, **kwargs), x)


# Against differences.


def assert_derivatives(name, derivatives, formula, x, along, smooth=True):
    """Compare each derivative by name, in units of the coordinates."""
    expected = differences.by_differences(formula, x, along, "forward" in derivatives)
    unit = np.where(smooth, differences.sizes(x), 0.0)
    for part, a in derivatives.items():
        by, b = 1.0 if part == "tangent" else unit, expected[part]
        assert np.all(np.isfinite(a)), (name, part)
        differences.assert_close(a * by, b * by, f"{name}: {part}")


def to_tree(x):
    return {"dense": {"bias": x[:3]}, "out": [x[3:].reshape(3, 2)]}


def to_vector(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def small_gradients():
    """Return two leaves, one above every threshold, with a zero in each."""
    rng = np.random.default_rng(1)
    bias, kernel = rng.normal(size=3), 5.0 * rng.normal(size=(3, 2))
    bias[1] = kernel[2, 0] = 0.0
    return np.concatenate([bias, kernel.ravel()])


X = small_gradients()
POINTS = {"outside": X, "inside": 0.01 * X, "zero leaf": X * (np.arange(9) > 2)}


def of_elements(response, curve):
    def oracle(tree, c):
        return jax.tree.map(lambda x: x * np.vectorize(curve)(np.abs(x), c), tree)

    kinds = {"scope": "element", "response": response}
    how = {"response": response}
    name = f"value-{response}"
    return Entry(name, optclip.clip_by_value, ("limit", 0.5), oracle, how, **kinds)


CURVES = {"smooth": oracles.smooth, "normalize": oracles.normalized}
COMPARED = [*ENTRIES, *(of_elements(*curve) for curve in CURVES.items())]
# One entry for each scope, response and order; all with `--full`.
BENT = {(e.scope, e.response, e.kwargs.get("ord")): e for e in COMPARED[::-1]}.values()
# One entry for each response and order. The others have no second derivatives, which
# take four times as long.
CURVED = {(e.response, e.kwargs.get("ord")): e for e in BENT}.values()
# Their derivatives have kinks at coordinates of 0.
KINKED = ("norm-l1", "global-norm-3", "value-normalize")


def first_order(clip, x, along, *numbers):
    """Compute the tangent, the slope and the derivatives by numbers only."""
    y, pull = jax.vjp(clip, x, *numbers)
    linear, quadratic = (jnp.asarray(w, y.dtype) for w in differences.weights(y.size))
    slope, *by_numbers = pull(linear + quadratic * y)
    _, tangent = jax.jvp(lambda x: clip(x, *numbers), (x,), (along,))
    return {"tangent": tangent, "slope": slope}, by_numbers


@pytest.mark.parametrize(
    "entry", COMPARED if covering.full else BENT, ids=lambda e: e.id
)
def test_derivatives_match_differences(entry):
    """By updates and threshold; at zero the updates have the derivative 1.

    There is no vmap, which would turn branches into selects.
    """
    thresholds = [entry.threshold[1]] * entry.scalar_threshold

    def clip(x, *threshold):
        tx = helpers.tx_without_promotion(entry.make(*threshold))
        return to_vector(tx.update(to_tree(x), tx.init(to_tree(x)))[0])

    def formula(x, *threshold):
        leaves = jax.tree.leaves(entry.expected(to_tree(x), *threshold))
        return np.concatenate([leaf.ravel() for leaf in leaves])

    orders = differences.by_jax if covering.full or entry in CURVED else first_order
    by_jax = helpers.quick_jit(functools.partial(orders, clip))
    along = np.random.default_rng(5).uniform(-1, 1, X.shape)
    assert helpers.differs(formula(X), X)
    for name, x in POINTS.items():
        is_kinked = entry.id in KINKED or name == "zero leaf"
        smooth = x != 0 if is_kinked else np.ones(x.shape, bool)
        move = along * differences.sizes(x) * smooth
        with jax.enable_x64(True), jax.debug_nans(True):
            derivatives, by_numbers = jax.device_get(by_jax(x, move, *thresholds))
        assert_derivatives(name, derivatives, formula, x, move, smooth)
        for by_threshold, c in zip(by_numbers, thresholds, strict=True):
            expected = differences.slope_along(
                lambda c, x=x: differences.loss(formula(x, c)), c, c
            )
            differences.assert_close(by_threshold * c, expected, f"{name}: threshold")
    with jax.enable_x64(True), jax.debug_nans(True):
        at_zero, _ = jax.device_get(by_jax(0 * X, along, *thresholds))
    weights = differences.weights(X.size)[0]
    np.testing.assert_array_equal(at_zero["tangent"], entry.slope_at_zero * along)
    np.testing.assert_array_equal(at_zero["slope"], entry.slope_at_zero * weights)
    assert all(np.all(np.isfinite(part)) for part in at_zero.values())


def check(clipped, formula, x):
    """Compare all orders and modes of a function of a vector, in float64."""
    along = np.random.default_rng(5).uniform(-1, 1, x.shape) * differences.sizes(x)
    with jax.enable_x64(True):
        by_jax = helpers.quick_jit(functools.partial(differences.by_jax, clipped))
        derivatives, _ = jax.device_get(by_jax(x, along))
    assert_derivatives("", derivatives, formula, x, along)


def test_masked_derivatives_match_differences():
    """The norm of the first leaf scales the second."""
    masks = {"norm_mask": {"a": True, "b": False}, "clip_mask": {"a": False, "b": True}}

    def clipped(x):
        return to_vector(clip({"a": x[:2], "b": x[2:]}, 1.0, **masks))

    def formula(x):
        k = oracles.hard(oracles.norm(x[:2]), 1.0)
        return x * np.array([1, 1, k, k, k])

    check(clipped, formula, np.array([1.0, -2.0, 0.5, 3.0, 0.0]))


ROWS = np.array([0, 2, 0, 1])


def global_clip(x):
    return F.clip_by_global_norm(x, 1.0)[0]


@pytest.mark.parametrize(
    ("clip_rows", "clip_dense"),
    [
        (global_clip, lambda g: oracles.by_tree(g, 1.0)),
        (
            functools.partial(F.clip_by_norm, max_norm=1.0, axis=1),
            lambda g: oracles.by_first_axis(g.T, 1.0).T,
        ),
        (
            functools.partial(F.clip_by_value, lower=-0.4, upper=0.7),
            lambda g: oracles.by_value(g, -0.4, 0.7),
        ),
    ],
    ids=["global", "rows", "value"],
)
def test_sparse_derivatives_match_dense_differences(clip_rows, clip_dense):
    """Two of the stored entries are duplicates."""

    def clipped(data):
        rows = BCOO((data.reshape(4, 2), jnp.asarray(ROWS)[:, None]), shape=(4, 2))
        return clip_rows(rows).todense().ravel()

    def formula(data):
        dense = np.zeros((4, 2))
        np.add.at(dense, ROWS, data.reshape(4, 2))
        return clip_dense(dense).ravel()

    check(clipped, formula, np.random.default_rng(3).normal(size=8))


def by_modulus(z):
    return z / np.maximum(np.abs(z), 1.0)


@pytest.mark.parametrize(
    ("clip_complex", "expected"),
    [
        (global_clip, lambda z: oracles.by_tree(z, 1.0)),
        (functools.partial(F.clip_by_value, limit=1.0), by_modulus),
        (functools.partial(F.clip_by_value, limit=1.0, strict=True), by_modulus),
    ],
    ids=["global", "value", "strict"],
)
def test_complex_derivatives_match_differences(clip_complex, expected):
    """By the real and the imaginary part, a complex zero among them."""

    def clipped(x):
        out = clip_complex(x[:4] + 1j * x[4:])
        return jnp.concatenate([jnp.real(out), jnp.imag(out)])

    def formula(x):
        out = expected(x[:4] + 1j * x[4:])
        return np.concatenate([out.real, out.imag])

    check(clipped, formula, np.array([3.0, -0.3, 0.0, 1.0, -4.0, 0.2, 0.0, 2.0]))


def test_derivative_by_eps_matches_formula():
    """Clipping multiplies by c / (n + eps)."""
    x = np.float32([3.0, -4.0, 0.0])
    by_eps = helpers.quick_jit(jax.jacobian(lambda eps: clip(x, 2.0, eps=eps)))
    np.testing.assert_allclose(by_eps(3.0), -2 * x / 8.0**2, rtol=1e-6)


# In narrow dtypes and mixed trees.


def weighed(x):
    """A sum in which each element has its own weight."""
    return jnp.sum(jnp.asarray(x, jnp.float32) * jnp.arange(1.0, x.size + 1))


@functools.partial(helpers.quick_jit, static_argnames=("over", "strict"))
def slopes(x, over, strict):
    def number(x, c):
        return weighed(clip(x, c, over=over, strict=strict))

    return jax.grad(number, (0, 1))(x, jnp.float32(1.3))


@pytest.mark.covering(
    over=["tree", "element"],
    dtype=["float32", "bfloat16", "float16"],
    strict=[False, True],
)
def test_derivative_ignores_casts(over, dtype, strict):
    """Rounding, to nearest or towards zero, is not part of the derivative."""
    x = np.linspace(-3, 3, 16).astype(jnp.dtype(dtype))
    by_updates, by_threshold = slopes(x, over, strict)
    wide, wide_by_threshold = slopes(x.astype(np.float32), over, False)
    assert by_updates.dtype == dtype
    tolerance = 4 * float(jnp.finfo(dtype).eps) + (1.3e-4 if strict else 0)
    atol = tolerance * np.max(np.abs(wide))
    np.testing.assert_allclose(np.asarray(by_updates, np.float32), wide, atol=atol)
    np.testing.assert_allclose(by_threshold, wide_by_threshold, rtol=1e-2)


def test_mixed_tree_derivative_matches_float32():
    """With leaves that are not clipped: None, integers and keys."""
    x = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)

    def number(x, kinds):
        leaves = [a.astype(kind) for a, kind in zip(x, kinds, strict=True)]
        rows = BCOO((leaves[2], jnp.asarray(ROWS)[:, None]), shape=(3,))
        tree = [leaves[0], leaves[1], rows, None, jnp.arange(3), jax.random.key(0)]
        out, _ = F.clip_by_global_norm(tree, 1.0)
        return sum(weighed(part) for part in (*out[:2], out[2].todense()))

    slope = helpers.quick_jit(jax.grad(number), static_argnums=1)
    wide = slope(x, ("float32",) * 3)
    mixed = slope(x, ("bfloat16", "float16", "float32"))
    np.testing.assert_allclose(mixed, wide, atol=0.02)
    assert helpers.differs(wide, np.tile(np.arange(1.0, 5.0), (3, 1)))


# At the threshold, at zero and at infinity.


@pytest.mark.parametrize(
    ("response", "coefficient", "change"),
    [
        ("hard", 1.0, 0.0),
        (square_root_capper, 1.0, 0.0),
        ("smooth", 2**-0.5, -(2**-1.5)),
        (_responses.Smooth(1.0), 0.5, -0.25),
        ("normalize", 1.0, -1.0),
    ],
    ids=["hard", "user", "smooth", "smooth-1", "normalize"],
)
def test_derivative_at_threshold_is_from_inside(response, coefficient, change):
    """`change` is the coefficient times its slope by n / c; at a kink from inside."""
    slopes = jax.jacobian(lambda x, c: clip(x, c, response=response), (0, 1))
    by_updates, by_threshold = helpers.quick_jit(slopes)(
        np.float32([3.0, -4.0, 0.0]), np.float32(5.0)
    )
    expected = coefficient * np.eye(3) + change * np.outer(UNIT, UNIT)
    np.testing.assert_allclose(by_updates, expected, atol=1e-6)
    np.testing.assert_allclose(by_threshold, -change * UNIT, atol=1e-6)


@pytest.mark.covering(
    response=["hard", "normalize", _responses.Smooth(0.5)], over=["element", "tree"]
)
def test_derivative_at_threshold_of_zero_is_from_above(response, over):
    slopes = jax.jacobian(lambda x, c: clip(x, c, over=over, response=response), (0, 1))
    by_updates, by_threshold = helpers.quick_jit(slopes)(
        np.float32([3.0, -4.0, 0.0]), 0.0
    )
    np.testing.assert_array_equal(by_updates[:2], np.zeros((2, 3)))
    direction = np.sign(UNIT) if over == "element" else UNIT
    np.testing.assert_allclose(by_threshold, direction, rtol=1e-6)


def test_derivative_at_infinite_threshold_is_identity():
    def clips(x, c):
        return {policy: clip(x, c, nonfinite=policy) for policy in POLICIES}

    slopes = helpers.quick_jit(jax.jacobian(clips))
    for policy, slope in slopes(np.float32([1.0, np.inf, 1e30, 0.0]), np.inf).items():
        np.testing.assert_array_equal(slope, np.eye(4), err_msg=policy)
    # The same program clips at a finite threshold.
    for slope in slopes(np.float32([3.0, 4.0, 0.0, 0.0]), 1.0).values():
        np.testing.assert_allclose(slope[:2, :2] @ np.array([3, 4]), 0, atol=1e-6)


# At the ends of the range.

SCALES = np.float32([1e-5, 1.0, 1e12, 1e25])
# Thresholds as fractions of the norm.
FRACTIONS = np.float32([2.0, 0.5, 1e-6, 1e-12])


@pytest.mark.parametrize(
    ("response", "p"),
    [
        ("hard", 1.0),
        ("hard", 2.0),
        ("hard", 3.0),
        ("hard", np.inf),
        ("smooth", 2.0),
        ("normalize", 2.0),
    ],
)
def test_derivatives_scale_with_updates_and_threshold(response, p):
    """Clipping scales with updates and threshold together, and so do its slopes."""
    n = np.float32(oracles.norm(UNIT, p))

    def derivatives(scale, fraction):
        def clipped(x):
            return clip(x, fraction * (scale * n), response=response, norm=p)

        x = scale * jnp.asarray(UNIT, jnp.float32)
        # Forward over reverse, along the updates: the result has no unit.
        return jax.jvp(jax.jacobian(clipped), (x,), (x,))

    compiled = helpers.quick_jit(jax.vmap(jax.vmap(derivatives, (None, 0)), (0, None)))
    slope, bend = (np.asarray(part, np.float64) for part in compiled(SCALES, FRACTIONS))
    # The test against differences holds scale 1; the other scales must agree with it.
    for part in (slope, bend):
        assert np.all(np.isfinite(part))
        size = np.max(np.abs(part[1]), axis=(-2, -1), keepdims=True)
        assert np.max(np.abs(part - part[1]) / np.maximum(size, 1e-30)) < 1e-5
    k = FRACTIONS if response == "normalize" else np.minimum(FRACTIONS, 1)
    k = FRACTIONS / np.hypot(FRACTIONS, 1) if response == "smooth" else k
    # The slope of the zero element is the coefficient.
    across = slope[..., 2, 2]
    np.testing.assert_allclose(across, np.broadcast_to(k, across.shape), rtol=1e-5)


def test_derivative_far_above_threshold_is_across_updates_only():
    x = np.ldexp(np.float32([1.0, 0.0]), 60)

    def clips(x):
        return [clip(x, 1.0, response=r) for r in ("hard", "smooth", "normalize")]

    times = np.float32([0.99, 1.0, 1.01, 1e6, 1e18])[:, None]
    for slope in helpers.quick_jit(jax.vmap(jax.jacobian(clips)))(times * x):
        scaled = np.asarray(slope, np.float64) * 2.0**60 * times[..., None]
        exact = np.broadcast_to([[0, 0], [0, 1]], scaled.shape)
        np.testing.assert_allclose(scaled, exact, atol=1e-5)


def test_smooth_clip_bends_at_tiny_updates():
    """The second derivative of g / (1 + n) is -2 near zero, where it rounds to g."""

    def smooth(x):
        return clip(x, 1.0, response=_responses.Smooth(1.0))

    bend = helpers.quick_jit(jax.vmap(jax.grad(jax.grad(smooth))))
    x = np.float32([1e-2, 1e-6, 1e-9, 1e-15])
    np.testing.assert_allclose(bend(x), -2 / (1 + x) ** 3, rtol=1e-5)


@pytest.mark.parametrize("response", ["smooth", *["hard", "normalize"] * covering.full])
def test_derivatives_compute_no_nan_on_the_way(response):
    """`checkify` checks each operation, those with unused results too."""

    def number(x, c):
        return weighed(clip(x, c, response=response))

    def derivatives(x):
        slope = jax.grad(number, (0, 1))
        return slope(x, 1.0), jax.jvp(lambda x: slope(x, 1.0), (x,), (x,))

    checked = helpers.quick_jit(
        checkify.checkify(derivatives, errors=checkify.nan_checks)
    )
    for scale in (0.0, 1e-15, 0.1, 10.0, 1e8):
        error, found = checked(np.float32([3.0, 4.0, 0.0]) * np.float32(scale))
        error.throw()
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found))
