"""Cotangent clipping equals back-propagation by hand in float64.

Thresholds are numbers, or relative to the norms of the array itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, sparse

import optclip
from optclip import clip_cotangent, cotangent_probe
from tests.support import backprop, covering
from tests.support.helpers import assert_identical, differs, quick_jit

SIZES = np.exp(np.random.default_rng(0).normal(size=(7, 4, 1)))
# Rows far above the threshold, near it and below it.
COTANGENT = (np.random.default_rng(1).normal(size=(7, 4, 6)) * SIZES).astype(np.float32)
X = np.random.default_rng(2).normal(size=(7, 4, 6)).astype(np.float32)
W = (np.random.default_rng(3).normal(size=(6, 6)) * 0.9).astype(np.float32)
C = 2.0

CLIPS = {
    "row": ({}, backprop.hard(C)),
    "rows of axis": ({"axis": 0}, backprop.hard(C, axis=0)),
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
    """Return the cotangent that comes out of the backward pass."""
    _, pull = jax.vjp(lambda x: clip_cotangent(x, *args, **options), x)
    return pull(cotangent)[0]


def loss(w, clip, remat):
    def step(h, x):
        return clip(jnp.tanh(jnp.dot(h, w, precision="highest") + x)), None

    step = jax.checkpoint(step) if remat else step
    h, _ = jax.lax.scan(step, jnp.zeros(X.shape[1:]), X, unroll=3 if remat else 1)
    return jnp.sum(h * COTANGENT[0])


@pytest.mark.covering(
    name=tuple(CLIPS),
    remat=[False, True],
    # `jax.checkpoint` depends on no option.
    where=lambda name, remat: covering.full or remat == (name in ("row", "drop")),
)
def test_clip_cotangent_in_scan_equals_backprop_by_hand(name, remat):
    """Also unrolled, under `jax.checkpoint`."""
    options, by_hand = CLIPS[name]
    found = quick_jit(jax.grad(loss), static_argnums=(1, 2))(
        W, lambda h: clip_cotangent(h, C, **options), remat
    )
    given = (np.asarray(x, np.float64) for x in (W, X, COTANGENT[0]))
    expected, seen = backprop.recurrent(*given, by_hand)
    assert any(np.any(by_hand(g) != g) for g in seen)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * abs(expected).max())


@functools.cache
def memory(steps, relative="unclipped"):
    """Return the temporary bytes of a backward pass with cotangent clipping."""

    def value(w, xs):
        def step(h, x):
            h = jnp.tanh(h @ w + x)
            if relative != "unclipped":
                h = clip_cotangent(h, C, relative=relative)
            return h, None

        return jnp.sum(jax.lax.scan(step, jnp.zeros((4, 6)), xs)[0])

    xs = np.ones((steps, 4, 6), np.float32)
    program = quick_jit(jax.grad(value)).lower(W, xs).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("relative", [None, "median"])
def test_clip_cotangent_in_scan_keeps_nothing_per_step(relative):
    more, more_of_few = (memory(n, relative) - memory(n) for n in (512, 32))
    assert memory(512) > 512 * 4 * 6 * 4
    assert abs(more - more_of_few) < 1024


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", {"axis": None}), ("float16", {"axis": ()})],
)
def test_clip_cotangent_within_threshold_is_bit_identical(dtype, options):
    def gradient(w, limit=None):
        h = jnp.tanh(jnp.asarray(X, dtype) @ w)
        h = h if limit is None else clip_cotangent(h, limit, **options)
        return jnp.sum(jnp.asarray(h, jnp.float32) ** 2)

    run = jax.jit(jax.grad(gradient))
    w = jnp.asarray(W, dtype)
    found = run(w, np.float32(1e4))
    assert_identical(found, run(w))
    assert differs(run(w, np.float32(0.1)), found)


def test_clip_cotangent_returns_any_tree_unchanged():
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
    assert_identical(found | {"key": 0}, tree | {"key": 0})
    assert clip_cotangent(jnp.arange(3), 1.0).dtype == jnp.int32
    probe = optclip.cotangent_probe()
    assert clip_cotangent((), 1.0, probe=probe) == ((), probe)


def test_clip_cotangent_skips_integers_and_masked_leaves():
    tree = {"a": X, "b": [X], "n": np.arange(3)}
    zero = np.zeros(3, jax.dtypes.float0)
    cotangent = {"a": COTANGENT, "b": [COTANGENT], "n": zero}
    mask = optclip.by_path(lambda path: path == "a")
    found = pulled(tree, cotangent, C, mask=mask)
    assert found["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(found["b"][0], COTANGENT)
    np.testing.assert_allclose(found["a"], backprop.hard(C)(COTANGENT), rtol=1e-6)


BAD = COTANGENT.copy()
BAD[0, 0, 0], BAD[1, 1, 1] = np.nan, np.inf
IS_BAD = ~np.isfinite(BAD).all(-1, keepdims=True)
TURNED = (COTANGENT + 2j * COTANGENT[::-1]).astype(np.complex64)
# Of norms beyond float16.
HALF = np.float16(COTANGENT * 6e4 / np.abs(COTANGENT).max())
MEDIAN = np.median(np.linalg.norm(np.float64(HALF), axis=-1))
OTHER_NUMBERS = {
    "complex": (TURNED, {}, backprop.hard(C)(TURNED)),
    "complex elements": (TURNED, {"axis": ()}, TURNED * np.minimum(1, C / abs(TURNED))),
    "half": (HALF, {}, backprop.hard(C)(np.float64(HALF))),
    "half, relative": (
        *(HALF, {"relative": "median"}),
        backprop.hard(MEDIAN * C)(np.float64(HALF)),
    ),
    "nan": (BAD, {}, np.where(IS_BAD, np.nan, backprop.hard(C)(COTANGENT))),
    "zeroed": (
        *(BAD, {"nonfinite": "zero"}),
        np.where(IS_BAD, 0, backprop.hard(C)(COTANGENT)),
    ),
}


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_clip_cotangent_of_other_numbers_equals_formula(name):
    cotangent, options, expected = OTHER_NUMBERS[name]
    x = X.astype(cotangent.dtype)
    found = quick_jit(lambda g: pulled(x, g, C, **options))(cotangent)
    rtol, atol = (2e-3, 1e-4) if "half" in name else (1e-6, 1e-6)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_clip_cotangent_takes_traced_thresholds_per_leaf_and_row():
    """They have no gradient."""
    by_row = (1 + np.arange(4, dtype=np.float32))[None, :, None]
    limits = {"number": C, "rows": by_row, "whole": 3, "zero": 0, "infinite": np.inf}
    limits |= {"none": None}

    def value(tree, limits):
        limits = {**limits, "whole": jnp.int32(limits["whole"])}
        clipped = clip_cotangent(tree, limits)
        return sum(jnp.sum(x * COTANGENT) for x in clipped.values())

    traced = jax.tree.map(np.float32, limits)
    gradient = quick_jit(jax.grad(value, argnums=(0, 1)))
    found, slopes = gradient(dict.fromkeys(limits, X), traced)
    assert not any(np.any(slope) for slope in jax.tree.leaves(slopes))
    for name in ("none", "infinite"):
        np.testing.assert_array_equal(found[name], COTANGENT)
    for name in ("number", "rows", "whole", "zero"):
        wanted = backprop.hard(limits[name])(COTANGENT)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)


def test_clip_cotangent_shared_array_under_vmap_is_clipped_per_example():
    """Some arrays and thresholds have an axis of examples, others have none."""
    limits = np.array([1.0, 3.0], np.float32)

    def one(w, limit, x):
        out = clip_cotangent({"w": w, "x": x}, {"w": limit, "x": None})
        return jnp.sum(out["w"] * out["x"])

    def total(w):
        of_examples = jax.vmap(one, (None, None, 0))
        return jnp.sum(jax.vmap(of_examples, (None, 0, None))(w, limits, COTANGENT))

    expected = sum(backprop.hard(c)(COTANGENT.astype(np.float64)) for c in limits)
    assert differs(expected, 2 * COTANGENT)
    found = quick_jit(jax.grad(total))(X[0])
    np.testing.assert_allclose(found, expected.sum(0), rtol=1e-6, atol=1e-6)


def test_clip_cotangent_norm_spans_axis_of_vmap():
    """Whether the derivative is taken inside of the map or outside."""

    def value(x, g):
        return jnp.sum(clip_cotangent(x, C, axis=None, axis_name="i") * g)

    def both(x, g):
        inside = jax.vmap(jax.grad(value), axis_name="i")(x, g)
        total = jax.vmap(value, axis_name="i")
        return inside, jax.grad(lambda x: jnp.sum(total(x, g)))(x)

    wanted = backprop.hard(C, axis=None)(COTANGENT)
    for found in quick_jit(both)(X, COTANGENT):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("second", [jax.jacfwd, jax.jacrev])
def test_clip_cotangent_hessian_equals_differences(second):
    """Of the gradient `clip(3 h^2)`, in float64."""
    h, step = np.asarray(X[0, 0], np.float64), 1e-6

    def by_hand(h):
        return backprop.hard(0.5)(3 * h**2)

    ends = h + step * np.eye(6), h - step * np.eye(6)
    wanted = (by_hand(ends[0]) - by_hand(ends[1])) / (2 * step)
    assert np.abs(wanted - np.diag(6 * h)).max() > 0.1

    def gradient(h, threshold):
        return jax.grad(lambda h: jnp.sum(clip_cotangent(h, threshold) ** 3))(h)

    def both(h, traced):
        return [second(lambda h, c=c: gradient(h, c))(h) for c in (0.5, traced)]

    for found in quick_jit(both)(X[0, 0], np.float32(0.5)):
        np.testing.assert_allclose(found, wanted.T, rtol=0, atol=1e-4)


def test_clip_cotangent_raise_names_leaf_under_checkify():
    clip = jax.jit(lambda g: pulled({"h": X}, {"h": g}, 1.0, nonfinite="raise"))
    error, _ = checkify.checkify(clip)(COTANGENT * np.nan)
    with pytest.raises(checkify.JaxRuntimeError, match="in the leaf 'h'"):
        error.throw()


EYE = sparse.BCOO((np.ones(2), np.array([[0, 0], [1, 1]])), shape=(2, 2))
AXIS = r"`axis` must name .* for the array of shape \(7, 4, 6\).*axis=None"
ERRORS = {
    "scalar leaf": (
        lambda: clip_cotangent((X, jnp.float32(0.3)), 1.0),
        (ValueError, "the leaf '1' of shape ().*pass axis=None"),
    ),
    "schedule": (
        lambda: clip_cotangent(X, lambda step: 1.0),
        (TypeError, r"got <function.*schedule\(step\)"),
    ),
    **{
        f"axis {axis}": (
            lambda axis=axis: clip_cotangent(X, 1.0, axis=axis),
            (ValueError, AXIS),
        )
        for axis in (3, -4, (0, 3))
    },
    "scheduled response": (
        lambda: clip_cotangent(X, 1.0, response=optclip.responses.band(lambda s: 0.5)),
        (ValueError, "`response` must be a response without schedules"),
    ),
    "relative without axis": (
        lambda: clip_cotangent(X, 1.0, axis=None, relative="median"),
        (ValueError, "`axis` must be an int or a tuple with `relative`.*axis=-1"),
    ),
    **{
        f"relative to {answer}": (
            lambda answer=answer: clip_cotangent(X, 1.0, relative=lambda _: answer),
            (TypeError, "The result of `relative` must be a real number"),
        )
        for answer in ("x", np.ones(2))
    },
    "probe of steps": (
        lambda: clip_cotangent(X, 1.0, probe=cotangent_probe(3)),
        (ValueError, "a record of scalars.*xs of jax.lax.scan"),
    ),
    "empty probe": (
        lambda: clip_cotangent(
            X, 1.0, probe=cotangent_probe()._replace(cotangent_norm=None)
        ),
        (ValueError, "`probe` must be a record"),
    ),
    "probe in the tree": (
        lambda: clip_cotangent((X, cotangent_probe()), 1.0),
        (TypeError, "h, probe = clip_cotangent"),
    ),
    "forward mode": (
        lambda: jax.jvp(lambda x: clip_cotangent(x, 1.0), (X,), (X,)),
        (TypeError, "forward-mode.*Use jax.grad"),
    ),
    "forward mode under jit": (
        lambda: jax.jvp(jax.jit(lambda x: clip_cotangent(x, 1.0)), (X,), (X,)),
        (TypeError, "custom_vjp"),
    ),
    "sparse": (
        lambda: clip_cotangent({"x": EYE}, 1.0),
        (TypeError, "'x' must be a dense array, got BCOO.*data"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_clip_cotangent_bad_argument_raises(name):
    call, (error, message) = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


def test_clip_cotangent_keeps_other_type_errors_of_jax(monkeypatch):
    # No user argument makes the call itself fail.
    monkeypatch.setattr(jax.custom_vjp, "__call__", lambda: None)
    with pytest.raises(TypeError, match="positional argument"):
        clip_cotangent(X, 1.0)


# Thresholds relative to the norms of the array itself.

PADDED = COTANGENT.copy()
PADDED[:3, :2] = 0  # A fifth of all tokens.
RELATIVES = ("median", jnp.max)


def pulled_by_all(cotangent, factor, **options):
    return [
        pulled(cotangent, cotangent, factor, relative=r, **options) for r in RELATIVES
    ]


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
        clips = clipped(axis=axis)(PADDED, factor)
        for relative, found in zip(RELATIVES, clips, strict=True):
            limit = factor * reference(PADDED, relative, axis)
            expected = backprop.hard(limit, axis)(PADDED)
            assert differs(found, PADDED)
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


def test_relative_threshold_scales_with_loss():
    expected = clipped(axis=-1)(PADDED, 0.9)
    for scale in np.float32([1e-15, 1e-6, 2.0**16, 1e30]):
        clips = clipped(axis=-1)(PADDED * scale, 0.9)
        for found, unscaled in zip(clips, expected, strict=True):
            scaled = np.float64(unscaled) * scale
            atol = 2e-7 * np.abs(scaled).max()
            np.testing.assert_allclose(found, scaled, rtol=2e-6, atol=atol)


def test_relative_threshold_skips_nonfinite_rows():
    cotangent = PADDED.copy()
    cotangent[4, 3, 0], cotangent[5, 0, 0] = np.inf, np.nan
    known = np.where(np.isfinite(norms_of(cotangent)), cotangent, 0)
    clips = clipped(nonfinite="zero")(cotangent, 0.5)
    for relative, found in zip(RELATIVES, clips, strict=True):
        limit = 0.5 * reference(known, relative)
        np.testing.assert_allclose(found, backprop.hard(limit)(known), rtol=2e-6)


def test_relative_threshold_of_zeros_or_inf_is_never_nan():
    """Without norms or arrays, and with a factor of 0 or inf, no operation is NaN."""
    run, zeros = clipped(axis=-1), 0 * PADDED
    cases = (zeros, 1.0, zeros), (PADDED, 0.0, zeros), (PADDED, np.inf, PADDED)
    with jax.debug_nans(True):
        for cotangent, factor, expected in cases:
            for found in run(cotangent, factor):
                np.testing.assert_array_equal(found, expected)
    nothing = np.zeros((0, 4), np.float32)
    found = jax.eval_shape(lambda: pulled(nothing, nothing, 1.0, relative="median"))
    assert found.shape == (0, 4)


def test_relative_threshold_beyond_float32_still_zeroes_inf():
    cotangent = np.array([[3e38, 0], [2e38, 0], [np.inf, 1]], np.float32)
    found = quick_jit(
        lambda g: pulled(g, g, 100.0, relative="median", nonfinite="zero")
    )(cotangent)
    np.testing.assert_array_equal(found[:2], cotangent[:2])
    np.testing.assert_array_equal(found[2], 0)
    # Of 0 times an infinite reference.
    infinite = quick_jit(lambda g: pulled(g, g, 0.0, relative=lambda norms: jnp.inf))
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

    flags = np.arange(7) % 2
    total = TRACED[under](value)
    given = np.zeros_like(PADDED), jnp.asarray(flags, dtype), PADDED
    found = quick_jit(jax.grad(lambda *args: total(*args)[0]))(*given)
    expected = PADDED.astype(np.float64)
    for i in np.flatnonzero(flags):
        limit = 0.5 * norms_of(expected[i]).max()
        halved = backprop.hard(limit)(expected[i])
        expected[i] = backprop.hard(4.0)(halved)
        assert differs(halved, PADDED[i])
    assert np.any(norms_of(PADDED[flags == 1]) > 8)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_relative_threshold_derivative_goes_through_reference():
    """Doubling the loss doubles the gradient."""

    def gradients(size):
        return jnp.stack([jnp.sum(g) for g in pulled_by_all(size * PADDED, 0.9)])

    totals = quick_jit(gradients)(1.0)
    slopes = quick_jit(jax.jacrev(gradients))(1.0)
    np.testing.assert_allclose(slopes, totals, rtol=1e-4, atol=1e-4)
