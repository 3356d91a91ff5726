"""First and second derivatives of clipping, in both modes.

The reference is the difference quotient of a NumPy float64 formula; at kinks, zeros and
the ends of the range it is the exact derivative.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from optclip import responses
from optclip.norms import Norm
from tests.support import covering, differences, helpers, oracles
from tests.support.registry import ENTRIES, square_root_capper

POLICIES = ("propagate", "zero", "raise")
UNIT = np.array([0.6, -0.8, 0.0])


def clip(x, c, **kwargs):
    tx = optclip.clip_by(c, record=False, **kwargs)
    return tx.update(x, tx.init(x))[0]


# Against differences.

KERNEL, BIAS = [0, 1, 2, 3, 4, 5], [6, 7]
# The scope, and the elements of each norm.
SCOPES = {
    "tree": ("tree", [KERNEL + BIAS]),
    "axes": (optclip.axes(0), [[0, 2, 4], [1, 3, 5], BIAS]),
    "groups": (optclip.groups({"bias": "b", "kernel": "k"}), [KERNEL, BIAS]),
    "element": ("element", [[i] for i in range(8)]),
}
RESPONSES = {
    "hard": oracles.hard,
    "smooth": oracles.smooth,
    "normalize": oracles.normalized,
}


class Case:
    """One clipping of a vector of eight: by optclip, and by its formula."""

    def __init__(self, scope, response, order):
        self.scope, self.blocks = SCOPES[scope]
        self.response, self.order = response, order
        # These move an element to the bound itself.
        self.ignores_eps = scope == "element" and response != "smooth"

    def clip(self, x, c, eps=0.0):
        tree = {"kernel": x[jnp.array(KERNEL)].reshape(3, 2), "bias": x[6:]}
        norm = Norm(self.order)
        how = {"over": self.scope, "response": self.response, "norm": norm}
        out = clip(tree, c, eps=eps, **how)
        return jnp.concatenate([out["kernel"].ravel(), out["bias"]])

    def formula(self, x, c=1.0, eps=0.0):
        out = x.copy()
        for block in self.blocks:
            n = oracles.norm(x[block], self.order)
            more = 0.0 if self.ignores_eps else eps
            out[block] *= RESPONSES[self.response](n + more, c) if n else 1.0
        return out

    def scaled(self, x, norms):
        """`x` with these norms, block by block, in turns."""
        out = x.copy()
        for i, block in enumerate(self.blocks):
            n = oracles.norm(x[block], self.order)
            out[block] *= norms[i % len(norms)] / n if n else 0.0
        return out

    def points(self):
        """By name: elements apart from each other and from the threshold of 1."""
        rng = np.random.default_rng(11)
        x = rng.permutation(np.linspace(0.5, 1.2, 8)) * rng.choice([-1, 1], 8)
        gaps = x * (np.arange(8) % 3 != 1)
        return {
            "inside": self.scaled(x, [0.5]),
            "outside": self.scaled(x, [3.0]),
            "both": self.scaled(x, [0.5, 3.0]),
            "far": self.scaled(x, [1e6]),
            "zero leaf": self.scaled(x * (np.arange(8) < 6), [3.0, 0.5]),
            "zeros in a leaf": self.scaled(gaps, [3.0, 0.5]),
        }

    def smooth(self, x):
        """Coordinates without a kink, for which differences have one limit."""
        smooth = (self.order != 1) | (x != 0)
        for block in self.blocks:
            smooth[block] &= self.response == "hard" or bool(np.any(x[block]))
        return smooth


def assert_derivatives(name, derivatives, formula, x, along, smooth=True):
    """Compare each derivative by name, in units of the coordinates."""
    expected = differences.by_differences(formula, x, along)
    unit = np.where(smooth, differences.sizes(x), 0.0)
    for part, a in derivatives.items():
        by, b = 1.0 if part == "tangent" else unit, getattr(expected, part)
        assert np.all(np.isfinite(a)), (name, part)
        differences.assert_close(a * by, b * by, f"{name}: {part}")


ELEMENTS = [("element", response, 2.0) for response in RESPONSES]
# Each value once with the tree, and hard clipping once with each other scope.
FEW = [
    ("tree", "hard", 1.0),
    ("tree", "smooth", 4.0),
    ("tree", "normalize", 2.0),
    ("axes", "hard", 4.0),
    ("groups", "hard", 2.0),
]
ALL = itertools.product(("tree", "axes", "groups"), RESPONSES, (1.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("scope", "response", "order"), [*(ALL if covering.full else FEW), *ELEMENTS]
)
def test_derivatives_match_differences(scope, response, order):
    """By updates, threshold and eps, under vmap over the points."""
    case = Case(scope, response, order)
    points = case.points()
    xs = np.stack(list(points.values()))
    smooth = np.stack([case.smooth(x) for x in xs])
    turns = np.random.default_rng(5).uniform(-1, 1, xs.shape)
    along = np.where(smooth, turns * np.stack([differences.sizes(x) for x in xs]), 0.0)

    def by_jax(x, along):
        return differences.by_jax(case.clip, x, along, 1.0, 0.0)

    with jax.enable_x64(True):
        found = jax.device_get(helpers.quick_jit(jax.vmap(by_jax))(xs, along))
    for i, (name, x) in enumerate(points.items()):
        derivatives = jax.tree.map(lambda part, i=i: part[i], found)
        of_updates = {k: getattr(derivatives, k) for k in differences.OF_UPDATES}
        assert_derivatives(name, of_updates, case.formula, x, along[i], smooth[i])
        by_threshold = differences.slope_along(
            lambda c, x=x: differences.loss(case.formula(x, c)), 1.0, 1.0
        )
        norms = [oracles.norm(x[block], order) for block in case.blocks]
        unit = min(n for n in norms if n)
        by_eps = differences.slope_along(
            lambda eps, x=x: differences.loss(case.formula(x, 1.0, eps)), 0.0, unit
        )
        numbers = derivatives.by_numbers
        differences.assert_close(numbers[0], by_threshold, f"{name}: by threshold")
        differences.assert_close(numbers[1] * unit, by_eps, f"{name}: by eps")


def small_gradients():
    """Two leaves, one past every threshold, with a zero in each."""
    rng = np.random.default_rng(1)
    bias, kernel = rng.normal(size=3), 5.0 * rng.normal(size=(3, 2))
    bias[1] = kernel[2, 0] = 0.0
    return np.concatenate([bias, kernel.ravel()])


def to_tree(x):
    return {"dense": {"bias": x[:3]}, "out": [x[3:].reshape(3, 2)]}


def to_vector(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def clip_of(entry):
    """Return the transformation as a function from a vector to a vector."""

    def clip(x):
        tx = helpers.strict(entry.make())
        out, _ = tx.update(to_tree(x), tx.init(to_tree(x)))
        return to_vector(out)

    return clip


# One entry for each scope and response that the test against differences lacks, and one
# with a branch, which vmap would turn into a select: second derivatives take four times
# as long.
COMPARED = {(scope, response) for scope, response, _ in FEW + ELEMENTS}
BENT = list(
    {
        (e.scope, e.response): e
        for e in ENTRIES[::-1]
        if e.id == "global-norm" or (e.scope, e.response) not in COMPARED
    }.values()
)


def second_order(clip, x, along):
    found = differences.by_jax(clip, x, along)
    return {part: getattr(found, part) for part in differences.OF_UPDATES}


def first_order(clip, x, along):
    """`differences.by_jax` without the second order."""
    y, push = jax.linearize(clip, x)
    linear, quadratic = (jnp.asarray(w, y.dtype) for w in differences.weights(y.size))
    (slope,) = jax.linear_transpose(push, x)(linear + quadratic * y)
    return {"tangent": push(along), "slope": slope}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_registered_derivatives_match_differences(entry):
    """Without vmap, so that branches stay branches; at zero it is the identity."""
    bent = covering.full or entry in BENT
    x = small_gradients()
    smooth = x != 0
    along = np.random.default_rng(5).uniform(-1, 1, x.shape)
    along *= differences.sizes(x) * smooth

    def formula(x):
        leaves = jax.tree.leaves(entry.expected(to_tree(x)))
        return np.concatenate([leaf.ravel() for leaf in leaves])

    with jax.enable_x64(True), jax.debug_nans(True):
        orders = second_order if bent else first_order
        by_jax = helpers.quick_jit(functools.partial(orders, clip_of(entry)))
        derivatives = jax.device_get(by_jax(x, along))
        at_zero = jax.device_get(by_jax(0 * x, along))
    assert helpers.differs(formula(x), x)
    assert_derivatives(entry.id, derivatives, formula, x, along, smooth)
    weights = differences.weights(x.size)[0]
    np.testing.assert_array_equal(at_zero["tangent"], entry.slope_at_zero * along)
    np.testing.assert_array_equal(at_zero["slope"], entry.slope_at_zero * weights)
    assert all(np.all(np.isfinite(part)) for part in at_zero.values())


# One with the branch to a second pass, one with slices.
REMATERIALIZED = [e for e in ENTRIES if e.id in ("global-norm", "norm-axis")]


@pytest.mark.parametrize("entry", REMATERIALIZED, ids=lambda e: e.id)
def test_checkpoint_keeps_derivatives(entry):
    x = small_gradients()
    clip, weights = clip_of(entry), differences.weights(x.size)[0]

    def slopes(x):
        return [jax.vjp(f, x)[1](weights)[0] for f in (clip, jax.checkpoint(clip))]

    with jax.enable_x64(True):
        plain, remat = helpers.quick_jit(slopes)(x)
    assert helpers.differs(plain, weights)
    chex.assert_trees_all_close(remat, plain, rtol=1e-12, atol=1e-15)


def check(clipped, formula, x):
    """Compare all orders and modes of a function of a vector, in float64."""
    along = np.random.default_rng(5).uniform(-1, 1, x.shape) * differences.sizes(x)
    with jax.enable_x64(True):
        by_jax = helpers.quick_jit(functools.partial(second_order, clipped))
        derivatives = jax.device_get(by_jax(x, along))
    assert_derivatives("", derivatives, formula, x, along)


ONE, OTHER = {"a": True, "b": False}, {"a": False, "b": True}


@pytest.mark.parametrize(("norm_mask", "clip_mask"), [(ONE, None), (None, OTHER)])
def test_masked_derivatives_match_differences(norm_mask, clip_mask):
    def clipped(x):
        tree = {"a": x[:2], "b": x[2:]}
        masks = {"norm_mask": norm_mask, "clip_mask": clip_mask}
        tx = optclip.clip_by(1.0, **masks)
        return to_vector(tx.update(tree, tx.init(tree))[0])

    def formula(x):
        k = oracles.hard(oracles.norm(x[:2] if norm_mask else x), 1.0)
        return x * np.array([1 if clip_mask else k] * 2 + [k] * 3)

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


def test_mixed_tree_derivative_matches_float32_under_every_policy():
    """With leaves that are not clipped: None, integers and keys."""
    x = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)

    def number(x, mixed, policy="propagate"):
        kinds = (jnp.bfloat16, jnp.float16, jnp.float32)
        leaves = [a.astype(k) if mixed else a for a, k in zip(x, kinds, strict=True)]
        rows = BCOO((leaves[2], jnp.asarray(ROWS)[:, None]), shape=(3,))
        tree = [leaves[0], leaves[1], rows, None, jnp.arange(3), jax.random.key(0)]
        out, _ = F.clip_by_global_norm(tree, 1.0, nonfinite=policy)
        parts = [*out[:2], out[2].todense()]
        return sum(weighed(part) for part in parts)

    def slopes(x):
        by_policy = [jax.grad(number)(x, True, policy) for policy in POLICIES]
        return by_policy, jax.grad(number)(x, False)

    by_policy, wide = helpers.quick_jit(slopes)(x)
    for slope in by_policy:
        np.testing.assert_allclose(slope, wide, atol=0.02)
    assert helpers.differs(wide, np.tile(np.arange(1.0, 5.0), (3, 1)))


# At the threshold, at zero and at infinity.


@pytest.mark.parametrize(
    ("response", "coefficient", "change"),
    [
        ("hard", 1.0, 0.0),
        (square_root_capper, 1.0, 0.0),
        ("smooth", 2**-0.5, -(2**-1.5)),
        (responses.Smooth(1.0), 0.5, -0.25),
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
    response=["hard", "normalize", responses.Smooth(0.5)], over=["element", "tree"]
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


def test_derivative_of_hard_clip_matches_formula_at_every_size():
    """Of x c / n the slope is (w - u (u.w)) c / n with u = x / n."""
    x, w = np.array([4.0, -3.0, 1.0]), np.float32([1.0, -2.0, 0.5])
    n = oracles.norm(x)
    expected = (w - x * (x @ w) / n**2) * 0.5 / n
    loss = jax.grad(lambda x, c: jnp.sum(F.clip_by_norm(x, c) * w))
    slope = helpers.quick_jit(loss)
    for size in (1e-15, 1e-4, 1.0, 1e4, 1e18, 1e30):
        found = slope(np.float32(x * size), 0.5 * size)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


def test_smooth_clip_bends_at_tiny_updates():
    """The second derivative of g / (1 + n) is -2 near zero, where it rounds to g."""

    def smooth(x):
        return clip(x, 1.0, response=responses.Smooth(1.0))

    bend = helpers.quick_jit(jax.vmap(jax.grad(jax.grad(smooth))))
    x = np.float32([1e-2, 1e-6, 1e-9, 1e-15])
    np.testing.assert_allclose(bend(x), -2 / (1 + x) ** 3, rtol=1e-5)


@pytest.mark.parametrize(
    "response", ["hard", "smooth", "normalize", square_root_capper]
)
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
