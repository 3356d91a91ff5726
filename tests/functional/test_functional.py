"""The pure layer: signatures, results beside the transformations, norms in hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from tests.support import helpers, oracles
from tests.support.covering import RUNS
from tests.support.registry import numpy_tree

SIGNATURES = {
    "global_norm": "(tree, *, ord, axis_name, norm_mask)",
    "clip_by_value": "(tree, lower, upper, *, nonfinite, strict, clip_mask)",
    "clip_by_norm": "(tree, max_norm, *, axis, ord, eps, strict, nonfinite, clip_mask,"
    " axis_name)",
    "clip_by_average_norm": "(tree, max_norm, *, eps, strict, nonfinite, clip_mask,"
    " axis_name)",
    "clip_by_rms": "(tree, max_rms, *, axis, eps, strict, nonfinite, clip_mask,"
    " axis_name)",
    "clip_by_group_norm": "(tree, max_norm, groups, *, ord, eps, strict, nonfinite,"
    " norm_mask, clip_mask, axis_name)",
    "clip_by_global_norm": "(tree, max_norm, *, norm, ord, eps, strict, nonfinite,"
    " norm_mask, clip_mask, axis_name)",
}


def test_names_and_arguments_are_fixed():
    public = {n for n, f in vars(F).items() if inspect.isfunction(f) and n[0] != "_"}
    assert public == set(SIGNATURES)
    for name, expected in SIGNATURES.items():
        parts = []
        for p in inspect.signature(getattr(F, name)).parameters.values():
            if p.kind is p.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            parts.append(p.name)
        assert f"({', '.join(parts)})" == expected


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_each_function_against_its_formula(kind):
    """One program of all; op by op they are run by the docstrings."""
    tree = helpers.typed(kind)
    numpy = numpy_tree(tree)
    labels = {"dense": "a", "out": "b"}
    cases = [
        (
            lambda t: F.clip_by_value(t, lower=-0.5, upper=0.25),
            oracles.by_value(numpy, -0.5, 0.25),
        ),
        (lambda t: F.clip_by_norm(t, 2.0), oracles.by_leaf(numpy, 2.0)),
        (lambda t: F.clip_by_norm(t, 2.0, axis=0), oracles.by_first_axis(numpy, 2.0)),
        (
            lambda t: F.clip_by_average_norm(t, 0.5),
            oracles.by_leaf(numpy, 0.5, oracles.average_norm),
        ),
        (lambda t: F.clip_by_rms(t, 1.5), oracles.by_leaf(numpy, 1.5, oracles.rms)),
        (
            lambda t: F.clip_by_group_norm(t, {"a": 1.0, "b": 2.0}, labels)[0],
            oracles.by_top_key(numpy, {"dense": 1.0, "out": 2.0}),
        ),
        (lambda t: F.clip_by_global_norm(t, 2.0)[0], oracles.by_tree(numpy, 2.0)),
        (
            lambda t: F.clip_by_global_norm(t, 2.0, ord=1.0)[0],
            oracles.by_tree(numpy, 2.0, 1.0),
        ),
    ]
    everything = helpers.strictly(lambda t: [function(t) for function, _ in cases])
    for found, (_, expected) in zip(jax.jit(everything)(tree), cases, strict=True):
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        helpers.assert_close(found, expected, ulps=4)


@pytest.mark.covering(p=(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, np.inf, None), run=RUNS)
def test_global_norm(p, run):
    tree = helpers.gradients()
    found = run(helpers.strictly(lambda t: F.global_norm(t, ord=p)))(tree)
    assert found.dtype == jnp.float32
    expected = oracles.tree_norm(numpy_tree(tree), 2.0 if p is None else p)
    np.testing.assert_allclose(found, expected, rtol=1e-5 if p in (0.5, 1.5) else 1e-6)


def test_a_given_norm_is_not_computed_again():
    tree = helpers.gradients()
    for norm in (7.0, jnp.float32(7.0), np.float64(7.0), 7, jnp.bfloat16(7)):
        found, returned = F.clip_by_global_norm(tree, 2.0, use_norm=norm)
        helpers.assert_close(found, jax.tree.map(lambda x: x * (2 / 7), tree), 2)
        assert returned == 7.0
    unclipped, _ = F.clip_by_global_norm(tree, 2.0, use_norm=1.5)
    helpers.assert_identical(unclipped, tree)
    reduces = str(
        jax.make_jaxpr(lambda t: F.clip_by_global_norm(t, 2.0, use_norm=7.0)[0])(tree)
    )
    assert "reduce_sum" not in reduces


def test_torch_formula():
    """eps=1e-6 is added to the norm, so the norm left is a little below the limit."""
    x = jnp.array([3e-6, 4e-6])
    found, _ = F.clip_by_global_norm(x, 1e-6, eps=1e-6)
    np.testing.assert_allclose(found, np.array([3e-6, 4e-6]) / 6, rtol=1e-6)


def test_bounds_that_broadcast_or_are_trees_or_none():
    x = jnp.arange(6.0).reshape(2, 3) + 1
    found = helpers.strictly(F.clip_by_value)(x, jnp.array([2.0, 2, 2]), x - 0.5)
    np.testing.assert_array_equal(found, np.maximum(np.minimum(x, x - 0.5), 2))
    tree = {"a": x, "b": {"c": x, "d": x}}
    found = F.clip_by_value(
        tree, lower={"a": 2.0, "b": None}, upper={"a": None, "b": 3.0}
    )
    np.testing.assert_array_equal(found["a"], np.maximum(x, 2))
    np.testing.assert_array_equal(found["b"]["d"], np.minimum(x, 3))


def test_crossing_bounds():
    """Arrays that cross give the lower one, as in TensorFlow; numbers are a mistake."""
    x = jnp.array([0.0, 2.0, 9.0])
    found = F.clip_by_value(x, lower=jnp.array([3.0]), upper=jnp.array([1.0]))
    np.testing.assert_array_equal(found, [3.0, 3.0, 3.0])
    with pytest.raises(ValueError, match=r"got lower=3\.0 and upper=1\.0"):
        F.clip_by_value(x, lower=3.0, upper=1.0)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (2.0, 1),
        (np.float32(2), np.float64(1)),
        (jnp.float32(2), 1.0),
        ({"a": 0.0, "b": 2.0}, 1.0),
        (0.0, {"a": 1.0, "b": -1.0}),
        ({"a": 0.0, "b": 2.0}, {"a": None, "b": 1.0}),
    ],
)
def test_bounds_in_the_wrong_order(lower, upper):
    tree = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"`lower` must be at most `upper`.*Swap"):
        F.clip_by_value(tree, lower=lower, upper=upper)


def test_value_clip_gradient_is_that_of_tensorflow():
    """To x inside and on the bounds, to the bound outside; to lower where they cross."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0])

    def total(x, lower, upper):
        return jnp.sum(
            F.clip_by_value(x, lower=lower, upper=upper) * jnp.array([1.0, 2, 4, 8])
        )

    lower, upper = jnp.full(4, 2.0), jnp.full(4, 3.0)
    slopes = jax.grad(total, (0, 1, 2))(x, lower, upper)
    np.testing.assert_array_equal(slopes[0], [0, 2, 4, 0])
    np.testing.assert_array_equal(slopes[1], [1, 0, 0, 0])
    np.testing.assert_array_equal(slopes[2], [0, 0, 0, 8])


