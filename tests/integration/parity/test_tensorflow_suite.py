"""The cases of TensorFlow's `clip_ops_test.py` and `clip_ops` on IndexedSlices.

Each runs TensorFlow too: what it gives is what its own test expects, and ours is that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .libraries import load
from .ours import both, function, rows, values

tf = load("tensorflow")

# Compiled: eager, each would compile every one of its operations for every shape.
clip_by_value = function("clip_by_value")
clip_by_global_norm = function("clip_by_global_norm")
clip_by_average_norm = function("clip_by_average_norm")

RAMP = np.array([[1, 2, 3], [4, 5, 6]])
LONG = np.array([[-3, 0, 0], [4, 0, 0]], np.float32)
CORNER = np.array([[-3, 0, 0], [4, 0, 3]], np.float32)
PAIR = (np.array([[-2, 0, 0], [4, 0, 0]], np.float32), np.array([1, -2], np.float32))
SMALLER_PAIR = ([[-1.6, 0, 0], [3.2, 0, 0]], [0.8, -1.6])


def clip_by_norm(x, limit, axis=None):
    return function("clip_by_norm", axis=axis)(x, limit)


def agree(mine, theirs, expected):
    """Both are what the suite expects, to a ULP or two; ours has their dtype."""
    theirs = theirs.numpy()
    assert np.asarray(mine).dtype == theirs.dtype
    rtol = 2 * float(jnp.finfo(theirs.dtype).eps)
    for found in (mine, theirs):
        found = np.asarray(found, np.float64)
        np.testing.assert_allclose(found, np.asarray(expected, np.float64), rtol=rtol)


def test_by_value():
    x = np.array([[-5, 2, 3], [4, 5, 6]], np.float32)
    expected = [[-4.4, 2, 3], [4, 4.4, 4.4]]
    for mine in values()(x, -4.4, 4.4):
        agree(mine, tf.clip_by_value(x, -4.4, 4.4), expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (2, 4, [[2, 2, 3], [4, 4, 4]]),
        ([[2, 2, 2], [3, 3, 3]], 4, [[2, 2, 3], [4, 4, 4]]),
        (4, [[6, 6, 6], [6, 6, 6]], [[4, 4, 4], [4, 5, 6]]),
        ([[2, 2, 2], [5, 5, 5]], [[5, 5, 5], [7, 7, 7]], [[2, 2, 3], [5, 5, 6]]),
    ],
)
def test_by_value_with_scalar_and_array_bounds(low, high, expected, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(RAMP, dtype)
        low, high = (
            v if np.isscalar(v) else np.asarray(v).astype(x.dtype) for v in (low, high)
        )
        theirs = tf.clip_by_value(np.asarray(x), low, high)
        agree(clip_by_value(x, lower=low, upper=high), theirs, expected)


def test_by_value_with_bounds_of_a_wrong_shape():
    x, clip = np.zeros((2, 3, 1), np.float32), np.array([1, 2], np.float32)
    for low in (-clip, 1.0):
        with pytest.raises(ValueError, match="are incompatible"):
            tf.clip_by_value(x, low, clip)
        with pytest.raises(ValueError, match="does not broadcast"):
            clip_by_value(x, lower=low, upper=clip)


def test_by_value_nonfinite():
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    theirs = tf.clip_by_value(x, -4.0, 4.0)
    agree(clip_by_value(x, lower=-4.0, upper=4.0), theirs, [np.nan, 4, -4])


def test_by_value_empty():
    empty = np.zeros((7, 0), np.float32)
    for low in (empty, 1.0):
        for high in (empty, 1.0):
            theirs = tf.clip_by_value(empty, low, high)
            agree(clip_by_value(empty, lower=low, upper=high), theirs, empty)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_by_value_gradient(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = np.array([1, 2, 3, 4], dtype)
        for low, high in ((0.5, 3.5), (np.full(4, 0.5, dtype), np.full(4, 3.5, dtype))):
            t = tf.constant(x)
            with tf.GradientTape() as tape:
                tape.watch(t)
                out = tf.clip_by_value(t, low, high)
            mine = jax.grad(
                lambda v, lo=low, hi=high: clip_by_value(v, lower=lo, upper=hi).sum()
            )
            agree(mine(jnp.asarray(x)), tape.gradient(out, t), [1, 1, 1, 0])


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (1.0, 2.0), (-2.0, -1.0)])
def test_by_value_of_slices(bounds):
    """What is stored is clipped, even where the bounds leave out zero."""
    stored = np.zeros((2, 2, 3), np.float32)
    stored[0, 0, 0], stored[0, 1, 0], stored[1, 0, 1], stored[1, 1, 2] = -3, 4, 2, -1
    slices = tf.IndexedSlices(
        tf.constant(stored), tf.constant([2, 6]), tf.constant([10, 2, 3])
    )
    theirs = tf.clip_by_value(slices, *bounds)
    mine = clip_by_value(
        rows(stored, [2, 6], (10, 2, 3)), lower=bounds[0], upper=bounds[1]
    )
    agree(mine.data, theirs.values, np.clip(stored, *bounds))


@pytest.mark.parametrize(
    ("x", "limit", "axes", "expected"),
    [
        (LONG, 4.0, None, [[-2.4, 0, 0], [3.2, 0, 0]]),
        (LONG, 6.0, None, LONG),
        (LONG * 0, 6.0, None, LONG * 0),
        (CORNER, 4.0, 0, [[-2.4, 0, 0], [3.2, 0, 3]]),
        (CORNER, 4.0, 1, [[-3, 0, 0], [3.2, 0, 2.4]]),
        (CORNER, 6.0, 1, CORNER),
    ],
)
def test_by_norm(x, limit, axes, expected):
    theirs = tf.clip_by_norm(x, limit, None if axes is None else [axes])
    for mine in both("clip_by_norm", axis=axes)(x, limit):
        agree(mine, theirs, expected)


def test_by_norm_gradient_at_zeros():
    t = tf.zeros([3])
    with tf.GradientTape() as tape:
        tape.watch(t)
        out = tf.clip_by_norm(t, 1.0)
    mine = jax.grad(lambda x: clip_by_norm(x, 1.0).sum())(jnp.zeros(3))
    agree(mine, tape.gradient(out, t), [1, 1, 1])


def test_by_norm_with_a_threshold_of_a_wrong_shape():
    x, limit = np.ones((2, 3, 1), np.float32), np.array([1, 2], np.float32)
    with pytest.raises(ValueError, match="are incompatible"):
        tf.clip_by_norm(x, limit)
    with pytest.raises(ValueError, match="does not broadcast"):
        clip_by_norm(x, limit)


@pytest.mark.parametrize("axes", [None, 1, 2, (1, 2), (0, 1, 2)])
def test_by_norm_of_slices(axes):
    """IndexedSlices, BCOO and their dense tensor are clipped alike."""
    stored = np.zeros((2, 2, 3), np.float32)
    stored[0, 0, 0], stored[0, 1, 0], stored[1, 0, 1], stored[1, 1, 2] = -3, 4, 2, -1
    slices = tf.IndexedSlices(
        tf.constant(stored), tf.constant([2, 6]), tf.constant([10, 2, 3])
    )
    given = list(axes) if isinstance(axes, tuple) else axes
    full = tf.clip_by_norm(tf.convert_to_tensor(slices), 4.0, given)
    theirs = tf.convert_to_tensor(tf.clip_by_norm(slices, 4.0, given))
    mine = clip_by_norm(rows(stored, [2, 6], (10, 2, 3)), 4.0, axis=axes)
    agree(mine.todense(), theirs, full)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(4.0, SMALLER_PAIR), (np.float32(4.0), SMALLER_PAIR), (6.0, PAIR)],
)
def test_by_global_norm(limit, expected):
    theirs, their_norm = tf.clip_by_global_norm(PAIR, limit)
    mine, norm = clip_by_global_norm(PAIR, limit)
    agree(norm, their_norm, 5.0)
    for a, b, c in zip(mine, theirs, expected, strict=True):
        agree(a, b, c)


def test_by_global_norm_of_zeros():
    zeros = [x * 0 for x in PAIR]
    theirs, their_norm = tf.clip_by_global_norm(zeros, 6.0)
    mine, norm = clip_by_global_norm(zeros, 6.0)
    agree(norm, their_norm, 0.0)
    for a, b, c in zip(mine, theirs, zeros, strict=True):
        agree(a, b, c)


def test_by_global_norm_keeps_none():
    tree = (PAIR[0], None, PAIR[1], None)
    theirs, their_norm = tf.clip_by_global_norm(tree, 4.0)
    mine, norm = clip_by_global_norm(tree, 4.0)
    agree(norm, their_norm, 5.0)
    assert mine[1] is mine[3] is theirs[1] is theirs[3] is None
    for i, expected in zip((0, 2), SMALLER_PAIR, strict=True):
        agree(mine[i], theirs[i], expected)


def test_by_global_norm_of_slices():
    """Their indices and dense shape are kept."""
    slices = tf.IndexedSlices(
        tf.constant(PAIR[1]), tf.constant([3, 4]), tf.constant([5])
    )
    theirs, their_norm = tf.clip_by_global_norm([PAIR[0], slices], 4.0)
    mat = rows(PAIR[1], [3, 4], (5,))
    mine, norm = clip_by_global_norm([PAIR[0], mat], 4.0)
    agree(norm, their_norm, 5.0)
    agree(mine[0], theirs[0], SMALLER_PAIR[0])
    agree(mine[1].data, theirs[1].values, SMALLER_PAIR[1])
    assert mine[1].shape == tuple(theirs[1].dense_shape.numpy())
    assert mine[1].indices[:, 0].tolist() == theirs[1].indices.numpy().tolist()


def test_by_global_norm_of_inf():
    """The norm is inf and everything NaN, to signal that an error occurred."""
    tree = (np.array([[-2, 0, np.inf], [4, 0, 0]], np.float32), PAIR[1])
    theirs, their_norm = tf.clip_by_global_norm(tree, 6.0)
    mine, norm = clip_by_global_norm(tree, 6.0)
    agree(norm, their_norm, np.inf)
    for a, b in zip(mine, theirs, strict=True):
        agree(a, b, np.full(a.shape, np.nan))


@pytest.mark.parametrize(
    ("x", "limit", "expected"),
    [
        (LONG, 0.8, [[-2.88, 0, 0], [3.84, 0, 0]]),
        (LONG, np.float32(0.8), [[-2.88, 0, 0], [3.84, 0, 0]]),
        (LONG, 0.9, LONG),
        (LONG * 0, 0.9, LONG * 0),
    ],
)
def test_by_average_norm(x, limit, expected):
    theirs = tf.compat.v1.clip_by_average_norm(x, limit)
    agree(clip_by_average_norm(x, limit), theirs, expected)
    agree(clip_by_norm(x, limit * x.size), theirs, expected)
