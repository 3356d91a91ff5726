"""Where optclip differs on purpose: both are run, and what each gives is asserted.

The tables hold what thresholds and gradients of odd values give: the result as numbers,
or the error. What takes more than a line is in `test_differences_of_kind.py`.
"""

import numpy as np
import optax
import pytest

import optclip

from .libraries import load

tf = load("tensorflow")
keras = load("keras")
torch = load("torch")

INF, NAN = np.inf, np.nan
X, ZEROS = [np.float32([3, 4])], [np.float32([0, 0])]
BAD = [np.float32([INF, 4]), np.float32([1])]
LARGE, SMALL = [np.float32([3e30, 4e30])], [np.float32([3e-30, 4e-30])]
HALF = [np.float16([300, 400])]
SIGNS = [np.float32([-3, 0.5, 3])]
UNIT = [0.6, 0.8]


def each(function):
    """One tensor at a time."""
    return lambda leaves, limit: [function(x, limit) for x in leaves]


def in_torch(function):
    """On the gradients of parameters, in place."""

    def clip(leaves, limit):
        params = [torch.nn.Parameter(torch.tensor(x * 0)) for x in leaves]
        for param, x in zip(params, leaves, strict=True):
            param.grad = torch.tensor(x)
        function(params, limit)
        return [param.grad.numpy() for param in params]

    return clip


def in_optax(make):
    def clip(leaves, limit):
        tx = make(limit)
        return tx.update(leaves, tx.init(leaves))[0]

    return clip


def in_keras(name):
    """One step of SGD from zero at a rate of 1."""

    def clip(leaves, limit):
        variables = [keras.Variable(x * 0, dtype=str(x.dtype)) for x in leaves]
        optimizer = keras.optimizers.SGD(1.0, **{name: limit})
        optimizer.apply([tf.constant(x) for x in leaves], variables)
        return [-v.numpy() for v in variables]

    return clip


VALUE, NORM = in_optax(optclip.clip_by_value), in_optax(optclip.clip_by_norm)
GLOBAL, RMS = in_optax(optclip.clip_by_global_norm), in_optax(optclip.clip_by_rms)
AVERAGE = in_optax(optclip.clip_by_average_norm)

# Each clip of theirs, and ours.
CLIPS = {
    "tf value": (each(lambda x, c: tf.clip_by_value(x, -c, c)), VALUE),
    "tf norm": (each(tf.clip_by_norm), NORM),
    "tf global": (lambda leaves, c: tf.clip_by_global_norm(leaves, c)[0], GLOBAL),
    "tf average": (each(tf.compat.v1.clip_by_average_norm), AVERAGE),
    "keras norm": (in_keras("clipnorm"), NORM),
    "keras global": (in_keras("global_clipnorm"), GLOBAL),
    "keras value": (in_keras("clipvalue"), VALUE),
    "torch norm": (in_torch(torch.nn.utils.clip_grad_norm_), GLOBAL),
    "torch value": (in_torch(torch.nn.utils.clip_grad_value_), VALUE),
    "optax norm": (in_optax(optax.clip_by_global_norm), GLOBAL),
    "optax value": (in_optax(optax.clip), VALUE),
    "optax rms": (in_optax(optax.clip_by_block_rms), RMS),
}

