"""Port training loops: code of TensorFlow's texts and the same loop with optclip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from tests.integration.examples.test_pages import names_of

from .clips import keras, tensor, tf, torch

STEPS = 5
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(scale=40, size=(16, 2)).astype(np.float32)
IDS = np.array([0, 2])
# The last is used by no loss: its gradient is None in TensorFlow and zero in JAX.
START = [np.ones((3, 2), np.float32), np.zeros(2, np.float32), np.ones(2, np.float32)]
GD = tf.compat.v1.train.GradientDescentOptimizer


def tf_loss(kernel, bias, *unused):
    return tf.reduce_mean((X @ kernel + bias - Y) ** 2)


def tf_embedding_loss(kernel, bias, *unused):
    """Return a loss whose gradient for the kernel is an `IndexedSlices`."""
    return tf.reduce_sum((tf.gather(kernel, IDS) + bias - 20.0) ** 2)


def loss(params):
    return jnp.mean((X @ params[0] + params[1] - Y) ** 2)


def embedding_loss(params):
    return jnp.sum((params[0][IDS] + params[1] - 20.0) ** 2)


def tape(clip, optimizer, loss_of=tf_loss, count=2):
    """Train with a `GradientTape`, as in TensorFlow 2."""

    def train():
        variables = [tf.Variable(x) for x in START[:count]]
        apply = optimizer()
        for _ in range(STEPS):
            with tf.GradientTape() as tape:
                value = loss_of(*variables)
            grads = clip(tape.gradient(value, variables))
            apply.apply_gradients(zip(grads, variables, strict=True))
        return variables

    return train


def compute_apply(clip_pairs, count=2):
    """Train with `compute_gradients` and `apply_gradients`, as in TensorFlow 1."""

    def train():
        variables = [tf.Variable(x) for x in START[:count]]
        optimizer = GD(0.1)
        for _ in range(STEPS):
            pairs = optimizer.compute_gradients(lambda: tf_loss(*variables), variables)
            optimizer.apply_gradients(clip_pairs(pairs))
        return variables

    return train


def compiled(optimizer):
    """Train with `model.compile` and `model.fit`."""

    def train():
        layer = keras.layers.Dense(2, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile(optimizer=optimizer(), loss="mse")
        model.fit(X, Y, batch_size=16, epochs=STEPS, verbose=0)
        return model.trainable_variables

    return train


def ours(tx, loss_of=loss):
    params = [jnp.asarray(x) for x in START]
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def per_gradient(function):
    """Return a transformation that applies a function to all gradients."""
    return optax.stateless(lambda grads, params: function(grads))


def global_pairs(pairs):
    grads, variables = zip(*pairs, strict=True)
    grads, _ = tf.clip_by_global_norm(grads, 5.0)
    return zip(grads, variables, strict=True)


LOW, HIGH = np.float32([-1.0, -0.5]), np.float32([0.5, 2.0])
SGD, ADAM = optax.sgd(0.1), optax.adam(1.0)
# A few roundings of parameters of up to 8, since the order of float32 sums differs.
ROUNDING = 2e-6
# Keras adds eps=1e-7 before, and optax 1e-8 after the bias correction. Adam divides by
# the clipped size, so that clipping only shows at a high learning rate.
EPS = 1e-3


def sgd():
    return keras.optimizers.SGD(0.1)


def adam(**options):
    return lambda: keras.optimizers.Adam(1.0, **options)


LOOPS = {
    "tape, global norm, Adam": (
        tape(lambda grads: tf.clip_by_global_norm(grads, clip_norm=1.0)[0], adam()),
        (optclip.clip_by_global_norm(max_norm=1.0), ADAM),
        EPS,
    ),
    "tape, list of values": (
        tape(lambda grads: [tf.clip_by_value(g, -5.0, 5.0) for g in grads], sgd),
        (optclip.clip_by_value(5.0), SGD),
        ROUNDING,
    ),
    "compile, clipvalue": (
        compiled(lambda: keras.optimizers.SGD(0.1, clipvalue=1.0)),
        (optclip.clip_by_value(1.0), SGD),
        ROUNDING,
    ),
    "tape, list of norms": (
        tape(lambda grads: [tf.clip_by_norm(g, 5.0) for g in grads], sgd),
        (per_gradient(lambda grads: F.clip_by_norm(grads, 5.0)), SGD),
        ROUNDING,
    ),
    "compute, cap, apply": (
        compute_apply(lambda ps: [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in ps]),
        (optclip.clip_by_value(1.0), SGD),
        ROUNDING,
    ),
    "compile, Adam with clipvalue": (
        compiled(adam(clipvalue=1.0)),
        (optclip.clip_by_value(1.0), ADAM),
        EPS,
    ),
    "compute, global norm with None, apply": (
        compute_apply(global_pairs, count=3),
        (optclip.clip_by_global_norm(5.0), SGD),
        ROUNDING,
    ),
    "tape, None if None": (
        tape(lambda gs: [None if g is None else tf.clip_by_norm(g, 1.0) for g in gs], sgd, count=3),
        (optclip.clip_by_norm(1.0), SGD),
        ROUNDING,
    ),
    "tape, global norm": (
        tape(lambda grads: tf.clip_by_global_norm(grads, 5.0)[0], sgd),
        (optclip.clip_by_global_norm(5.0), SGD),
        ROUNDING,
    ),
    "tensor bounds": (
        tape(lambda grads: [tf.clip_by_value(g, LOW, HIGH) for g in grads], sgd),
        (optclip.clip_by_value(lower=[LOW, LOW, -1.0], upper=[HIGH, HIGH, 1.0]), SGD),
        ROUNDING,
    ),
    "axes": (
        tape(lambda grads: [tf.clip_by_norm(g, 1.0, axes=[0]) for g in grads], sgd),
        (optclip.clip_by_norm(1.0, axis=0), SGD),
        ROUNDING,
    ),
    "use_norm": (
        tape(lambda gs: tf.clip_by_global_norm(gs, 5.0, use_norm=tf.linalg.global_norm(gs))[0], sgd),
        (per_gradient(lambda gs: F.clip_by_global_norm(gs, 5.0, use_norm=F.global_norm(gs))[0]), SGD),
        ROUNDING,
    ),
    "average norm": (
        tape(lambda gs: [tf.compat.v1.clip_by_average_norm(g, 0.5) for g in gs], sgd),
        (optclip.clip_by_average_norm(0.5), SGD),
        ROUNDING,
    ),
    # An `IndexedSlices` in TensorFlow, which is dense in `jax.grad`.
    "embedding": (
        tape(lambda gs: tf.clip_by_global_norm(gs, 1.0)[0], sgd, tf_embedding_loss),
        (optclip.clip_by_global_norm(1.0), SGD),
        ROUNDING,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_training_loop_ends_with_parameters_of_tensorflow(name):
    train, (clip, optimizer), atol = LOOPS[name]
    loss_of = embedding_loss if name == "embedding" else loss
    params = ours(optax.chain(clip, optimizer), loss_of)
    for a, b in zip(params, train(), strict=False):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)
    unclipped = ours(optimizer, loss_of)
    assert np.max(np.abs(unclipped[0] - params[0])) > 10 * atol


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_unused_variable_decays_in_optax_only():
    """The page on migrating states it, with the mask that prevents it."""
    decay = {"weight_decay": 0.1}
    train = tape(lambda gs: gs, lambda: keras.optimizers.AdamW(0.1, **decay), count=3)
    used = [True, True, False]
    for tx, expected in (
        (optax.adamw(0.1, **decay), 0.99**STEPS),
        (optax.adamw(0.1, **decay, mask=used), 1.0),
    ):
        np.testing.assert_allclose(ours(tx)[2], [expected] * 2, rtol=1e-6)
    np.testing.assert_array_equal(train()[2], [1, 1])


TWICE = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), tf.constant([1, 1]))


@pytest.mark.parametrize(
    ("gradient", "options", "expected"),
    [
        (tf.constant([[1e-3]]), {}, 0.997),
        (tf.constant([[1e-4]]), {}, 0.97),
        (TWICE, {"clipnorm": 9.0}, 1.414),
        (TWICE, {"global_clipnorm": 9.0}, 1.0),
    ],
)
def test_first_step_of_keras_adam_differs_as_on_page(gradient, options, expected):
    """Those of `optax.adam` are 1, also after clipping."""
    variable = keras.Variable(np.zeros((1, 1), np.float32))
    keras.optimizers.Adam(1.0, **options).apply([gradient], [variable])
    np.testing.assert_allclose(-variable.numpy(), [[expected]], rtol=1e-3)


@pytest.mark.parametrize(
    ("word", "repeats", "limit"), [("constrain(", 1, 2.5), ("unsummed", 3, np.inf)]
)
def test_loop_of_page_ends_with_parameters_of_tape(word, repeats, limit):
    """The first block equals TensorFlow for unique ids, the second for repeated ids."""
    names, draw = names_of("migrating.md", word), np.random.default_rng(2)
    shapes = {"table": (20, 8), "kernel": (8, 16), "out": (16, 1)}
    params = {k: np.float32(draw.normal(size=shapes[k])) for k in shapes}
    ids = np.repeat(np.arange(18), repeats).reshape(-1, 6)
    y = np.float32(draw.normal(scale=9, size=(len(ids), 1)))
    variables = {k: tf.Variable(x) for k, x in params.items()}
    kernel, state = variables["kernel"], names["tx"].init(params)
    for _ in range(STEPS):
        params, state, *_ = names["step"](params, state, ids, y)
        with tf.GradientTape() as tape:
            x = tf.reduce_mean(tf.gather(variables["table"], ids), axis=1)
            x = tf.nn.relu(x @ kernel) @ variables["out"]
            value = tf.reduce_mean((x - y) ** 2)
        table, *grads = tape.gradient(value, [*variables.values()])
        grads, _ = tf.clip_by_global_norm([tf.clip_by_norm(table, 1.0), *grads], 1.5)
        sgd().apply_gradients(zip(grads, variables.values(), strict=True))
        kernel.assign(keras.constraints.MaxNorm(limit)(kernel))
    for key, variable in variables.items():
        np.testing.assert_allclose(params[key], variable, rtol=0, atol=2 * ROUNDING)


CLIP = optclip.clip_by_global_norm(1.0)
TENSORS = {
    "tf.constant": (lambda: tf.constant([3.0, 4.0]), "tf.convert_to_tensor"),
    "tf.Variable": (lambda: tf.Variable([3.0, 4.0]), "tf.convert_to_tensor"),
    "tf.IndexedSlices": (
        lambda: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2])),
        "tf.convert_to_tensor",
    ),
    "keras.Variable": (lambda: keras.Variable([3.0, 4.0]), "Pass its .value"),
    "torch.tensor": (lambda: tensor(np.float32([3, 4])), "jnp.from_dlpack"),
    "torch.nn.Parameter": (lambda: torch.nn.Parameter(torch.ones(2)), "jnp.from_dlpa"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_of_another_library_raises_with_conversion(name):
    make, words = TENSORS[name]
    for call in (
        lambda x: F.clip_by_norm(x, 1.0),
        lambda x: F.clip_by_value([x], 1.0),
        lambda x: F.clip_by_global_norm({"w": x}, 1.0),
        lambda x: F.global_norm(jnp.ones(2), mask=x),
        lambda x: optclip.clip_by_global_norm(x),
        lambda x: CLIP.update([x], CLIP.init([jnp.ones(2)])),
        lambda x: optclip.clip_by_norm(1.0).init([x]),
    ):
        with pytest.raises(TypeError, match=f"(?s)must be .* got .*{words}"):
            call(make())
