"""Matrices and singular values as scopes: which axes, which leaves, what is recorded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from optclip import thresholds
from tests.support import helpers, oracles

RNG = np.random.default_rng(0)
X = (3 * RNG.normal(size=(3, 4, 6))).astype(np.float32)
SCOPES = {
    "spectral norm": functools.partial(F.clip_by_spectral_norm),
    "eigh": functools.partial(F.clip_by_singular_value, method="eigh"),
    "newton_schulz": functools.partial(F.clip_by_singular_value, method="newton_schulz"),
}  # fmt: skip
ORACLES = {
    "spectral norm": oracles.by_matrix,
    "eigh": oracles.by_singular_value,
    "newton_schulz": oracles.by_singular_value,
}
of_each = pytest.mark.parametrize("kind", SCOPES)


@of_each
@pytest.mark.parametrize("axis", [(0, 1), (2, 0), (-1, -2), (-3, 2)])
def test_a_matrix_is_over_the_axes_given(kind, axis):
    found = helpers.quick_jit(lambda x: SCOPES[kind](x, 1.0, matrix_axes=axis))(X)
    last = np.moveaxis(np.float64(X), axis, (-2, -1))
    expected = np.moveaxis(ORACLES[kind](last, 1.0), (-2, -1), axis)
    np.testing.assert_allclose(found, expected, atol=4e-6)


@of_each
def test_a_vector_is_a_matrix_of_one_row(kind):
    """With one singular value, its norm; so is a matrix of one column."""
    v = X[0, 0]
    for given in (v, v[None], v[:, None]):
        found = SCOPES[kind](jnp.asarray(given), 2.0)
        expected = given * (2.0 / np.linalg.norm(np.float64(v)))
        np.testing.assert_allclose(found, expected, rtol=3e-6)


@of_each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vectors_become_what_a_clip_by_norm_makes_of_them(kind, dtype):
    """To the bit, however far apart their elements are, and in no larger a program."""
    far = np.array([1e4, -1e-4, 0.0, 3.0])
    vectors = [jnp.asarray(far * (k + 1) / 64, dtype) for k in range(64)]
    clips = [lambda t: SCOPES[kind](t, 1.5), lambda t: F.clip_by_norm(t, 1.5)]
    found, expected = (helpers.quick_jit(clip)(vectors) for clip in clips)
    helpers.assert_identical(found, expected)
    ours, theirs = (len(str(jax.make_jaxpr(clip)(vectors))) for clip in clips)
    assert ours < 2 * theirs


@of_each
def test_what_is_no_matrix_is_left_alone(kind):
    tree = {
        "scalar": jnp.float32(9.0),
        "number": 9.0,
        "none": None,
        "whole": jnp.arange(12).reshape(3, 4),
        "flags": jnp.ones((3, 4), bool),
        "empty": [jnp.ones(s) for s in ((0,), (0, 3), (3, 0), (0, 0), (2, 0, 3), (0, 3, 4))],
    }  # fmt: skip
    for out in (
        SCOPES[kind](tree, 1.0),
        helpers.quick_jit(lambda t: SCOPES[kind](t, 1.0))(tree),
    ):
        helpers.assert_identical(jax.tree.map(jnp.asarray, out), jax.tree.map(jnp.asarray, tree))  # fmt: skip


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0)])
def test_the_spectral_norm_of_nothing_is_zero(shape):
    norm = F.clip_by(jnp.ones(shape), 1.0, over="leaf", norm="spectral")[1]
    helpers.assert_identical(norm, jnp.zeros(()))


@of_each
@pytest.mark.parametrize(
    ("axis", "error", "words"),
    [
        (1, TypeError, "must be a tuple of two ints, got 1"),
        ([0, 1], TypeError, "must be a tuple of two ints"),
        ((0, 1, 2), ValueError, "must be a tuple of two ints"),
        ((0, 1.0), TypeError, "must be a tuple of two ints"),
        ((0, 3), ValueError, "must name axes that each leaf has"),
        ((1, -2), ValueError, "must name each axis once"),
    ],
)
def test_axes_that_make_no_matrix_are_refused(kind, axis, error, words):
    with pytest.raises(error, match=words):
        SCOPES[kind](jnp.asarray(X), 1.0, matrix_axes=axis)


@of_each
def test_a_sparse_matrix_is_refused(kind):
    with pytest.raises(ValueError, match=r"must be dense.*BCOO.*todense\(\).*mask="):
        SCOPES[kind](BCOO.fromdense(jnp.eye(3)), 1.0)


def test_a_spectral_norm_is_of_one_matrix():
    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="must be of one matrix, got a block of 2"):
        F.clip_by(tree, 1.0, norm="spectral")
    with pytest.raises(ValueError, match="must have two axes, got 3 for a leaf"):
        F.clip_by(jnp.asarray(X), 1.0, over="leaf", norm="spectral")
    with pytest.raises(ValueError, match="`strict` must be False, got True"):
        F.clip_by(tree, 1.0, over="leaf", norm="spectral", strict=True)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"norm": "l1"}, "`norm` must be 'l2'.*leave `norm` out"),
        ({"norm": "spectral"}, "`norm` must be 'l2'"),
        ({"strict": True}, "`strict` must be False"),
        (
            {"response": "proportional"},
            "one that looks at one singular value at a time",
        ),
        (
            {"response": optclip.responses.detached("proportional")},
            "one that looks at one singular value at a time",
        ),
    ],
)
@pytest.mark.parametrize("method", ["eigh", "newton_schulz"])
def test_a_singular_value_has_one_size_and_no_neighbours(method, how, words):
    with pytest.raises(ValueError, match=words):
        optclip.clip_by(1.0, over=optclip.singular_values(method=method), **how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"response": "drop"}, "'hard' or 'smooth' for method='newton_schulz'"),
        ({"response": "softsign"}, "'hard' or 'smooth' for method='newton_schulz'"),
        ({"response": optclip.responses.detached()}, "give method='eigh'"),
        ({"eps": 1e-6}, "`eps` must be 0, got 1e-06.*method='eigh'"),
        ({"eps": jnp.zeros(())}, "`eps` must be 0.*method='eigh'"),
    ],
)
def test_products_know_two_responses(how, words):
    scope = optclip.singular_values(method="newton_schulz")
    with pytest.raises(ValueError, match=words):
        optclip.clip_by(1.0, over=scope, **how)
    optclip.clip_by(1.0, over=optclip.singular_values(), **how)


def test_there_are_two_methods():
    with pytest.raises(ValueError, match="`method` must be .*'eigh'.*'newton_schulz'"):
        optclip.singular_values(method="svd")


def test_what_is_measured_are_the_singular_values():
    """In ascending order; by products a bound, above by a fourth root at most."""
    x = jnp.asarray(X)
    exact = np.linalg.svd(np.float64(X), compute_uv=False)[..., ::-1]
    _, norms = F.clip_by(x, 1.0, over=optclip.singular_values())
    np.testing.assert_allclose(norms, exact, rtol=1e-5)
    _, norms = F.clip_by(1e-25 * x, 1.0, over=optclip.singular_values())
    assert not np.any(norms), "below 2**-60 any norm counts as 0"
    _, norms = F.clip_by(x, 1.0, over=optclip.matrices((0, 2)), norm="spectral")
    by_column = np.linalg.norm(np.float64(X), 2, axis=(0, 2))
    np.testing.assert_allclose(norms, by_column[None, :, None], rtol=1e-6)
    scope = optclip.singular_values(method="newton_schulz")
    _, bound = F.clip_by(x, 1.0, over=scope)
    assert bound.shape == (3, 1)
    assert np.all(bound[:, 0] >= exact[:, -1])
    assert np.all(bound[:, 0] <= exact[:, -1] * 4**0.25 * (1 + 1e-6))


@of_each
def test_it_is_recorded_as_every_clip_is(kind):
    factory = optclip.clip_by_singular_value
    how = {"method": kind}
    if kind == "spectral norm":
        factory, how = optclip.clip_by_spectral_norm, {}
    tx = factory(1.0, record="leaves", name="cap", **how)
    tree = {"w": jnp.asarray(np.diag([0.5, 4.0]).astype(np.float32)), "b": None}
    _, state = tx.update(tree, tx.init(tree))
    found = optclip.metrics(state)
    np.testing.assert_allclose(found["cap/norm/w"], 4.0, rtol=1e-4)
    np.testing.assert_allclose(found["cap/coefficient/w"], 0.25, rtol=1e-4)
    assert found["cap/rate/w"] == 1.0
    assert found["cap/nonfinite/w"] == 0
    fraction = 0.5 if kind == "eigh" else 1.0
    np.testing.assert_allclose(found["cap/fraction/w"], fraction)


@of_each
def test_thresholds_are_trees_and_arrays(kind):
    tree = {"a": jnp.asarray(X), "b": [jnp.asarray(X[0]), jnp.asarray(X[1])]}
    limits = np.float32([[0.5], [1.0], [2.0]])
    per_matrix = limits[..., None] if kind == "spectral norm" else limits
    found = helpers.quick_jit(SCOPES[kind])(tree, {"a": per_matrix, "b": 3.0})
    for i, c in enumerate(limits[:, 0]):
        expected = ORACLES[kind](np.float64(X[i]), c)
        np.testing.assert_allclose(found["a"][i], expected, atol=4e-6)
    expected = ORACLES[kind](np.float64(X[1]), 3.0)
    np.testing.assert_allclose(found["b"][1], expected, atol=4e-6)
    found = SCOPES[kind](tree, {"a": None, "b": [3.0, None]})
    helpers.assert_identical([found["a"], found["b"][1]], [tree["a"], tree["b"][1]])
    assert helpers.differs(found["b"][0], tree["b"][0])
    with pytest.raises(ValueError, match="broadcast"):
        SCOPES[kind](tree, {"a": np.ones((2, 7)), "b": 3.0})


def test_each_singular_value_may_have_a_threshold_of_its_own():
    limits = np.float32([0.5, 1.0, 2.0, 3.0])
    found = helpers.quick_jit(F.clip_by_singular_value)(jnp.asarray(X), limits)
    u, s, vt = np.linalg.svd(np.float64(X), full_matrices=False)
    expected = (u * np.minimum(s, limits[::-1])[..., None, :]) @ vt
    np.testing.assert_allclose(found, expected, atol=4e-6)


RULES = {
    "quantile": lambda: thresholds.quantile(0.5, 3),
    "ema": lambda: thresholds.ema(0.5, warmup=1),
    "zscore": lambda: thresholds.zscore(max_norm=2.0),
    "previous norm": thresholds.previous_norm,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_learns_of_singular_values(rule):
    """As of the norms of vectors that have these for their norms."""
    values = np.float32([0.5, 2.0, 4.0])
    matrix, rows = jnp.diag(values), jnp.diag(values)
    one = optclip.clip_by_singular_value(RULES[rule]())
    other = optclip.clip_by(RULES[rule](), over=optclip.axes(1))

    def run(tx, x):
        def step(state, scale):
            out, state = tx.update(scale * x, state)
            return state, out

        return jax.lax.scan(step, tx.init(x), jnp.float32([1, 3, 0.5, 5]))[1]

    found, expected = run(one, matrix), run(other, rows)
    assert helpers.differs(expected[1:], jnp.diag(values)[None])
    np.testing.assert_allclose(found, expected, atol=1e-5)
