"""Test deliberate differences: dtypes, sparsity, arguments and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional, per_example

from .cases import BF16
from .clips import (
    CLIPS,
    dense,
    in_optax,
    keras,
    rows,
    tensor,
    tf,
    to_tf,
    torch,
    utils,
    with_grads,
)

X, WHOLE = np.float32([3, 4]), np.array([3, 4])
ONES = np.ones((2, 3, 1), np.float32)
Z = np.array([3j, 3 + 4j], np.complex64)
MIXED = [np.float16([3]), np.float32([4])]
LIMITS = np.float32([1, 2])
RAMP = np.float16([[1, 2, 3], [4, 5, 6]])
BROADCAST = [[2, 3, 4], [4, 5, 5]]
EXAMPLES = np.float32([[3, 4], [0, 0.5]])
# A duplicate row, which TensorFlow and Keras clip as two rows.
TWICE = rows(np.float32([[3], [4]]), [1, 1], (3, 1))
ROWS = rows(np.float32([[1], [2]]), [1, 2], (3, 1))
INVALID = tf.errors.InvalidArgumentError
RMS, RMS_LIMIT = in_optax(optax.clip_by_block_rms), 0.5**0.5
VALUE, NORM = in_optax(optax.clip), in_optax(optax.clip_by_global_norm)


def ours(name, leaf, limit):
    return CLIPS[name].transformation([leaf], limit)[0]


def of_torch(function, *args, **kwargs):
    """Return the first gradient after PyTorch has clipped it in place."""

    def call(leaf):
        (param,) = with_grads([leaf])
        function([param], *args, **kwargs)
        return param.grad

    return call


def of_keras(name):
    variable = keras.Variable(np.zeros((3, 1)), dtype="float32")
    keras.optimizers.SGD(1.0, **{name: 3.5}).apply([to_tf(TWICE)], [variable])
    return -variable.numpy()


def embedding_clipped(function):
    """Clip the sparse gradient of an embedding."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    function(table.parameters(), 1.0)


def torch_order(ord, x=X):
    return utils.get_total_norm([tensor(x)], norm_type=ord)