@pytest.mark.parametrize(
    "clip",
    [F.clip_by_norm, lambda x, c: F.clip_by_global_norm(x, c)[0]],
    ids=["leaf", "tree"],
)
def test_derivatives_at_every_magnitude(clip):
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


def test_complex_values_are_clipped_by_modulus(run):
    x = jnp.array([3 + 4j, 0.3 + 0.4j, 0j, 3e38 + 3e38j])
    found = run(lambda x: F.clip_by_value(x, lower=-1.0, upper=1.0))(x)
    diagonal = np.sqrt(0.5)
    expected = [0.6 + 0.8j, 0.3 + 0.4j, 0, diagonal + diagonal * 1j]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_mismatches_are_refused_with_a_remedy():
    x = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="`lower` of shape.*'w'.*Give a number"):
        F.clip_by_value(x, lower=jnp.ones((2, 3, 1)), upper=5.0)
    with pytest.raises(ValueError, match="`upper` of shape.*'w'.*Give a number"):
        F.clip_by_value(x, lower=0.0, upper=jnp.ones(2))
    with pytest.raises(ValueError, match="`max_norm` of shape.*Give a number"):
        F.clip_by_norm(x, jnp.ones((3,)))
    with pytest.raises(
        ValueError, match="`max_norm` must be a prefix of the structure"
    ):
        F.clip_by_norm(x, {"v": 1.0})
    with pytest.raises(
        ValueError, match="`max_norm` must be a prefix of the structure"
    ):
        F.clip_by_global_norm(x, {"w": 1.0})
    with pytest.raises(
        ValueError, match="`max_norm` must be a prefix of the structure"
    ):
        F.clip_by_group_norm(x, {"other": 1.0}, {"w": "a"})
    with pytest.raises(ValueError, match="`groups` must be a prefix of the structure"):
        F.clip_by_group_norm(x, 1.0, {"v": "a"})
    with pytest.raises(TypeError, match="A label in `groups` must be a string.*got 3"):
        F.clip_by_group_norm(x, 1.0, {"w": 3})
    with pytest.raises(
        ValueError, match="`axis` must name axes that each leaf has.*'w'"
    ):
        F.clip_by_norm(x, 1.0, axis=2)
    with pytest.raises(ValueError, match="each axis once"):
        F.clip_by_norm(x, 1.0, axis=(0, -2))
    with pytest.raises(ValueError, match="strict=True and norm= exclude each other"):
        F.clip_by_global_norm(x, 1.0, use_norm=2.0, strict=True)
    for bad in (-1.0, np.float32(-1)):
        with pytest.raises(ValueError, match="`norm` must be .*0 or more"):
            F.clip_by_global_norm(x, 1.0, use_norm=bad)
    with pytest.raises(TypeError, match="`norm` must be .*real scalar"):
        F.clip_by_global_norm(x, 1.0, use_norm=jnp.ones(2))


