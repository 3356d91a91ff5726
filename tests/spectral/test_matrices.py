"""Test matrices and singular values as scopes: axes, leaves, records, thresholds.

Axes may be flattened.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from optclip import responses, thresholds
from tests.support import covering, helpers, oracles
from tests.support.registry import square_root_capper
from tests.support.steps import over_steps

X = np.float32(3 * np.random.default_rng(0).normal(size=(3, 4, 6)))
SCOPES = {
    "spectral norm": F.clip_by_spectral_norm,
    "eigh": functools.partial(F.clip_by_singular_value, method="eigh"),
    "newton_schulz": functools.partial(
        F.clip_by_singular_value, method="newton_schulz"
    ),
}
ORACLES = {
    "spectral norm": oracles.by_matrix,
    "eigh": oracles.by_singular_value,
    "newton_schulz": oracles.by_singular_value,
}
of_each = pytest.mark.parametrize("kind", SCOPES)


@functools.cache
def compiled(kind):
    """Compile clipping with traced thresholds."""
    return helpers.quick_jit(SCOPES[kind], static_argnames="matrix_axes")


@of_each
def test_matrix_of_largest_numbers_is_clipped(kind):
    """Their unit has an inverse that XLA on CPU would flush to zero."""
    found = compiled(kind)(np.float32([[3e38, 0.0], [0.0, 1e37]]), np.float32(1e37))
    expected = [1e37, 1e37 / 30 if kind == "spectral norm" else 1e37]
    np.testing.assert_allclose(np.diag(found), expected, rtol=1e-5)
    assert not np.any(found[::-1].diagonal())


@of_each
def test_vectors_are_bit_identical_to_norm_clipping(kind):
    """So are matrices of one row or column, and elements of very different sizes.

    The program is no larger.
    """
    elements = np.array([1e4, -1e-4, 0.0, 3.0])
    vectors = [
        (elements * k / 16).astype(dtype)
        for i, k in enumerate((1, 5, 16))
        for dtype in covering.rotated(helpers.DTYPES, i)
    ]
    vectors += [vectors[0][None], vectors[0][:, None]]
    clips = [lambda t: SCOPES[kind](t, 1.5), lambda t: F.clip_by_norm(t, 1.5)]
    found, expected = (helpers.quick_jit(clip)(vectors) for clip in clips)
    helpers.assert_identical(found, expected)
    ours, theirs = (len(str(jax.make_jaxpr(clip)(vectors))) for clip in clips)
    assert ours < 2 * theirs


def test_empty_matrices_are_unchanged_and_have_norm_zero():
    tree = [np.ones(shape, np.float32) for shape in ((0,), (0, 3), (3, 0), (0, 0))]
    stacks = [np.ones(shape, np.float32) for shape in ((2, 0, 3), (0, 3, 4))]
    for kind in SCOPES:
        helpers.assert_identical(compiled(kind)(tree + stacks, 1.0), tree + stacks)
    measure = helpers.quick_jit(
        lambda t: F.clip_by(t, 1.0, over="leaf", norm="spectral")[1]
    )
    helpers.assert_identical(measure(tree), [np.zeros((), np.float32)] * 4)


RATIO = "a response that depends on a single singular value"
FOR_BOTH = [
    ({"norm": "l1"}, "`norm` must be 'l2'.*Omit norm="),
    ({"norm": "spectral"}, "`norm` must be 'l2'"),
    ({"strict": True}, "`strict` must be False"),
    ({"response": "proportional"}, RATIO),
    ({"response": optclip.responses.detached("proportional")}, RATIO),
]
FOR_PRODUCTS = [
    ({"response": "drop"}, "'smooth' or 'normalize' for method='newton_schulz'"),
    ({"response": "softsign"}, "'smooth' or 'normalize' for method='newton_schulz'"),
    ({"response": optclip.responses.detached()}, "Pass method='eigh'"),
    ({"eps": 1e-6}, "`eps` must be 0, got 1e-06.*method='eigh'"),
    ({"eps": np.zeros(())}, "`eps` must be 0.*method='eigh'"),
]


def make(tree, threshold, **options):
    """Build a transformation, which checks options without a tree."""
    return optclip.clip_by(threshold, **options)


EYE = BCOO((jnp.ones(3), jnp.array([[0, 0], [1, 1], [2, 2]])), shape=(3, 3))
FOR_LEAVES = [
    (X, {"matrix_axes": (0, 1, 2)}, "must be a tuple of rows and columns"),
    (X, {"matrix_axes": ((0, -3), 1)}, r"each axis once, got \(\(0, -3\), 1\)"),
    (X[0], {"matrix_axes": ((0, 1), ...)}, "must leave an axis for ..."),
    (X, {"matrix_axes": (0, 3)}, "must name axes that each leaf has"),
    (X, {"matrix_axes": (1, -2)}, "must name each axis once"),
    (EYE, {}, r"require a dense leaf.*BCOO.*todense\(\).*mask="),
]
ITERATED = optclip.norms.Spectral(method="power_iteration")
SPECTRAL = functools.partial(F.clip_by, norm="spectral")
EIGH, PRODUCTS = (optclip.singular_values(method=m) for m in ("eigh", "newton_schulz"))
REJECTED = [
    *((SCOPES[kind], *row) for kind in SCOPES for row in FOR_LEAVES),
    (SPECTRAL, [X[0], X[0]], {}, "one matrix per block, got a block of 2"),
    (SPECTRAL, X, {"over": "leaf"}, "must have two axes, got 3 for a leaf"),
    (
        SPECTRAL,
        X[0],
        {"over": "leaf", "strict": True},
        "`strict` must be False for norms that",
    ),
    # A pure function has no vector from a previous step.
    (F.clip_by, X[0], {"over": "leaf", "norm": ITERATED}, "method='exact'"),
    *((make, X, {"over": EIGH, **row}, words) for row, words in FOR_BOTH),
    *(
        (make, X, {"over": PRODUCTS, **row}, words)
        for row, words in FOR_BOTH + FOR_PRODUCTS
    ),
]


@pytest.mark.parametrize(("clip", "tree", "options", "words"), REJECTED)
def test_matrix_clipping_invalid_leaf_or_option_raises(clip, tree, options, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda: clip(tree, 1.0, **options))


@pytest.mark.parametrize("options", [options for options, _ in FOR_PRODUCTS])
def test_singular_values_by_eigh_apply_elementwise_response(options):
    over = optclip.singular_values()
    found, _ = helpers.quick_jit(lambda x: F.clip_by(x, 1.0, over=over, **options))(X)
    u, s, vt = np.linalg.svd(np.float64(X), full_matrices=False)
    left, _ = F.clip_by(np.float32(s), 1.0, over="element", **options)
    assert helpers.differs(left, s)
    np.testing.assert_allclose(found, u * left[..., None, :] @ vt, atol=4e-6)


def test_norms_are_singular_values_in_ascending_order_or_a_bound():
    """The bound of products is at most a fourth root above the largest."""
    by_products = optclip.singular_values(method="newton_schulz")
    matrices = optclip.matrices((0, 2))

    @helpers.quick_jit
    def measure(x):
        return [
            F.clip_by(x, 1.0, over=optclip.singular_values())[1],
            F.clip_by(1e-25 * x, 1.0, over=optclip.singular_values())[1],
            F.clip_by(x, 1.0, over=matrices, norm="spectral")[1],
            F.clip_by(x, 1.0, over=by_products)[1],
        ]

    norms, tiny, by_column, bound = measure(X)
    exact = np.linalg.svd(np.float64(X), compute_uv=False)[..., ::-1]
    np.testing.assert_allclose(norms, exact, rtol=1e-5)
    assert not np.any(tiny), "norms below 2**-60 count as 0"
    wanted = np.linalg.norm(np.float64(X), 2, axis=(0, 2))
    np.testing.assert_allclose(by_column, wanted[None, :, None], rtol=1e-6)
    assert bound.shape == (3, 1)
    assert np.all(bound[:, 0] >= exact[:, -1])
    assert np.all(bound[:, 0] <= exact[:, -1] * 4**0.25 * (1 + 1e-6))


@pytest.mark.parametrize(
    ("factory", "fraction"),
    [
        (optclip.clip_by_spectral_norm, 1),
        (functools.partial(optclip.clip_by_singular_value, method="eigh"), 0.5),
        (functools.partial(optclip.clip_by_singular_value, method="newton_schulz"), 1),
    ],
)
def test_record_has_norm_coefficient_and_fraction(factory, fraction):
    tx = factory(1.0, record="leaves", name="cap")
    tree = {"w": np.diag([0.5, 4.0]).astype(np.float32), "b": None}
    _, state = helpers.quick_jit(tx.update)(tree, tx.init(tree))
    metrics = optclip.metrics(state)
    expected = {"norm": 4, "coefficient": 0.25, "rate": 1, "fraction": fraction}
    for name, value in (expected | {"nonfinite": 0}).items():
        np.testing.assert_allclose(metrics[f"cap/{name}/w"], value, rtol=1e-4)


@of_each
def test_thresholds_are_trees_and_arrays(kind):
    tree = {"a": X, "b": [X[0], X[1]], "own": X}
    limits = np.float32([[0.5], [1.0], [2.0]])
    per_matrix = limits[..., None] if kind == "spectral norm" else limits
    each = np.float32([0.5, 1.0, 2.0, 3.0] if kind == "eigh" else 3.0)
    found = compiled(kind)(tree, {"a": per_matrix, "b": [3.0, None], "own": each})
    for i, c in enumerate(limits[:, 0]):
        expected = ORACLES[kind](np.float64(X[i]), c)
        np.testing.assert_allclose(found["a"][i], expected, atol=4e-6)
    expected = ORACLES[kind](np.float64(X[0]), 3.0)
    np.testing.assert_allclose(found["b"][0], expected, atol=4e-6)
    helpers.assert_identical(found["b"][1], X[1])
    if kind == "eigh":
        u, s, vt = np.linalg.svd(np.float64(X), full_matrices=False)
        expected = (u * np.minimum(s, each[::-1])[..., None, :]) @ vt
        np.testing.assert_allclose(found["own"], expected, atol=4e-6)


def test_rule_learns_singular_values_as_norms_of_rows():
    rows = np.float32([1, 3, 0.5, 5])[:, None, None] * np.diag(np.float32([0.5, 2, 4]))
    rule = thresholds.ema(0.5, warmup=1)
    found, _ = over_steps(optclip.clip_by_singular_value(rule), rows)
    expected, _ = over_steps(optclip.clip_by(rule, over=optclip.axes(1)), rows)
    assert helpers.differs(expected[-1], rows[-1])
    np.testing.assert_allclose(found, expected, atol=1e-5)


# A leaf whose axes are flattened to a matrix is clipped as the reshaped leaf.

KERNEL = np.float32(2 * np.random.default_rng(0).normal(size=(3, 2, 4, 5)))
# The batch, the rows and the columns of the matrices of `KERNEL`.
FLAT = {
    (..., -1): ((), (0, 1, 2), (3,)),
    (0, ...): ((), (0,), (1, 2, 3)),
    ((-2, 0), (1, 3)): ((), (0, 2), (1, 3)),
    (-1, (0, 2)): ((1,), (3,), (0, 2)),
    (-1, 1): ((0, 2), (3,), (1,)),
}


def reshaped(x, axes):
    """Return a leaf with the two axes of its matrices last, by NumPy's functions."""
    batch, *sides = FLAT[axes]
    order = (*batch, *sides[0], *sides[1])
    lengths = [np.prod([x.shape[a] for a in side]) for side in sides]
    last = jnp.transpose(x, order)
    return last.reshape(*last.shape[: len(batch)], *lengths)


