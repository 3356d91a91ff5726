"""Where optclip differs on purpose, beyond numbers: dtypes, sparsity, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional

from .cases import BF16, wide
from .libraries import load
from .ours import rows

tf = load("tensorflow")
keras = load("keras")
torch = load("torch")

X = np.float32([3, 4])
REFUSED = tf.errors.InvalidArgumentError


def updated(tx, updates):
    return tx.update(updates, tx.init(updates))[0]


def equal(found, expected, rtol=5e-7):
    kind = np.complex128 if np.iscomplexobj(found) else np.float64
    found = np.asarray(found).astype(kind)
    np.testing.assert_allclose(found, np.asarray(expected), rtol=rtol)


def test_integers():
    """Theirs clip them, turn them into floats, or refuse; ours pass, and count not."""
    whole = np.array([3, 4])
    equal(tf.clip_by_value(whole, -1, 1), [1, 1])
    equal(updated(optax.clip(1), jnp.asarray(whole)), [1, 1])
    equal(updated(optax.clip_by_block_rms(0.5**0.5), jnp.asarray(whole)), [0.6, 0.8])
    for refused in (tf.clip_by_norm, lambda x, c: tf.clip_by_global_norm([x], c)):
        with pytest.raises(REFUSED):
            refused(whole, 1)
    with pytest.raises(TypeError):
        updated(optax.clip_by_global_norm(1.0), jnp.asarray(whole))
    tree = {"step": whole, "w": X}
    for clip in (
        optclip.clip_by_value,
        optclip.clip_by_rms,
        optclip.clip_by_global_norm,
    ):
        passed = updated(clip(1.0), tree)["step"]
        assert passed.dtype == whole.dtype
        equal(passed, whole)
    assert functional.global_norm(tree) == 5.0


def test_complex_numbers():
    """Theirs refuse them, all but two; ours clip by the modulus."""
    z = np.array([3j, 3 + 4j], np.complex64)
    unit = z / np.abs(z)
    for refused in (
        lambda: tf.clip_by_value(z, -1.0, 1.0),
        lambda: tf.clip_by_norm(z, 1.0),
        lambda: tf.clip_by_global_norm([z], 1.0),
    ):
        with pytest.raises(REFUSED):
            refused()
    param = torch.nn.Parameter(torch.tensor(z))
    param.grad = torch.tensor(z)
    with pytest.raises(NotImplementedError):
        torch.nn.utils.clip_grad_value_([param], 1.0)
    with pytest.raises(ValueError, match="complex"):
        updated(optax.clip(1.0), z)
    equal(functional.clip_by_value(z, lower=-1.0, upper=1.0), unit)
    norm = np.sqrt(34)
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    for found in (
        param.grad,
        updated(optax.clip_by_global_norm(1.0), jnp.asarray(z)),
        functional.clip_by_norm(z, 1.0),
        functional.clip_by_global_norm(z, 1.0)[0],
    ):
        equal(found, z / norm)


def test_leaves_of_several_dtypes():
    """TensorFlow refuses them together, optax a threshold that is an array."""
    mixed = [np.float16([3]), np.float32([4])]
    with pytest.raises(REFUSED, match="cannot compute Pack"):
        tf.clip_by_global_norm(mixed, 1.0)
    half = jnp.array([3, 4], BF16)
    with pytest.raises(TypeError, match="same dtypes"):
        updated(optax.clip_by_global_norm(jnp.float32(1)), half)
    clipped, norm = functional.clip_by_global_norm(mixed, jnp.float32(1))
    assert [x.dtype for x in clipped] == [np.float16, np.float32]
    assert norm == 5.0
    assert updated(optclip.clip_by_global_norm(jnp.float32(1)), half).dtype == BF16


def test_the_norm_of_a_half():
    """Theirs is rounded to the dtype of the leaves, ours is float32."""
    x = np.full(1000, 0.01).astype(BF16)
    true = np.sqrt(np.sum(wide(x) ** 2))
    grad = torch.tensor(wide(x)).bfloat16()
    for theirs in (
        tf.linalg.global_norm([x]),
        torch.nn.utils.get_total_norm([grad]),
        optax.tree.norm(jnp.asarray(x)),
    ):
        assert "bfloat16" in str(theirs.dtype)
        assert abs(float(theirs) - true) > 1e-4 * true
    ours = functional.global_norm(x)
    assert ours.dtype == np.float32
    assert abs(float(ours) - true) < 1e-6 * true


def test_weak_types():
    """Optax makes a weak-typed update strong, ours keeps it."""
    weak = jnp.asarray(3.0)
    assert weak.weak_type
    assert not updated(optax.clip_by_global_norm(1.0), weak).weak_type
    assert updated(optclip.clip_by_global_norm(1.0), weak).weak_type


def test_inside_the_threshold():
    """PyTorch and TensorFlow multiply all the same, and round; ours keeps every bit."""
    x = np.float32(0.1 * np.arange(1, 6))
    assert np.any(tf.clip_by_norm(x, 41.0).numpy() != x)
    assert np.any(tf.clip_by_global_norm([x], 41.0)[0][0].numpy() != x)
    assert np.any(tf.compat.v1.clip_by_average_norm(x, 41.0).numpy() != x)
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor(X)
    torch.nn.utils.clip_grad_norm_([param], 5.0)
    assert torch.any(param.grad != torch.tensor(X))
    for clip in (optclip.clip_by_norm, optclip.clip_by_average_norm):
        assert np.all(updated(clip(41.0), x) == x)
    for limit, leaf in ((41.0, x), (5.0, X)):
        assert np.all(updated(optclip.clip_by_global_norm(limit), leaf) == leaf)


def test_subnormal_numbers_inside_the_threshold():
    """TensorFlow and optax flush them to zero, ours keeps them."""
    x = np.float32([3e-40, -4e-40])
    for theirs in (
        tf.clip_by_norm(x, 1.0),
        tf.clip_by_global_norm([x], 1.0)[0][0],
        updated(optax.clip_by_block_rms(1.0), x),
    ):
        assert np.all(np.asarray(theirs) == 0)
    for clip in (
        optclip.clip_by_norm,
        optclip.clip_by_global_norm,
        optclip.clip_by_rms,
    ):
        assert np.array_equal(np.asarray(updated(clip(1.0), x)).view(int), x.view(int))


# Two entries of one row: TensorFlow and Keras look at what is stored.
STORED, INDEX = np.float32([[3], [4]]), [1, 1]
SLICES = tf.IndexedSlices(tf.constant(STORED), tf.constant(INDEX), tf.constant([3, 1]))


def test_duplicate_rows():
    """A row given twice is its sum, 7: that is its norm, and what the clip leaves."""
    mat = rows(STORED, INDEX, (3, 1))
    assert tf.linalg.global_norm([SLICES]) == 5.0
    assert functional.global_norm(mat) == 7.0
    their_value = tf.convert_to_tensor(tf.clip_by_value(SLICES, -3.5, 3.5))
    equal(their_value, [[0], [6.5], [0]])
    equal(
        functional.clip_by_value(mat, lower=-3.5, upper=3.5).todense(),
        [[0], [3.5], [0]],
    )
    their_norm = tf.convert_to_tensor(tf.clip_by_norm(SLICES, 3.5))
    equal(their_norm, [[0], [4.9], [0]])
    equal(functional.clip_by_norm(mat, 3.5).todense(), [[0], [3.5], [0]])


@pytest.mark.parametrize(
    ("name", "left"), [("clipnorm", 4.9), ("global_clipnorm", 4.9), ("clipvalue", 6.5)]
)
def test_duplicate_rows_in_keras(name, left):
    variable = keras.Variable(np.zeros((3, 1)), dtype="float32")
    keras.optimizers.SGD(1.0, **{name: 3.5}).apply([SLICES], [variable])
    equal(variable.numpy(), [[0], [-left], [0]])


def test_bounds_of_a_sparse_leaf():
    """TensorFlow's broadcast to what is stored; ours are numbers."""
    index, stored, dense = [1, 2], np.float32([[1], [2]]), np.float32([[9], [1], [2]])
    slices = tf.IndexedSlices(
        tf.constant(STORED), tf.constant(index), tf.constant([3, 1])
    )
    mat = rows(STORED, index, (3, 1))
    equal(tf.clip_by_value(slices, -1.0, stored).values, stored)
    with pytest.raises(REFUSED, match="Incompatible shapes"):
        tf.clip_by_value(slices, -1.0, dense)
    for bound in (stored, dense):
        with pytest.raises(ValueError, match="a BCOO matrix, got an array of shape"):
            functional.clip_by_value(mat, lower=-1.0, upper=bound)