@pytest.mark.parametrize("bad", [0, -1, float("nan")])
def test_bad_order(bad):
    with pytest.raises(ValueError, match="`ord` must be .*above 0"):
        F.global_norm(jnp.ones(2), ord=bad)


@pytest.mark.parametrize("bad", ["2", 2j, jnp.float32(2), True])
def test_wrong_kind_of_order(bad):
    with pytest.raises(TypeError, match="`ord` .*static_args"):
        F.global_norm(jnp.ones(2), ord=bad)


def test_bad_policy_and_flags():
    x = jnp.ones(2)
    with pytest.raises(ValueError, match="`nonfinite` .*propagate.*'nan'"):
        F.clip_by_norm(x, 1.0, nonfinite="nan")
    with pytest.raises(TypeError, match="`nonfinite` must be one of .*None"):
        F.clip_by_norm(x, 1.0, nonfinite=None)
    with pytest.raises(TypeError, match="`strict` must be True or False, got 1"):
        F.clip_by_norm(x, 1.0, strict=1)
    with pytest.raises(ValueError, match="`eps` must be .*got -1"):
        F.clip_by_norm(x, 1.0, eps=-1.0)


def test_functional_and_transform_are_the_same_clip(run):
    """Written once and lifted: bit for bit."""
    tree = helpers.mixed_gradients()
    tx = optclip.clip_by_global_norm(2.0, ord=3.0, nonfinite="drop")
    lifted = run(lambda t: tx.update(t, tx.init(t))[0])(tree)
    pure = run(lambda t: F.clip_by_global_norm(t, 2.0, ord=3.0, nonfinite="drop")[0])
    helpers.assert_identical(lifted, pure(tree))