# clip, gradients, threshold, what the library gives, what ours gives.
THRESHOLDS = [
    # Negative: ours raises. (One that is traced counts as 0.)
    ("tf norm", X, -1.0, [0, 0], ValueError),
    ("tf global", X, -1.0, [3, 4], ValueError),
    ("tf average", X, -1.0, [3, 4], ValueError),
    ("tf value", SIGNS, -1.0, [1, 1, 1], ValueError),
    ("keras norm", X, -1.0, [3, 4], ValueError),
    ("keras global", X, -1.0, [3, 4], ValueError),
    ("keras value", X, -1.0, [3, 4], ValueError),
    ("torch norm", X, -1.0, [-0.6, -0.8], ValueError),
    ("torch value", SIGNS, -1.0, [-1, -1, -1], ValueError),
    ("optax norm", X, -1.0, [-0.6, -0.8], ValueError),
    ("optax rms", X, -1.0, [3, 4], ValueError),
    ("optax value", SIGNS, -1.0, [-1, -1, -1], ValueError),
    # NaN: ours raises.
    ("tf norm", X, NAN, [NAN, NAN], ValueError),
    ("tf global", X, NAN, [NAN, NAN], ValueError),
    ("tf value", X, NAN, [NAN, NAN], ValueError),
    ("keras norm", X, NAN, [3, 4], ValueError),
    ("torch norm", X, NAN, [NAN, NAN], ValueError),
    ("optax norm", X, NAN, [NAN, NAN], ValueError),
    # 0: ours clips to zero, zeros too; for Keras it is no clip.
    ("keras norm", X, 0.0, [3, 4], [0, 0]),
    ("keras global", X, 0.0, [3, 4], [0, 0]),
    ("keras value", X, 0.0, [3, 4], [0, 0]),
    ("tf norm", ZEROS, 0.0, [NAN, NAN], [0, 0]),
    ("optax norm", ZEROS, 0.0, [NAN, NAN], [0, 0]),
    ("optax rms", ZEROS, 0.0, [NAN, NAN], [0, 0]),
    # inf: ours touches nothing, whatever the gradients hold.
    ("tf norm", X, INF, [NAN, NAN], [3, 4]),
    ("tf global", X, INF, [NAN, NAN], [3, 4]),
    ("tf average", X, INF, [NAN, NAN], [3, 4]),
    ("keras norm", X, INF, [NAN, NAN], [3, 4]),
    ("keras global", X, INF, [NAN, NAN], [3, 4]),
    ("torch norm", BAD, INF, [NAN, NAN, NAN], [INF, 4, 1]),
    ("optax norm", BAD, INF, [NAN, NAN, NAN], [INF, 4, 1]),
    ("optax rms", BAD, INF, [NAN, NAN, 1], [INF, 4, 1]),
]

GRADIENTS = [
    # inf: ours makes all that share the norm NaN, as TensorFlow's global norm does.
    ("tf norm", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    ("tf average", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    ("keras norm", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    ("torch norm", BAD, 1.0, [NAN, 0, 0], [NAN, NAN, NAN]),
    ("optax norm", BAD, 1.0, [NAN, 0, 0], [NAN, NAN, NAN]),
    ("optax rms", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    # Large: the sum of squares overflows for them, and the gradients are lost.
    ("tf norm", LARGE, 1.0, [0, 0], UNIT),
    ("tf global", LARGE, 1.0, [NAN, NAN], UNIT),
    ("tf average", LARGE, 0.5, [0, 0], UNIT),
    ("keras norm", LARGE, 1.0, [0, 0], UNIT),
    ("keras global", LARGE, 1.0, [NAN, NAN], UNIT),
    ("torch norm", LARGE, 1.0, [0, 0], UNIT),
    ("optax norm", LARGE, 1.0, [0, 0], UNIT),
    ("optax rms", LARGE, 0.5**0.5, [0, 0], UNIT),
    # float16: already at 256.
    ("tf norm", HALF, 1.0, [0, 0], UNIT),
    ("tf global", HALF, 1.0, [NAN, NAN], UNIT),
    ("keras norm", HALF, 1.0, [0, 0], UNIT),
    ("keras global", HALF, 1.0, [NAN, NAN], UNIT),
    ("optax norm", HALF, 1.0, [0, 0], UNIT),
    ("optax rms", HALF, np.float16(0.5**0.5), [0, 0], UNIT),
    ("torch norm", [np.float16([6e4] * 4)], 1.0, [0] * 4, [0.5] * 4),
    # Small: the sum of squares vanishes, and the clip with it.
    ("tf global", SMALL, 1e-30, [3e-30, 4e-30], [0.0, 0.0]),
    ("optax norm", SMALL, 1e-30, [3e-30, 4e-30], [0.0, 0.0]),
    # PyTorch's 1e-6, in every norm: it is far too much here; ours is `eps=1e-6`.
    ("torch norm", [X[0] * 1e-9], 1e-9, [2.985e-12, 3.98e-12], [6e-10, 8e-10]),
]


def check(result, expected, rtol):
    if isinstance(expected, type):
        with pytest.raises(expected):
            result()
        return
    found = np.concatenate([np.asarray(x, np.float64).ravel() for x in result()])
    np.testing.assert_allclose(found, expected, rtol=rtol)


def named(row):
    return f"{row[0]}, {row[1][0]} at {row[2]}"


@pytest.mark.parametrize("row", [*THRESHOLDS, *GRADIENTS], ids=named)
def test_table(row):
    name, leaves, limit, their_result, our_result = row
    theirs, mine = CLIPS[name]
    rtol = 1e-3 if leaves[0].dtype == np.float16 or limit == 1e-9 else 5e-7
    with np.errstate(all="ignore"):
        check(lambda: theirs(leaves, limit), their_result, rtol)
        check(lambda: mine(leaves, limit), our_result, rtol)
