"""Functions of trees without floats: values are clipped as by TensorFlow, norms raise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import functional as F
from tests.support import helpers

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