by_value = functional.clip_by_value
# Each case: the library's call and its result or error, optclip's call and its result or
# error.
CASES = {
    "integers, tf value": (
        lambda: tf.clip_by_value(WHOLE, -1, 1), [1, 1],
        lambda: ours("tf value", WHOLE, 1.0), WHOLE,
    ),
    "integers alone, tf value agrees": (
        lambda: tf.clip_by_value(WHOLE, -1, 1), [1, 1],
        lambda: by_value(WHOLE, -1, 1), [1, 1],
    ),
    "a list of numbers, tf norm": (
        lambda: tf.clip_by_norm([3.0, 4.0], 1.0), [0.6, 0.8],
        lambda: jnp.stack(functional.clip_by_norm([3.0, 4.0], 1.0)), [1, 1],
    ),
    "integers, optax value": (
        lambda: VALUE([WHOLE], 1), [[1, 1]], lambda: ours("optax value", WHOLE, 1.0), WHOLE
    ),
    "integers, optax rms": (
        lambda: RMS([jnp.asarray(WHOLE)], RMS_LIMIT), [[0.6, 0.8]],
        lambda: ours("optax rms", WHOLE, 1.0), WHOLE,
    ),
    "integers, tf norm": (
        lambda: tf.clip_by_norm(WHOLE, 1), INVALID, lambda: ours("tf norm", WHOLE, 1.0), WHOLE
    ),
    "integers without floats, tf norm agrees": (
        lambda: tf.clip_by_norm(WHOLE, 1), INVALID,
        lambda: functional.clip_by_norm(WHOLE, 1), TypeError,
    ),
    "integers, tf global": (
        lambda: tf.clip_by_global_norm([WHOLE], 1), INVALID,
        lambda: functional.global_norm([WHOLE, X]), 5.0,
    ),
    "integers, optax norm": (
        lambda: NORM([jnp.asarray(WHOLE)], 1.0), TypeError,
        lambda: ours("optax norm", WHOLE, 1.0), WHOLE,
    ),
    "complex, tf value": (
        lambda: tf.clip_by_value(Z, -1.0, 1.0), INVALID, lambda: by_value(Z, 1.0), Z / np.abs(Z)
    ),
    "complex, tf norm": (
        lambda: tf.clip_by_norm(Z, 1.0), INVALID,
        lambda: functional.clip_by_norm(Z, 1.0), Z / 34**0.5,
    ),
    "complex, tf global": (
        lambda: tf.clip_by_global_norm([Z], 1.0), INVALID,
        lambda: functional.clip_by_global_norm(Z, 1.0)[0], Z / 34**0.5,
    ),
    "complex, torch value": (
        lambda: of_torch(utils.clip_grad_value_, 1.0)(Z), NotImplementedError,
        lambda: ours("torch value", Z, 1.0), Z / np.abs(Z),
    ),
    "complex, torch norm agrees": (
        lambda: of_torch(utils.clip_grad_norm_, 1.0)(Z), Z / 34**0.5,
        lambda: ours("torch norm", Z, 1.0), Z / 34**0.5,
    ),
    "complex, optax value": (
        lambda: VALUE([Z], 1.0), ValueError, lambda: ours("optax value", Z, 1.0), Z / np.abs(Z)
    ),
    "several dtypes, tf global": (
        lambda: tf.clip_by_global_norm(MIXED, 1.0), INVALID,
        lambda: functional.clip_by_global_norm(MIXED, jnp.float32(1))[1], 5.0,
    ),
    "array threshold of another dtype, optax norm": (
        lambda: NORM([jnp.asarray(X, BF16)], jnp.float32(1)), TypeError,
        lambda: ours("optax norm", jnp.asarray(X, BF16), jnp.float32(5)), X,
    ),
    "bounds that cross": (
        lambda: tf.clip_by_value(X, 5.0, 1.0), [5, 5],
        lambda: by_value(X, lower=5.0, upper=1.0), ValueError,
    ),
    "bounds that broadcast agree": (
        lambda: tf.clip_by_value(RAMP, RAMP[0] + 1, RAMP[1, :2, None]), BROADCAST,
        lambda: by_value(RAMP, lower=RAMP[0] + 1, upper=RAMP[1, :2, None]), BROADCAST,
    ),
    "sum of clipped examples, optax agrees": (
        lambda: optax.per_example_global_norm_clip([jnp.asarray(EXAMPLES)], 1.0)[0][0],
        [0.6, 1.3], lambda: per_example.clipped_sum(EXAMPLES, 1.0, strict=False)[0], [0.6, 1.3],
    ),
    "bounds that cross, arrays agree": (
        lambda: tf.clip_by_value(X, np.float32([5, 0]), 1.0), [5, 1],
        lambda: by_value(X, lower=np.float32([5, 0]), upper=1.0), [5, 1],
    ),
    "a bound is NaN": (
        lambda: tf.clip_by_value(X, np.nan, 1.0), [np.nan, np.nan],
        lambda: optclip.clip_by_value(lower=np.nan, upper=1.0), ValueError,
    ),
    "bounds of another shape": (
        lambda: tf.clip_by_value(ONES, -LIMITS, LIMITS), ValueError,
        lambda: by_value(ONES, lower=-LIMITS, upper=LIMITS), ValueError,
    ),
    "threshold of another shape": (
        lambda: tf.clip_by_norm(ONES, LIMITS), ValueError,
        lambda: functional.clip_by_norm(ONES, LIMITS), ValueError,
    ),
    "global threshold with a shape": (
        lambda: tf.clip_by_global_norm([X], tf.constant(LIMITS))[0][0], [0.6, 1.6],
        lambda: functional.clip_by_global_norm(X, LIMITS), ValueError,
    ),
    "an axis too large": (
        lambda: tf.clip_by_norm(ONES, 1.0, [3]), INVALID,
        lambda: functional.clip_by_norm(ONES, 1.0, axis=3), ValueError,
    ),
    "an axis twice": (
        lambda: tf.clip_by_norm(ONES, 1.0, [1, 1]), INVALID,
        lambda: functional.clip_by_norm(ONES, 1.0, axis=(1, 1)), ValueError,
    ),
    "a precomputed norm below 0, tf": (
        lambda: tf.clip_by_global_norm([X], 1.0, use_norm=tf.constant(-10.0))[0][0], -X / 10,
        lambda: functional.clip_by_global_norm(X, 1.0, use_norm=-10.0), ValueError,
    ),
    "order 0": (
        lambda: torch_order(0), 1.0, lambda: functional.global_norm(X, ord=0), ValueError
    ),
    "order -inf": (
        lambda: torch_order(-np.inf), 3.0,
        lambda: functional.global_norm(X, ord=-np.inf), ValueError,
    ),
    "order -1": (
        lambda: torch_order(-1), 12 / 7, lambda: functional.global_norm(X, ord=-1), ValueError
    ),
    "order inf of an empty leaf": (
        lambda: torch_order(np.inf, X[:0]), RuntimeError,
        lambda: functional.global_norm(X[:0], ord=np.inf), 0.0,
    ),
    "two clips": (
        lambda: keras.optimizers.SGD(1.0, clipnorm=1.0, clipvalue=0.7), ValueError,
        lambda: in_optax(
            lambda c: optax.chain(optclip.clip_by_norm(1.0), optclip.clip_by_value(c))
        )([X], 0.7), [[0.6, 0.7]],
    ),
    "a row twice, norm": (
        lambda: tf.linalg.global_norm([to_tf(TWICE)]), 5.0,
        lambda: functional.global_norm(TWICE), 7.0,
    ),
    "a row twice, tf value": (
        lambda: tf.clip_by_value(to_tf(TWICE), -3.5, 3.5), [[0], [6.5], [0]],
        lambda: by_value(TWICE, 3.5), [[0], [3.5], [0]],
    ),
    "a row twice, tf norm": (
        lambda: tf.clip_by_norm(to_tf(TWICE), 3.5), [[0], [4.9], [0]],
        lambda: functional.clip_by_norm(TWICE, 3.5), [[0], [3.5], [0]],
    ),
    **{
        f"a row twice, keras {name}": (
            lambda name=name: of_keras(name), [[0], [left], [0]],
            lambda clip=clip: ours(clip, TWICE, 3.5), [[0], [3.5], [0]],
        )
        for name, left, clip in (
            ("clipnorm", 4.9, "keras norm"), ("global_clipnorm", 4.9, "keras global"),
            ("clipvalue", 6.5, "keras value"),
        )
    },
    "sparse rows, bounds that are arrays": (
        lambda: tf.clip_by_value(to_tf(ROWS), -1.0, np.float32([[0.5], [1]])),
        [[0], [0.5], [1]],
        lambda: by_value(ROWS, lower=-1.0, upper=np.float32([[0.5], [1]])), ValueError,
    ),
    "sparse rows, optax": (
        lambda: NORM([ROWS], 1.0), TypeError,
        lambda: ours("optax norm", ROWS, 0.2 * 5**0.5), [[0], [0.2], [0.4]],
    ),
    "sparse rows, torch norm": (
        lambda: embedding_clipped(utils.clip_grad_norm_), NotImplementedError,
        lambda: ours("torch norm", ROWS, 0.2 * 5**0.5), [[0], [0.2], [0.4]],
    ),
    "sparse rows, torch value": (
        lambda: embedding_clipped(utils.clip_grad_value_), NotImplementedError,
        lambda: ours("torch value", ROWS, 1.5), [[0], [1], [1.5]],
    ),
}  # fmt: skip