def by_values(response, method="eigh", limit=2.0):
    return lambda axes: optclip.clip_by(
        limit, over=optclip.singular_values(axes, method=method), response=response
    )


def by_norm(norm="spectral", limit=2.0, **options):
    return lambda axes: optclip.clip_by(
        limit, over=optclip.matrices(axes), norm=norm, **options
    )


def learned(make):
    return functools.partial(make, limit=thresholds.ema(0.5, warmup=1))


MAKE = {
    "spectral norm": lambda axes: optclip.clip_by_spectral_norm(2.0, matrix_axes=axes),
    "spectral norm, smooth": by_norm(response="smooth", eps=0.5),
    "spectral norm, learned": learned(by_norm)(),
    "spectral norm, of parameters": by_norm(limit=thresholds.relative_to_params(0.5)),
    "power iteration": by_norm(optclip.norms.Spectral("power_iteration", 9)),
    "l2": by_norm("l2", response="proportional"),
    "rms, strict": by_norm("rms", 0.5, strict=True),
    "eigh": lambda axes: optclip.clip_by_singular_value(2.0, matrix_axes=axes),
    "eigh, learned": learned(by_values)("hard"),
    "spectra": lambda axes: optclip.recipes.spectra(
        optax.identity(), 2.0, max_gradient=3.0, matrix_axes=axes
    ),
    "eigh, user": by_values(square_root_capper),
    "eigh, band": by_values(responses.band(0.75)),
    **{f"eigh, {x}": by_values(x) for x in ("smooth", "normalize", "drop", "tanh")},
    **{
        f"products, {x}": by_values(x, "newton_schulz")
        for x in ("hard", "smooth", "normalize")
    },
}


