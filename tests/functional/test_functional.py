"""Test the pure functions: formulas, given norms, exchanged arguments, integers."""

import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from optclip import recipes, thresholds
from tests.support import covering, helpers
from tests.support.registry import ENTRIES

PURE = [entry for entry in ENTRIES if entry.pure]


def clipped_by(entry, tree):
    """Clip without the global and group norms that some functions return too."""
    clipped = entry.pure(tree)
    return clipped[0] if isinstance(clipped, tuple) else clipped


@pytest.mark.parametrize(
    "make", [helpers.mixed_gradients, *[helpers.gradients] * covering.full]
)
def test_pure_functions_equal_their_formulas(make):
    tree = make()

    @helpers.quick_jit
    @helpers.without_promotion
    def clip_by_all(tree):
        return [clipped_by(entry, tree) for entry in PURE]

    for entry, found in zip(PURE, clip_by_all(tree), strict=True):
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        helpers.assert_close(found, entry.expected(helpers.as_float64(tree)), ulps=4)


def test_functions_return_norms_that_may_span_several_leaves():
    hints = {
        name: typing.get_type_hints(getattr(F, name))["return"]
        for name in F.__all__
        if name.startswith("clip_by")
    }
    assert {k for k, hint in hints.items() if typing.get_origin(hint) is tuple} == {
        "clip_by",
        "clip_by_global_norm",
        "clip_by_group_norm",
    }


@pytest.mark.parametrize("number", [2**40, np.int64(2**40)])
def test_integer_beyond_32_bits_equals_float(number):
    """JAX rejects such an int, and wraps one of NumPy."""
    x = np.float32([3.0, 4.0])

    def outs(c):
        skip = optclip.skip(optax.identity(), max_loss=1.0)
        band = optclip.responses.band(0.5, max_growth=c)
        given = [
            optclip.clip_by_global_norm(thresholds.zscore(max_norm=c)),
            optclip.clip_by_global_norm(20.0, response=band),
            recipes.sclip(c, c),
            recipes.clippy(c, c),
        ]
        return [
            F.clip_by_global_norm(x, 1.0, use_norm=c)[0],
            F.clip_by_global_norm(x, 1.0, eps=c)[0],
            skip.update(x, skip.init(x), value=c)[0],
            *(tx.update(x, tx.init(x), x)[0] for tx in given),
        ]

    found, expected = helpers.quick_jit(lambda: (outs(number), outs(2.0**40)))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


GRADIENTS = {
    "dict": {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)},
    "list": [np.ones(3, np.float32)],
    "array": np.ones((2, 3), np.float32),
}
THRESHOLDS = {
    "clip_by_global_norm": "max_norm",
    "clip_by_norm": "max_norm",
    "clip_by_rms": "max_rms",
    "clip_by_average_norm": "max_norm",
    "clip_by_value": "limit",
    "clip_by": "threshold",
}


@pytest.mark.covering(
    name=tuple(THRESHOLDS),
    number=(1, 1.0, np.float32(1), np.float64(1)),
    kind=tuple(GRADIENTS),
    run=covering.RUNS,
)
def test_threshold_before_gradients_error_asks_for_exchange(name, number, kind, run):
    words = f"must come before `{THRESHOLDS[name]}`, .* Exchange the two arguments"
    with pytest.raises(TypeError, match=f"(?s){words}"):
        run(lambda tree: getattr(F, name)(number, tree))(GRADIENTS[kind])


# Trees without floats: values are clipped as by TensorFlow, norms raise.

DTYPES = ("uint8", "int8", "int16", "uint32", "int32", "uint64", "int64")
# Bounds inside and outside the range of some dtype, next to its ends.
ENDS = (-(2**31), -129, -5, 0, 5, 128, 299, 2**31, 2**40)


def to_one_group(tree):
    return jax.tree.map(lambda _: "all", tree)


NORMS = {
    "use_norm": lambda tree: F.clip_by_global_norm(tree, 1.0, use_norm=5.0),
    "group": lambda tree: F.clip_by_group_norm(tree, 1.0, groups=to_one_group),
    "global_norm": F.global_norm,
}
NORMS |= {
    name: functools.partial(lambda clip, tree: clip(tree, 1.0), getattr(F, name))
    for name in F.__all__
    if name.startswith("clip_by")
    and name not in ("clip_by_value", "clip_by_group_norm")
}