def test_sparse_leaves_elsewhere():
    """TensorFlow's average norm makes them dense; PyTorch and optax refuse."""
    index, shape = [0, 2], (10, 1)
    slices = tf.IndexedSlices(
        tf.constant(STORED), tf.constant(index), tf.constant(shape)
    )
    theirs = tf.compat.v1.clip_by_average_norm(slices, 0.1)
    mat = rows(STORED, index, shape)
    ours = functional.clip_by_average_norm(mat, 0.1)
    assert isinstance(theirs, tf.Tensor)
    assert isinstance(ours, BCOO)
    equal(ours.todense(), theirs)
    with pytest.raises(TypeError):
        updated(optax.clip_by_global_norm(1.0), mat)
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(NotImplementedError):
            clip(table.parameters(), 1.0)


def test_derivatives_at_zero():
    """NaN in theirs; in ours 0 for the norm, the identity for the clip."""
    zeros = tf.zeros(2)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(zeros)
        norm = tf.linalg.global_norm([zeros])
        clipped = tf.clip_by_global_norm([zeros], 1.0)[0][0]
    theirs = [tape.gradient(y, zeros) for y in (norm, clipped)]
    tx = optax.clip_by_global_norm(1.0)
    theirs.append(jax.grad(lambda x: updated(tx, x).sum())(jnp.zeros(2)))
    for found in theirs:
        assert np.all(np.isnan(found))
    equal(jax.grad(functional.global_norm)(jnp.zeros(2)), [0, 0])
    tx = optclip.clip_by_global_norm(1.0)
    equal(jax.grad(lambda x: updated(tx, x).sum())(jnp.zeros(2)), [1, 1])


