"""Define losses of one example: of a model, and with unusual uses of parameters.

`cnn()` returns a loss, its parameters and a batch, in float32. They are scaled like a
model at the start of training, so that float32 suffices for the gradient.
`PLACES[name]` is a loss that takes `PLACE_PARAMS` and one of `PLACE_EXAMPLES`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH = 5


def cnn():
    """Build a CNN with groups, dilation, strides, and channels first and last."""

    def convolve(x, w, spec, **how):
        return lax.conv_general_dilated(
            x, w, padding="SAME", dimension_numbers=spec, **how
        )

    def loss(p, example):
        x, label = example
        spec = ("NHWC", "HWIO", "NHWC")
        x = jnp.tanh(convolve(x[None], p["first"], spec, window_strides=(1, 1)))
        x = convolve(
            x, p["grouped"], spec, window_strides=(2, 2), rhs_dilation=(2, 2),
            feature_group_count=4,
        )  # fmt: skip
        x = jnp.tanh(x + p["bias"]).transpose(0, 3, 1, 2)
        x = convolve(x, p["last"], ("NCHW", "OIHW", "NCHW"), window_strides=(1, 1))
        return -jax.nn.log_softmax(x.mean((0, 2, 3)))[label]

    p = {
        "first": normal(3, 3, 3, 8) / 5,
        "grouped": normal(3, 3, 2, 48) / 3,
        "bias": normal(48),
        "last": normal(4, 48, 1, 1, seed=1),
    }
    labels = np.arange(BATCH, dtype=np.int32) % 4
    return loss, p, (2 * normal(BATCH, 5, 5, 3, seed=2), labels)


N = 4


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed + len(shape))
    return (rng.normal(size=shape) / 2).astype(np.float32)


PLACE_PARAMS = {"w": normal(N, N), "v": normal(N), "s": normal(2, N, N)}
PLACE_EXAMPLES = normal(2, 3, N, seed=5)


def callback(p, x):
    jax.debug.callback(lambda w: None, p["w"])
    return jnp.sum(x @ p["w"])


def reference(p, x):
    ref = jax.new_ref(p["w"])
    ref[...] = ref[...] * x.sum()
    return jnp.sum(jnp.tanh(x @ ref[...]))


def index(p, x):
    """Use parameters in operations with integer results, which are no sites."""
    chosen = jnp.argmax(x[0] * p["v"])
    return jnp.sum(jnp.where(x > p["v"], x, 0) @ p["w"]) + x[0, chosen]


def scan_output_of_parameters(p, x):
    def step(x, w):
        return jnp.tanh(x @ w), (jnp.sin(w), jnp.arange(N))

    x, (outputs, steps) = lax.scan(step, x, p["s"])
    return jnp.sum(x @ outputs[0] + outputs[1].sum() + steps.sum())


def scan_of_scalar(p, x):
    """Carry a number that depends on parameters and reaches no output."""
    return jnp.sum(lax.scan(lambda c, x: (c * p["v"][0], x @ p["w"]), 1.0, x)[1])


def rows_out_of_bounds(p, x):
    ids = jnp.round(8 * x).astype(jnp.int32)
    rows = p["w"].at[ids].get(mode="fill", fill_value=0)
    return jnp.sum(jnp.sin(rows) * x[..., None])


def rows_clipped_to_bounds(p, x):
    ids = jnp.round(8 * x).astype(jnp.int32)
    return jnp.sum(p["w"].at[ids].get(mode="clip") * (1 + x**2)[..., None])


def complex_product(p, x):
    y = jnp.fft.fft(x) @ p["w"].astype(jnp.complex64)
    return jnp.sum(jnp.abs(y) ** 2) + jnp.sum(x[:0] @ p["s"][0]) + p["v"].sum()


def convolution_of_parameters(p, x):
    """Convolve images with parameters, and parameters with a kernel of data."""
    numbers = ("NHC", "HIO", "NHC")

    def one(x):
        return lax.conv_general_dilated(
            x[None], p["s"], (1,), "SAME", dimension_numbers=numbers
        )

    y = lax.conv_general_dilated(
        p["w"][None], x[:, None], (1,), "SAME",
        dimension_numbers=numbers, feature_group_count=N,
    )  # fmt: skip
    return jnp.sum(jax.vmap(one)(jnp.stack([x, 2 * x])) ** 2) + jnp.sum(y**2)


PLACES = {
    "parameters_alone": lambda p, x: jnp.sum(p["w"] ** 2),
    "no_parameters": lambda p, x: jnp.sum(x),
    "bool_data": lambda p, x: jnp.sum(jnp.tanh((x > 0) @ p["w"])),
    **{
        loss.__name__: loss
        for loss in (
            callback, reference, index, scan_output_of_parameters,
            scan_of_scalar, rows_out_of_bounds, rows_clipped_to_bounds,
            complex_product, convolution_of_parameters,
        )
    },
}  # fmt: skip