@pytest.mark.parametrize(
    ("make", "axes", "dtype"),
    [
        (make, axes, ("float32", "bfloat16")[i // 4 % 2])
        for i, make in enumerate(MAKE)
        for axes in covering.rotated(list(FLAT), i)
    ],
)
def test_flattened_axes_equal_reshaped_leaf(make, axes, dtype):
    """Over steps, with the same record and memory; vectors and numbers are as usual."""
    kernels = np.stack([KERNEL, 9 * KERNEL[::-1], 0.1 * KERNEL]).astype(dtype)
    others = {"vector": np.ones((3, 7), dtype), "number": np.ones(3, dtype)}
    flat = jax.vmap(lambda x: reshaped(x, axes))(kernels)
    found, expected = (
        over_steps(MAKE[make](of), tree, tree)
        for of, tree in (
            (axes, {"kernel": kernels, **others}),
            ((-2, -1), {"kernel": flat, **others}),
        )
    )
    found[0]["kernel"] = jax.vmap(lambda x: reshaped(x, axes))(found[0]["kernel"])
    assert helpers.differs(found[0]["kernel"], flat)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        atol = 2e-5 if dtype == "float32" else 0.02
        np.testing.assert_allclose(np.ravel(x), np.float64(np.ravel(y)), atol=atol)


@of_each
def test_flattened_axes_have_derivatives_and_batches(kind):
    clip = SCOPES[kind]

    def changes(axes, *shape):
        xs = np.stack([KERNEL, KERNEL[::-1]]).reshape(2, *shape)
        clips = jax.vmap(lambda x: clip(x, 2.0, matrix_axes=axes))
        along = np.roll(xs, 1, -1)
        _, found = helpers.quick_jit(lambda *x: jax.jvp(clips, *x))([xs], [along])
        return found.reshape(2, 24, 5)

    expected = changes((-2, -1), 24, 5)
    np.testing.assert_allclose(changes((..., -1), 3, 2, 4, 5), expected, atol=2e-5)


def test_plain_matrix_is_clipped_by_the_same_program():
    """So one transformation is for a whole model."""
    programs = {
        str(
            jax.make_jaxpr(functools.partial(MAKE["eigh"](axes).update, state=None))(
                KERNEL[0, 0]
            )
        )
        for axes in ((-2, -1), (..., -1), (0, ...), ((0,), 1))
    }
    assert len(programs) == 1
