"""The identity forwards; backwards the clip of each norm, as by hand in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import clip_cotangent, with_clipped_cotangent
from tests.support import backprop, helpers
from tests.support.covering import RUNS

RNG = np.random.default_rng(5)
SIZES = np.exp(RNG.normal(size=(7, 4, 1)))
# Of rows far above the threshold, near it and below it.
COTANGENT = (RNG.normal(size=(7, 4, 6)) * SIZES).astype(np.float32)
X = RNG.normal(size=(7, 4, 6)).astype(np.float32)
C = 2.0

CLIPS = {
    "row": ({}, backprop.hard(C)),
    "rows of an axis": ({"axis": 0}, backprop.hard(C, axis=0)),
    "pairs of axes": ({"axis": (0, -1)}, backprop.hard(C, axis=(0, 2))),
    "whole": ({"axis": None}, backprop.hard(C, axis=None)),
    "element": ({"axis": ()}, backprop.by_value(C)),
    "smooth": ({"response": "smooth"}, backprop.smooth(C)),
    "drop": ({"response": "drop"}, backprop.drop(C)),
    "normalize": ({"response": "normalize"}, backprop.normalize(C)),
    "infinite order": (
        {"ord": np.inf},
        lambda g: g * np.minimum(1, C / np.abs(g).max(-1, keepdims=True)),
    ),
}


def pulled(x, cotangent, *args, **options):
    """What of a cotangent comes out of the backward pass."""
    _, pull = jax.vjp(lambda x: clip_cotangent(x, *args, **options), x)
    return pull(cotangent)[0]


@pytest.mark.parametrize("options", [{}, {"axis": None}, {"relative": "median"}])
def test_a_scan_keeps_nothing_more_for_it(options):
    """The memory beside an unclipped pass does not grow with the steps."""

    def temporaries(steps, clip):
        def value(w, xs):
            def step(h, x):
                return clip(jnp.tanh(h @ w + x)), None

            return jnp.sum(jax.lax.scan(step, jnp.zeros((4, 6)), xs)[0])

        xs = jnp.ones((steps, 4, 6))
        program = jax.jit(jax.grad(value)).lower(W, xs).compile()
        return program.memory_analysis().temp_size_in_bytes

    def more(steps):
        clipped = temporaries(steps, lambda h: clip_cotangent(h, C, **options))
        return clipped - temporaries(steps, lambda h: h)

    assert temporaries(512, lambda h: h) > 512 * 4 * 6 * 4
    assert abs(more(512) - more(32)) < 1024


@pytest.mark.covering(name=tuple(CLIPS), run=RUNS)
def test_it_is_the_clip_by_hand(name, run):
    options, wanted = CLIPS[name]
    found = run(lambda x, g: pulled(x, g, C, **options))(X, COTANGENT)
    expected = wanted(COTANGENT.astype(np.float64))
    assert helpers.differs(found, COTANGENT)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


W = (RNG.normal(size=(6, 6)) * 0.9).astype(np.float32)


def loss(w, clip):
    def step(h, x):
        return clip(jnp.tanh(jnp.dot(h, w, precision="highest") + x)), None

    h, _ = jax.lax.scan(step, jnp.zeros(X.shape[1:]), X)
    return jnp.sum(h * COTANGENT[0])


@pytest.mark.parametrize("name", CLIPS)
def test_in_a_scan_each_time_step_is_clipped(name):
    options, by_hand = CLIPS[name]
    found = jax.jit(jax.grad(loss), static_argnums=1)(
        W, lambda h: clip_cotangent(h, C, **options)
    )
    given = (np.asarray(x, np.float64) for x in (W, X, COTANGENT[0]))
    # A row of a step is of one example here: that of an axis is the first.
    if name in ("rows of an axis", "pairs of axes"):
        by_hand = backprop.hard(C, axis=0 if name == "rows of an axis" else (0, 1))
    expected, seen = backprop.recurrent(*given, by_hand)
    assert any(np.any(by_hand(g) != g) for g in seen)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * abs(expected).max())


def test_remat_unrolling_and_vmap_change_nothing():
    def each(w, x, target, remat):
        def step(h, x):
            h = jnp.tanh(jnp.dot(h, w, precision="highest") + x)
            return clip_cotangent(h, C), None

        step = jax.checkpoint(step) if remat else step
        h, _ = jax.lax.scan(step, jnp.zeros(x.shape[1:]), x, unroll=3 if remat else 1)
        return jnp.sum(h * target)

    def gradient(remat, w):
        per_example = jax.vmap(jax.grad(each), in_axes=(None, 1, 0, None))
        return jnp.sum(per_example(w, X, COTANGENT[0], remat), axis=0)

    def batched(w):
        return loss(w, lambda h: clip_cotangent(h, C))

    expected = jax.jit(jax.grad(batched))(W)
    for remat in (False, True):
        found = jax.jit(gradient, static_argnums=0)(remat, W)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    plain = jax.jit(jax.grad(lambda w: loss(w, lambda h: h)))(W)
    assert float(jnp.max(jnp.abs(plain - expected))) > 0.1


@pytest.mark.parametrize("options", [{}, {"axis": None}, {"axis": ()}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gradient_inside_the_threshold_is_the_same_to_the_bit(dtype, options):
    w = jnp.asarray(W, dtype)

    def gradient(clip):
        def value(w):
            h = jnp.tanh(jnp.asarray(X, dtype) @ w)
            return jnp.sum(jnp.asarray(clip(h), jnp.float32) ** 2)

        return jax.jit(jax.grad(value))(w)

    found = gradient(lambda h: clip_cotangent(h, 1e4, **options))
    helpers.assert_identical(found, gradient(lambda h: h))
    clipped = gradient(lambda h: clip_cotangent(h, 0.1, **options))
    assert helpers.differs(clipped, found)


def test_forwards_it_is_any_tree_as_it_was():
    tree = {
        "half": jnp.asarray(X, jnp.bfloat16),
        "complex": jnp.asarray(X + 1j, jnp.complex64),
        "whole": (jnp.arange(3), jnp.array([True]), None),
        "key": jax.random.key(0),
        "weak": 2.5,
        "subnormal": jnp.array([1e-45, -0.0, jnp.nan]),
    }
    found = clip_cotangent(tree, 1.0)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["key"] is tree["key"]
    assert found["weak"] is tree["weak"]
    helpers.assert_identical(found | {"key": 0}, tree | {"key": 0})
    assert clip_cotangent(jnp.arange(3), 1.0).dtype == jnp.int32
    probe = optclip.cotangent_probe()
    assert clip_cotangent((), 1.0, probe=probe) == ((), probe)


def test_whole_numbers_and_masked_leaves_keep_their_cotangents():
    tree = {"a": jnp.asarray(X), "b": [jnp.asarray(X)], "n": jnp.arange(3)}

    def pulled_by(mask):
        _, pull = jax.vjp(lambda t: clip_cotangent(t, C, mask=mask), tree)
        zero = np.zeros(3, jax.dtypes.float0)
        return pull({"a": COTANGENT, "b": [COTANGENT], "n": zero})[0]

    found = pulled_by(optclip.by_path(lambda path: path == "a"))
    assert found["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(found["b"][0], COTANGENT)
    np.testing.assert_allclose(found["a"], backprop.hard(C)(COTANGENT), rtol=1e-6)
    assert helpers.differs(pulled_by(None)["b"][0], COTANGENT)


def test_complex_cotangents_are_clipped_by_the_modulus():
    cotangent = (COTANGENT + 2j * COTANGENT[::-1]).astype(np.complex64)
    x = jnp.asarray(X, jnp.complex64)
    for options, wanted in (
        ({}, backprop.hard(C)(cotangent)),
        ({"axis": ()}, cotangent * np.minimum(1, C / np.abs(cotangent))),
    ):
        found = pulled(x, cotangent, C, **options)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_thresholds_may_be_traced_arrays_and_trees(run):
    by_row = (1 + np.arange(4, dtype=np.float32))[None, :, None]
    tree = {"a": jnp.asarray(X), "b": jnp.asarray(X), "c": jnp.asarray(X)}

    def gradient(first, rows):
        limits = {"a": first, "b": None, "c": rows}
        _, pull = jax.vjp(lambda t: clip_cotangent(t, limits), tree)
        return pull(dict.fromkeys("abc", COTANGENT))[0]

    found = run(gradient)(jnp.float32(C), by_row)
    np.testing.assert_allclose(found["a"], backprop.hard(C)(COTANGENT), rtol=1e-6)
    np.testing.assert_array_equal(found["b"], COTANGENT)
    wanted = backprop.hard(by_row)(COTANGENT)
    np.testing.assert_allclose(found["c"], wanted, rtol=1e-6)


def test_a_traced_whole_number_is_a_threshold():
    found = jax.jit(lambda n: pulled(X, COTANGENT, n))(jnp.int32(2))
    np.testing.assert_allclose(found, backprop.hard(2.0)(COTANGENT), rtol=1e-6)


def test_clip_cotangent_shared_array_under_vmap_is_clipped_per_example():
    """An array without an axis of examples, beside arrays and thresholds with one."""
    limits = np.array([1.0, 3.0], np.float32)

    def one(w, limit, x):
        out = clip_cotangent({"w": w, "x": x}, {"w": limit, "x": None})
        return jnp.sum(out["w"] * out["x"])

    def total(w):
        of_examples = jax.vmap(one, (None, None, 0))
        return jnp.sum(jax.vmap(of_examples, (None, 0, None))(w, limits, COTANGENT))

    expected = sum(backprop.hard(c)(COTANGENT.astype(np.float64)) for c in limits)
    assert helpers.differs(expected, 2 * COTANGENT)
    found = jax.grad(total)(X[0])
    np.testing.assert_allclose(found, expected.sum(0), rtol=1e-6, atol=1e-6)


def test_a_threshold_has_no_gradient():
    def value(c, x):
        return jnp.sum(clip_cotangent(x, c) * COTANGENT)

    slope, rest = jax.jit(jax.grad(value, argnums=(0, 1)))(jnp.float32(C), X)
    assert slope == 0
    assert helpers.differs(rest, COTANGENT)


@pytest.mark.parametrize("threshold", [0.0, np.inf])
def test_a_threshold_of_0_clips_to_zero_and_of_inf_nothing(threshold):
    found = pulled(X, COTANGENT, threshold)
    np.testing.assert_array_equal(found, COTANGENT if threshold else 0 * X)


def test_second_derivatives_are_those_of_the_clip():
    """Of the gradient `clip(3 h^2)`: by differences, in float64, of the clip by hand."""

    def by_hand(h):
        return backprop.hard(C)(3 * h**2)

    h, step = np.asarray(X[0], np.float64), 1e-6
    direction = np.asarray(COTANGENT[0], np.float64)
    ahead, back = by_hand(h + step * direction), by_hand(h - step * direction)
    wanted = np.sum((ahead - back) / (2 * step))

    def slopes(h):
        return jnp.sum(jax.grad(lambda h: jnp.sum(clip_cotangent(h, C) ** 3))(h))

    found = jnp.vdot(jax.jit(jax.grad(slopes))(X[0]), COTANGENT[0])
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    free = jax.grad(lambda h: jnp.sum(3 * h**2))(X[0])
    assert abs(float(jnp.vdot(free, COTANGENT[0])) - wanted) > 1


@pytest.mark.parametrize("threshold", [0.5, jnp.float32(0.5)], ids=["known", "array"])
def test_hessians_forward_over_reverse(threshold):
    def value(h):
        return jnp.sum(clip_cotangent(h, threshold) ** 3)

    found = jax.jit(jax.hessian(value))(X[0, 0])
    over = jax.jit(jax.jacrev(jax.grad(value)))(X[0, 0])
    np.testing.assert_allclose(found, over, rtol=0, atol=1e-6)
    assert float(jnp.max(jnp.abs(found - jnp.diag(6 * X[0, 0])))) > 0.1


@pytest.mark.parametrize(
    "of", [lambda f: jax.jvp(f, (X,), (X,)), lambda f: jax.jacfwd(f)(X[0, 0])]
)
def test_forward_mode_is_refused_by_name(of):
    with pytest.raises(TypeError, match="reverse mode, as of jax.grad.*Leave clip_"):
        of(lambda x: clip_cotangent(x, 1.0))
    with pytest.raises(TypeError, match="custom_vjp"):
        of(jax.jit(lambda x: clip_cotangent(x, 1.0)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_is_finite_where_the_unclipped_pass_overflows(dtype):
    """Forty layers that each make the cotangent 50 times as large."""

    def gradient(clip):
        def value(x):
            for _ in range(40):
                x = clip(x * jnp.asarray(50.0, dtype) * jnp.asarray(0.02, dtype))
                x = x / jnp.asarray(0.02, dtype)
            return jnp.sum(x)

        return jax.grad(value)(jnp.asarray(1e-30 * X[0, 0], dtype))

    assert not np.all(np.isfinite(np.asarray(gradient(lambda x: x), np.float32)))
    found = gradient(lambda x: clip_cotangent(x, 1.0))
    assert np.all(np.isfinite(np.asarray(found, np.float32)))
    assert np.any(np.asarray(found, np.float32) != 0)


def test_a_layer_clips_what_it_returns():
    def layer(w, *, times):
        """Of a network."""
        return {"h": w * times * X, "n": jnp.int32(3)}

    wrapped = with_clipped_cotangent(layer, C, axis=(0, 1, 2))
    assert wrapped.__name__ == "layer"

    def value(w):
        out = wrapped(w, times=2.0)
        return jnp.sum(out["h"] * COTANGENT) + out["n"]

    found = jax.grad(value)(1.0)
    clipped = backprop.hard(C, axis=None)(COTANGENT.astype(np.float64))
    np.testing.assert_allclose(found, np.sum(2 * X * clipped), rtol=1e-5)


def test_options_of_a_layer_are_checked_where_it_is_wrapped():
    def layer(x):
        return x

    with pytest.raises(ValueError, match="`max_norm` must be 0 or more"):
        with_clipped_cotangent(layer, -1.0)
    with pytest.raises(ValueError, match="`response` must be"):
        with_clipped_cotangent(layer, {"h": 1.0}, response="soft")
    wrapped = with_clipped_cotangent(layer, {"h": 1.0})
    with pytest.raises(ValueError, match="`max_norm` must be a prefix"):
        wrapped(jnp.ones(3))


def test_errors_say_what_to_do_here():
    with pytest.raises(ValueError, match="the leaf '1' of shape ().*give axis=None"):
        clip_cotangent((X, jnp.float32(0.3)), 1.0)
    with pytest.raises(TypeError, match=r"got <function.*schedule\(step\)"):
        clip_cotangent(X, lambda step: 1.0)
    for axis in (3, -4, (0, 3)):
        words = r"`axis` must name .* for the array of shape \(7, 4, 6\).*axis=None"
        with pytest.raises(ValueError, match=words):
            clip_cotangent(X, 1.0, axis=axis)
    first = pulled(X, COTANGENT, C, axis=0)
    helpers.assert_identical(pulled(X, COTANGENT, C, axis=-3), first)


def test_what_needs_steps_or_several_norms_is_refused():
    scheduled = optclip.responses.band(lambda step: 0.5)
    with pytest.raises(ValueError, match="`response` must be without a schedule"):
        clip_cotangent(X, 1.0, response=scheduled)
    with pytest.raises(
        ValueError, match="`axis` must be ints with `relative`.*axis=-1"
    ):
        clip_cotangent(X, 1.0, axis=None, relative="rms")


def test_another_error_of_jax_stays_what_it_is(monkeypatch):
    def fails(*_):
        raise TypeError("of something else")

    monkeypatch.setattr(jax.custom_vjp, "__call__", fails)
    with pytest.raises(TypeError, match="^of something else$"):
        clip_cotangent(X, 1.0)


def test_norms_may_span_an_axis_of_vmap():
    def value(x, g):
        return jnp.sum(clip_cotangent(x, C, axis=None, axis_name="i") * g)

    def total(x):
        return jnp.sum(jax.vmap(value, axis_name="i")(x, COTANGENT))

    wanted = backprop.hard(C, axis=None)(COTANGENT)
    for found in (
        jax.grad(total)(X),
        jax.vmap(jax.grad(value), axis_name="i")(X, COTANGENT),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_only_dense_arrays_go_through():
    from jax.experimental import sparse

    with pytest.raises(TypeError, match="'x' must be a dense array, got BCOO.*data"):
        clip_cotangent({"x": sparse.BCOO.fromdense(jnp.eye(2))}, 1.0)


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_what_is_not_finite_stays_in_its_row(policy):
    cotangent = COTANGENT.copy()
    cotangent[0, 0, 0], cotangent[1, 1, 1] = np.nan, np.inf
    found = pulled(X, cotangent, C, nonfinite=policy)
    expected = backprop.hard(C)(np.where(np.isfinite(cotangent), cotangent, 0))
    rows = (0, 0), (1, 1)
    for row in rows:
        if policy == "propagate":
            assert np.all(np.isnan(found[row]))
        if policy == "zero":
            np.testing.assert_array_equal(found[row], 0)
    if policy == "drop":
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    others = np.ones((7, 4), bool)
    others[0, 0] = others[1, 1] = False
    np.testing.assert_allclose(found[others], expected[others], rtol=1e-6)


def test_raise_names_the_leaf_under_checkify():
    from jax.experimental import checkify

    def gradient(cotangent):
        _, pull = jax.vjp(
            lambda t: clip_cotangent(t, 1.0, nonfinite="raise"), {"h": jnp.asarray(X)}
        )
        return pull({"h": cotangent})

    error, _ = checkify.checkify(jax.jit(gradient))(COTANGENT * np.nan)
    with pytest.raises(checkify.JaxRuntimeError, match="in the leaf 'h'"):
        error.throw()