def check(call, expected):
    if isinstance(expected, type):
        with pytest.raises(expected):
            call()
        return
    result = jax.tree.map(dense, call(), is_leaf=lambda x: isinstance(x, BCOO))
    if hasattr(result, "resolve_conj"):
        result = result.numpy()
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_difference_gives_both_results(case):
    theirs, their_result, our, our_result = CASES[case]
    check(theirs, their_result)
    check(our, our_result)


def test_average_norm_of_sparse_leaf_stays_sparse():
    theirs = tf.compat.v1.clip_by_average_norm(to_tf(ROWS), 0.1)
    result = functional.clip_by_average_norm(ROWS, 0.1)
    assert isinstance(theirs, tf.Tensor)
    assert isinstance(result, BCOO)
    np.testing.assert_allclose(result.todense(), theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "x", "limit"),
    [
        *(
            (name, 0.1 * np.arange(1, 6), 41.0)
            for name in ("tf norm", "tf global", "tf average")
        ),
        ("torch norm", X, 5.0),
        *(
            (name, [3e-40, -4e-40], 1.0)
            for name in ("tf norm", "tf global", "optax rms")
        ),
    ],
)
def test_leaf_inside_threshold_is_bit_identical(name, x, limit):
    """PyTorch and TensorFlow round; TensorFlow and optax flush subnormal numbers."""
    leaf = np.float32(x)
    assert np.any(np.asarray(CLIPS[name].theirs([leaf], limit)[0]) != leaf)
    assert np.asarray(ours(name, leaf, limit)).tobytes() == leaf.tobytes()


def test_derivatives_at_zero_are_finite():
    """In optclip they are 0 for the norm and the identity for clipping."""
    zeros = tf.zeros(2)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(zeros)
        by_norm = tf.clip_by_norm(zeros, 1.0)
        results = [
            tf.linalg.global_norm([zeros]), CLIPS["tf global"].theirs([zeros], 1.0)[0]
        ]  # fmt: skip
    assert np.all(np.isnan([tape.gradient(y, zeros) for y in results]))
    np.testing.assert_array_equal(tape.gradient(by_norm, zeros), [1, 1])

    def slope(function):
        return jax.grad(lambda x: jnp.sum(function(x)))(jnp.zeros(2))

    assert np.all(np.isnan(slope(lambda x: NORM([x], 1.0)[0])))
    np.testing.assert_array_equal(slope(functional.global_norm), [0, 0])
    for name in ("tf global", "tf norm"):
        np.testing.assert_array_equal(slope(lambda x, n=name: ours(n, x, 1.0)), [1, 1])