def numbers(dtype):
    info = jnp.iinfo(dtype)
    ends = (info.min, info.min + 1, 0, 5, info.max - 1, info.max)
    return np.array(ends, dtype)


def between(x, lower, upper):
    """Clip in Python, whose integers do not overflow, to what the dtype represents."""
    info = np.iinfo(x.dtype)
    lower, upper = (min(max(end, info.min), info.max) for end in (lower, upper))
    return [min(max(int(value), lower), upper) for value in x]


def as_jax(bound):
    """Return a bound as a JAX array without x64, or as an int if it has none."""
    dtype = jnp.int32 if bound < 2**31 else jnp.uint32
    return jnp.asarray(np.asarray(bound, dtype)) if bound < 2**32 else bound


@pytest.mark.parametrize("of", [int, np.int64, as_jax], ids=["int", "NumPy", "JAX"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_array_is_clipped_to_integer_bounds(dtype, of):
    x = numbers(dtype)
    for lower, upper in itertools.combinations_with_replacement(ENDS, 2):
        clipped = F.clip_by_value(x, of(lower), of(upper))
        assert clipped.dtype == x.dtype
        assert clipped.tolist() == between(x, lower, upper), (lower, upper)
    for limit in (0, 5, 127, 128, 2**31):
        clipped = F.clip_by_value(x, of(limit))
        assert clipped.dtype == x.dtype
        assert clipped.tolist() == between(x, -limit, limit), limit


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_omitted_bound_of_integers_is_unbounded(dtype):
    x = jnp.asarray(numbers(dtype))
    np.testing.assert_array_equal(F.clip_by_value(x, lower=5), np.maximum(x, 5))
    np.testing.assert_array_equal(F.clip_by_value(x, None, 5), np.minimum(x, 5))


def test_integers_are_clipped_to_array_and_traced_bounds():
    x = jnp.arange(-3, 3, dtype=jnp.int8).reshape(2, 3)
    clip = helpers.quick_jit(helpers.without_promotion(F.clip_by_value))
    upper = np.array([[1], [0]])
    np.testing.assert_array_equal(clip(x, -300, upper), np.minimum(x, upper))
    np.testing.assert_array_equal(clip(x, jnp.int32(200)), x)
    np.testing.assert_array_equal(clip(x, jnp.int32(-1)), np.zeros((2, 3)))


def test_python_int_alone_is_clipped_and_weakly_typed():
    clipped = F.clip_by_value(300, 0, 255)
    assert (clipped, clipped.weak_type) == (255, True)


IDS, FLAGS = np.array([-5, 300]), np.array([True, False])


def test_integers_of_a_tree_without_floats_are_clipped():
    tree = {"image": IDS, "more": [7, FLAGS, None, jnp.int8([3, -4])]}
    clipped = F.clip_by_value(tree, {"image": 0, "more": -1}, {"image": 255, "more": 2})
    helpers.assert_same_types(clipped, tree)
    seven, flags, _, more = clipped["more"]
    assert (clipped["image"].tolist(), seven, more.tolist()) == ([0, 255], 2, [2, -1])
    assert flags is FLAGS
    kept = F.clip_by_value([IDS, IDS], 1, mask=[True, False])
    assert kept[0].tolist() == [-1, 1]
    assert kept[1] is IDS
    assert F.clip_by_value([IDS], [None])[0].tolist() == IDS.tolist()


def test_integers_beside_floats_and_bools_are_unchanged():
    clipped = F.clip_by_value([IDS, np.float32(3)], 1.0)
    assert clipped[0] is IDS
    assert clipped[1] == 1
    assert F.clip_by_value(FLAGS, 1.0) is FLAGS


@pytest.mark.parametrize("tree", [[3, 4], IDS, {"a": FLAGS, "b": None}, jnp.arange(2)])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_norm_of_a_tree_without_floats_raises(name, tree):
    words = r"must have a floating-point.*jnp\.asarray\(x, jnp\.float32\), tree\)\.$"
    with pytest.raises(TypeError, match=words):
        NORMS[name](tree)