@pytest.mark.covering(dtype=["bfloat16", "float16", "float8_e4m3fn"], run=RUNS)
def test_scaled_wide_and_rounded_once(dtype, run):
    """Not in the leaf's own dtype, where the coefficient would be rounded too."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=999), dtype)
    wide = np.asarray(x).astype(np.float64)
    clip = run(lambda x: F.clip_by_global_norm(x, 7.7)[0])
    exact = wide * (7.7 / np.linalg.norm(wide))
    # The norm is float32: a product close to a tie may go to the other side.
    assert np.mean(np.asarray(clip(x)) != exact.astype(x.dtype)) < 0.01


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "float16"])
def test_strict_rounds_small_formats_towards_zero(dtype):
    x = jnp.array([6.0, 3.0, -1.5, 0.5, 4.0], dtype)
    for c in (0.9, 2.2, 5.0, 7.1):
        found, _ = F.clip_by_global_norm(x, c, strict=True)
        assert 0.3 * c < oracles.norm(helpers.as_float64(found)) <= c


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
def test_strict_takes_the_next_number_towards_zero(dtype):
    bits = jnp.finfo(dtype).bits
    numbers = np.arange(2 ** (bits - 1), dtype=f"uint{bits}").view(jnp.dtype(dtype))
    numbers = numbers.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    x = jnp.asarray(np.random.default_rng(1).normal(size=99), dtype)
    found, _ = F.clip_by_global_norm(x, 1.7, strict=True)
    wide = np.abs(helpers.as_float64(x))
    exact = wide * (1.7 / oracles.norm(wide))
    # The guard band is 1.22e-4 wide.
    least, most = (
        numbers[np.searchsorted(numbers, exact * k, "right") - 1]
        for k in (1 - 1.3e-4, 1)
    )
    size = np.abs(helpers.as_float64(found))
    assert np.all((least <= size) & (size <= most))
    assert np.all(size < wide)


@pytest.mark.parametrize(
    ("dtype", "c", "strict"),
    [
        ("float32", 2.0**-60, False),
        ("float32", 2.0**-36, True),
        ("float64", 2.0**-500, False),
        ("float64", 2.0**-450, True),
    ],
)
def test_the_smallest_threshold_that_is_not_zero(dtype, c, strict):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.array([3.0, 4.0], dtype)
        for given in (float, lambda c: jnp.asarray(c, dtype)):
            found, _ = F.clip_by_global_norm(x, given(c), strict=strict)
            size = np.linalg.norm(np.asarray(found, np.float64) / c)
            np.testing.assert_allclose(size, 1, rtol=1.3e-4 if strict else 3e-6)
            below, _ = F.clip_by_global_norm(x, given(c * 0.99), strict=strict)
            assert not np.any(below)


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strict_leaves_little_less_and_clips_once(dtype, p):
    loss = {"float32": 1.3e-4, "float64": 2e-12}[dtype]
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        clip = jax.jit(lambda x, c: F.clip_by_global_norm(x, c, ord=p, strict=True)[0])
        for _ in range(20):
            x = jnp.asarray(rng.normal(size=50), dtype)
            c = 0.7 * np.linalg.norm(np.asarray(x, np.float64), ord=p)
            found = clip(x, c)
            size = np.linalg.norm(np.asarray(found, np.float64), ord=p)
            assert c * (1 - loss) <= size <= c
            np.testing.assert_array_equal(clip(found, c), found)


def test_a_key_is_no_threshold():
    with pytest.raises(
        TypeError, match=r"(?s)`max_norm` must be a real number .*PRNGKeyArray"
    ):
        F.clip_by_global_norm(jnp.ones(2), jax.random.key(0))


@pytest.mark.parametrize(("c", "eps"), [(1e-10, 0.5), (1e-18, 1)])
def test_eps_counts_as_ever_far_above_the_threshold(c, eps):
    found, _ = F.clip_by_global_norm(jnp.array([3.0, 4.0]), c, eps=eps)
    np.testing.assert_allclose(found, np.array([3.0, 4.0]) * c / (5 + eps), rtol=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, np.inf])
def test_a_modulus_above_the_largest_float(p):
    x = jnp.array([3e38 + 3e38j, 1.0])
    found, norm = F.clip_by_global_norm(x, 1.0, ord=p)
    assert norm == np.inf
    assert np.all(np.isnan(found))


def test_complex_values(run):
    """What is infinite goes to the bound, in its direction; strict is never above."""
    x = jnp.array([complex(np.inf, 1), complex(np.inf, -np.inf), -6 + 8j, 0.1j])
    found = run(lambda x: F.clip_by_value(x, lower=-2.0, upper=2.0))(x)
    exact = [2, 2**0.5 * (1 - 1j), -1.2 + 1.6j, 0.1j]
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(size=(5000, 2)) @ [3, 3j], jnp.complex64)
    found = run(lambda z: F.clip_by_value(z, lower=-1.0, upper=1.0, strict=True))(z)
    sizes = np.abs(helpers.as_float64(found))
    assert np.all(sizes <= 1)
    assert np.sum(sizes > 0.999) > 3000


def test_a_wide_jax_number_is_a_threshold_like_any():
    with jax.enable_x64(True):
        x = jnp.ones(1, jnp.float32)
        for tenth in (0.1, jnp.float64(0.1)):
            found = F.clip_by_value(x, lower=-tenth, upper=tenth, strict=True)
            assert 0.0999999 < float(found[0]) <= 0.1
        assert F.clip_by_value(x, lower=-0.5, upper=0.5, strict=True) == 0.5
        huge = jnp.full(9, 1e38, jnp.float32)
        found, _ = F.clip_by_global_norm(huge, jnp.float64(1.5e38))
        assert np.all(found < 5.1e37)


@pytest.mark.parametrize("bound", [0.0, 1e-40, 2e-38])
def test_strict_bounds_near_the_smallest_numbers(bound, run):
    """What a CPU takes for zeros is above such a bound all the same."""
    x = jnp.array([1e-38, -1e-39, 1.0])
    clip = run(lambda x: F.clip_by_value(x, lower=-bound, upper=bound, strict=True))
    found = helpers.as_float64(clip(x))
    assert np.all(np.abs(found) <= np.float64(np.float32(bound)))
    assert helpers.differs(found, x)


def test_one_batch_stored_for_several_is_refused():
    mat = BCOO((jnp.ones((1, 2)), jnp.array([[[0], [1]]])), shape=(4, 3))
    with pytest.raises(
        ValueError, match=r"leaf at 'w'.*one batch stored for several.*Give"
    ):
        F.global_norm({"w": mat})


def test_a_given_norm_of_zero():
    found, norm = F.clip_by_global_norm(jnp.zeros(2), 1.0, use_norm=0.0)
    assert norm == 0
    assert not np.any(found)


def test_a_traced_eps_below_zero_counts_as_zero():
    """It is not checked, and would switch the clip off."""
    clip = jax.jit(lambda x, e: F.clip_by_global_norm(x, 1.0, eps=e, strict=True)[0])
    x = jnp.array([3.0, 4.0])
    np.testing.assert_array_equal(clip(x, -4.5), clip(x, 0.0))
    assert oracles.norm(clip(x, -4.5)) <= 1.0