def test_bounds_that_cross_or_are_nan():
    """TensorFlow takes them; ours refuses what is surely a mistake."""
    equal(tf.clip_by_value(X, 5.0, 1.0), [5, 5])
    equal(tf.clip_by_value(X, np.nan, 1.0), [np.nan, np.nan])
    for lower, problem in ((5.0, "at most `upper`"), (np.nan, "not NaN")):
        with pytest.raises(ValueError, match=problem):
            functional.clip_by_value(X, lower=lower, upper=1.0)
        with pytest.raises(ValueError, match=problem):
            optclip.clip_by_value(lower=lower, upper=1.0)
    equal(
        functional.clip_by_value(X, lower=np.float32(5.0) * np.ones(2), upper=1.0),
        [5, 5],
    )


@pytest.mark.parametrize(("ord", "norm"), [(0, 1.0), (-np.inf, 3.0), (-1, 12 / 7)])
def test_orders_that_are_no_norm(ord, norm):
    """PyTorch computes them; ours takes p > 0."""
    found = torch.nn.utils.get_total_norm([torch.tensor(X)], norm_type=ord)
    equal(found, norm)
    with pytest.raises(ValueError, match="above 0"):
        functional.global_norm(X, ord=ord)


def test_the_largest_of_nothing():
    """PyTorch refuses an empty gradient for order inf; ours has norm 0."""
    with pytest.raises(RuntimeError, match="empty tensor"):
        torch.nn.utils.get_total_norm([torch.zeros(0)], norm_type=np.inf)
    assert functional.global_norm([np.zeros(0, np.float32)], ord=np.inf) == 0.0


def test_a_given_norm_that_is_none():
    """TensorFlow flips the sign at a negative one; ours refuses."""
    theirs, _ = tf.clip_by_global_norm([X], 1.0, use_norm=tf.constant(-10.0))
    equal(theirs[0], -X / 10)
    with pytest.raises(ValueError, match="0 or more"):
        functional.clip_by_global_norm(X, 1.0, use_norm=-10.0)


def test_a_global_threshold_with_a_shape():
    """TensorFlow broadcasts it over the leaves; ours is a scalar."""
    limit = np.float32([1, 2])
    equal(tf.clip_by_global_norm([X], tf.constant(limit))[0][0], [0.6, 1.6])
    with pytest.raises(ValueError, match="does not broadcast"):
        functional.clip_by_global_norm(X, limit)


def test_axes_that_are_none():
    """An InvalidArgumentError there, a ValueError here."""
    x = np.ones((2, 3), np.float32)
    for axes in ([2], [1, 1]):
        with pytest.raises(REFUSED):
            tf.clip_by_norm(x, 1.0, axes)
        with pytest.raises(ValueError, match="`axis` must"):
            functional.clip_by_norm(x, 1.0, axis=tuple(axes))


def test_two_clips_at_once():
    """Keras takes one; ours are chained."""
    with pytest.raises(ValueError, match="Only one of"):
        keras.optimizers.SGD(1.0, clipnorm=1.0, clipvalue=0.7)
    tx = optax.chain(optclip.clip_by_norm(1.0), optclip.clip_by_value(0.7))
    equal(updated(tx, X), [0.6, 0.7])
