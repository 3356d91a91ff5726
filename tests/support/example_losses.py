"""Define losses of one example: of models, and with unusual uses of parameters.

`MODELS[name]()` returns a loss, its parameters and a batch, in float32. They are scaled
like a model at the start of training, so that float32 suffices for the gradient.
`PLACES[name]` is a loss that takes `PLACE_PARAMS` and one of `PLACE_EXAMPLES`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, T, D, V = 5, 6, 16, 40


class Draw:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def weight(self, *shape):
        size = shape[-2] if len(shape) > 1 else 4
        return jnp.asarray(self.rng.normal(size=shape) / np.sqrt(size), jnp.float32)

    def data(self, *shape):
        return jnp.asarray(self.rng.normal(size=(BATCH, *shape)), jnp.float32)

    def ids(self, most, *shape):
        return jnp.asarray(self.rng.integers(0, most, (BATCH, *shape)), jnp.int32)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def layer_norm(h, gain, bias):
    h = h - h.mean(-1, keepdims=True)
    return h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * gain + bias


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
        return cross_entropy(x.mean((0, 2, 3)), label)

    draw = Draw()
    p = {
        "first": draw.weight(3, 3, 3, 8) / 5,
        "grouped": draw.weight(3, 3, 2, 48) / 3,
        "bias": draw.weight(48),
        "last": draw.weight(4, 48, 1, 1),
    }
    return loss, p, (draw.data(5, 5, 3), draw.ids(4))


def transformer():
    def loss(p, example):
        inputs, labels = example
        h = p["words"][inputs] + p["places"]

        def block(h, layer):
            z = layer_norm(h, layer["gain"], layer["bias"])
            q, k, v = (jnp.einsum("td,dhk->thk", z, layer[name]) for name in "qkv")
            scores = jnp.einsum("thk,shk->hts", q, k) / 3
            scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
            mixed = jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), v)
            h = h + jnp.einsum("thk,hkd->td", mixed, layer["o"])
            hidden = jax.nn.gelu(h @ layer["up"] + layer["up_bias"])
            return h + hidden @ layer["down"], None

        h, _ = lax.scan(jax.checkpoint(block), h, p["layers"])
        return cross_entropy(h @ p["head"], labels)

    draw, layers = Draw(), 3
    p = {
        "words": draw.weight(V, D) * 6,
        "places": draw.weight(T, D),
        "head": draw.weight(D, V),
        "layers": {
            "gain": 1 + draw.weight(layers, D) / 9,
            "bias": draw.weight(layers, D),
            **{name: draw.weight(layers, D, 2, 8) / 3 for name in "qkv"},
            "o": draw.weight(layers, 2, 8, D),
            "up": draw.weight(layers, D, 32),
            "up_bias": draw.weight(layers, 32),
            "down": draw.weight(layers, 32, D),
        },
    }
    return loss, p, (draw.ids(V, T), draw.ids(V, T))


MODELS = {"cnn": cnn, "transformer": transformer}

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
