"""Generate random losses of one example, with parameters in every possible place.

`make(seed)` returns a loss, its parameters and a batch of examples. Hidden values have
shape (T, N). An operation maps a hidden value, the parameters and indices to another.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

N, V, LAYERS = 4, 9, 3

# Together these seeds draw every operation.
FEW = (2621, 2858, 271, 2297, 4712, 746, 3779, 3623, 3024, 4162)

SHAPES = {
    "bias": (N,),
    "gain": (N,),
    "dense": (N, N),
    "dense2": (N, N),
    "wide": (N, 3 * N),
    "heads": (2, N // 2, N // 2),
    "stack": (LAYERS, N, N),
    "stack_bias": (LAYERS, N),
    "words": (V, N),
    "kernel": (3, N, N),
    "grouped": (3, N // 2, N),
    "scale": (),
}
MATRICES = ["dense", "dense2", "stack", "wide", "words"]
VECTORS = ["bias", "gain", "stack_bias", "dense"]


@jax.custom_jvp
def cube(x, w):
    return jnp.tanh(x * w) ** 3


@cube.defjvp
def _cube_jvp(primals, tangents):
    # Differs from the derivative of the body, so that using the latter is detected.
    (x, w), (dx, dw) = primals, tangents
    return cube(x, w), 0.3 * w * dx + 0.7 * x * dw


@jax.custom_vjp
def bent(x):
    return jnp.tanh(x)


# Not linear in the cotangent, so it must receive the unscaled cotangent of one example.
bent.defvjp(lambda x: (bent(x), x), lambda x, g: (jnp.tanh(3 * g * x),))


# Functions of only parameters: a matrix, all parameters, another matrix of the same
# shape and the index of a layer.
MATRIX_VIEWS = {
    "plain": lambda w, p, other, layer: w,
    "T": lambda w, p, other, layer: w.T,
    "rev": lambda w, p, other, layer: w[::-1],
    "twice": lambda w, p, other, layer: 2 * w,
    "sum": lambda w, p, other, layer: w + p["bias"][:, None] * p["gain"],
    "soft": lambda w, p, other, layer: jax.nn.softmax(w),
    "unit": lambda w, p, other, layer: w / jnp.linalg.norm(w),
    "slice": lambda w, p, other, layer: jnp.concatenate([w[:1], w[1:]]),
    "round": lambda w, p, other, layer: w.reshape(-1).reshape(N, N).transpose(1, 0),
    "stop": lambda w, p, other, layer: lax.stop_gradient(w),
    "name": lambda w, p, other, layer: checkpoint_name(
        lax.optimization_barrier(-w), "w"
    ),
    "jit": lambda w, p, other, layer: jax.jit(lambda w: jnp.swapaxes(w, 0, 1))(w),
    "fft": lambda w, p, other, layer: (
        jnp.fft.ifft(jnp.fft.fft(w) * jnp.arange(1, N + 1)).real
    ),
    "qk": lambda w, p, other, layer: jnp.stack([w, other])[layer % 2],
    "scan": lambda w, p, other, layer: lax.scan(
        lambda c, x: (jnp.tanh(c + x), x), w, p["stack"]
    )[0],
    "gauss": lambda w, p, other, layer: jnp.where(jnp.arange(N) % 2 == 0, w, other),
}
VECTOR_VIEWS = {
    "plain": lambda w, p: w,
    "rev": lambda w, p: jnp.flip(w),
    "double": lambda w, p: w + w,
    "scaled": lambda w, p: w * p["scale"],
}
ELEMENTWISE = {
    "add": lambda h, w, mask: h + w,
    "sub": lambda h, w, mask: w - h,
    "mul": lambda h, w, mask: h * w,
    "div": lambda h, w, mask: h / (1 + w**2),
    "max": lambda h, w, mask: jnp.maximum(h, w),
    "where": lambda h, w, mask: jnp.where(mask, h, w),
    "pow": lambda h, w, mask: (1.5 + h) ** w,
    "flipped": lambda h, w, mask: h * w[::-1][None] + w,
}
# Functions of all parameters, the hidden value and the indices.
WORDS = {
    "take": lambda p, h, ids: h + jnp.nan_to_num(jnp.take(p["words"], ids, axis=0)),
    "fill": lambda p, h, ids: h + p["words"].at[ids + 4].get(mode="fill", fill_value=0),
    "clip": lambda p, h, ids: h + p["words"].at[ids + 4].get(mode="clip"),
    "index": lambda p, h, ids: h * p["words"][ids],
    "onehot": lambda p, h, ids: h + jax.nn.one_hot(ids, V, dtype=h.dtype) @ p["words"],
    "pairs": lambda p, h, ids: h + p["words"][ids, ids % N][:, None],
    "columns": lambda p, h, ids: h + p["words"][:, ids % N].sum(0)[:, None],
}
SLICED = {
    "row": lambda p, h, ids: h + p["words"][ids[0]],
    "layer": lambda p, h, ids: h @ p["stack"][ids[0] % LAYERS],
    "dynamic": lambda p, h, ids: h + lax.dynamic_slice_in_dim(p["words"], ids[-1], 1),
}
MIXING = {
    "attention": lambda p, h, ids: jax.nn.softmax(h @ h.T) @ h,
    "cumsum": lambda p, h, ids: jnp.cumsum(h, axis=0),
    "norm": lambda p, h, ids: (
        (h - h.mean(-1, keepdims=True)) / (1 + h.var(-1))[:, None]
    ),
    "sort": lambda p, h, ids: jnp.sort(h, axis=-1),
    "mean": lambda p, h, ids: h + h.mean(0),
    "nothing": lambda p, h, ids: jax.nn.relu(h),
}
# Functions of a function that computes a matrix, and of the hidden value.
OF_MATRIX = {
    "per_token": lambda w, h: jax.vmap(lambda x: w() @ x)(h),
    "penalty": lambda w, h: h + jnp.sum(w() ** 2),
    "many": lambda w, h: h @ w() + jnp.tanh(h @ w()) @ w(),
}


def split(p, h, ids):
    q, k, v = jnp.split(h @ p["wide"], 3, axis=-1)
    return jax.nn.softmax(q @ k.T) @ v


class Maker:
    """Draw operations; each is a function of (p, h, ids)."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def pick(self, options):
        return options[self.rng.integers(len(options))]

    def some(self, chance):
        return self.rng.random() < chance

    def matrix(self):
        """Draw an (N, N) matrix computed from only parameters."""
        name, layer = self.pick(MATRICES), int(self.rng.integers(LAYERS))
        how = self.pick(
            ["plain"] * 6
            + ["T", "rev", "twice", "sum", "soft", "unit", "slice", "round", "stop"]
            + ["name", "jit", "fft", "qk", "scan", "gauss"]
        )
        other = self.pick(["dense", "dense2"])

        def base(p):
            w = p[name]
            if name == "stack":
                return w[layer]
            if name == "wide":
                return w[:, layer * N : (layer + 1) * N]
            return w[:N]

        return lambda p: MATRIX_VIEWS[how](base(p), p, p[other], layer)

    def vector(self):
        name, layer = self.pick(VECTORS), int(self.rng.integers(LAYERS))
        how = self.pick(["plain"] * 4 + ["rev", "double", "scaled"])

        def view(p):
            w = p[name] if p[name].ndim == 1 else p[name][layer]
            return VECTOR_VIEWS[how](w, p)

        return view

    def block(self, depth, count=None):
        operations = [
            self.operation(depth) for _ in range(count or int(self.rng.integers(1, 4)))
        ]

        def apply(p, h, ids):
            for operation in operations:
                h = jnp.tanh(operation(p, h, ids))
            return h

        return apply

    def operation(self, depth):
        plain = [
            self.dense, self.dense, self.of_matrix("per_token"), self.heads,
            self.elementwise, self.elementwise, self.one_of(WORDS), self.one_of(WORDS),
            self.convolution, self.one_of(SLICED), self.one_of(MIXING), self.custom,
            self.of_matrix("penalty"), lambda depth: split, self.of_matrix("many"),
        ]  # fmt: skip
        nested = [
            self.call, self.call, self.remat, self.layers, self.recurrent, self.loop,
            self.branch, self.inner_gradient, self.batched,
        ]  # fmt: skip
        return self.pick(plain + (nested if depth else []))(depth)

    def dense(self, depth):
        w, left = self.matrix(), self.some(0.3)
        return lambda p, h, ids: (w(p) @ h.T).T if left else h @ w(p)

    def one_of(self, table):
        return lambda depth: table[self.pick([*table])]

    def of_matrix(self, name):
        def draw(depth):
            w = self.matrix()
            return lambda p, h, ids: OF_MATRIX[name](lambda: w(p), h)

        return draw

    def heads(self, depth):
        spec = self.pick(["thk,hkm->thm", "thk,hmk->thm", "tkh,hkm->tmh"])

        def apply(p, h, ids):
            parts = h.reshape(-1, 2, N // 2)
            return jnp.einsum(spec, parts, p["heads"]).reshape(h.shape)

        return apply

    def elementwise(self, depth):
        v = self.vector()
        mask = self.rng.random(N) < 0.5
        how = self.pick([*ELEMENTWISE])
        return lambda p, h, ids: ELEMENTWISE[how](h, v(p), mask)

    def convolution(self, depth):
        grouped, stride, dilation = (
            self.some(0.4),
            self.pick([1, 1, 2]),
            self.pick([1, 2]),
        )
        flip = self.some(0.3)

        def apply(p, h, ids):
            w = p["grouped" if grouped else "kernel"]
            x = lax.conv_general_dilated(
                h[None],
                w[::-1] if flip else w,
                (stride,),
                "SAME",
                rhs_dilation=(dilation,),
                dimension_numbers=("NHC", "HIO", "NHC"),
                feature_group_count=2 if grouped else 1,
            )[0]
            return h + x.mean(0) if stride > 1 else x

        return apply

    def custom(self, depth):
        v, w, how = self.vector(), self.matrix(), self.pick(["jvp", "vjp", "relu"])

        def apply(p, h, ids):
            if how == "jvp":
                return cube(h, jnp.broadcast_to(v(p), h.shape))
            return bent(h @ w(p)) if how == "vjp" else jax.nn.relu(h - v(p))

        return apply

    def call(self, depth):
        inner = self.block(depth - 1)
        jitted = jax.jit(inner)
        twice = self.some(0.4)
        return lambda p, h, ids: (
            jitted(p, jitted(p, h, ids), ids) if twice else jitted(p, h, ids)
        )

    def remat(self, depth):
        policy = self.pick([None, jax.checkpoint_policies.dots_saveable])
        return jax.checkpoint(self.block(depth - 1), policy=policy)

    def layers(self, depth):
        inner, remat, reverse = self.block(depth - 1), self.some(0.5), self.some(0.3)
        moved = self.some(0.3)

        def apply(p, h, ids):
            def step(h, layer):
                w, b = layer
                layer_params = {**p, "dense": w, "bias": b}
                h_next = inner(layer_params, h, ids) @ w + b
                return h_next, h.sum() + b.sum() * w.sum()

            step = jax.checkpoint(step) if remat else step
            stack = jnp.swapaxes(p["stack"], 1, 2) if moved else p["stack"]
            h, extra = lax.scan(step, h, (stack, p["stack_bias"]), reverse=reverse)
            return h + extra.mean()

        return apply

    def recurrent(self, depth):
        inner, learned = self.block(depth - 1, 1), self.some(0.5)

        def apply(p, h, ids):
            def step(state, x):
                state = jnp.tanh(inner(p, state[None], ids)[0] + x @ p["dense2"])
                return state, state * p["gain"]

            first = p["bias"] if learned else jnp.zeros_like(h[0])
            return lax.scan(step, first, h)[1]

        return apply

    def loop(self, depth):
        inner, how = (
            self.block(depth - 1),
            self.pick(["closed", "fixed", "index", "moving"]),
        )

        def apply(p, h, ids):
            def step(i, carry):
                h, w = carry
                dense = p["stack"][i] if how == "index" else w
                h = inner({**p, "dense": dense}, h, ids) @ dense
                return h, (w + 0.1 * h.mean() if how == "moving" else w)

            if how == "closed":
                return lax.fori_loop(0, 2, lambda i, h: inner(p, h, ids), h)
            return lax.fori_loop(0, LAYERS, step, (h, p["dense2"]))[0]

        return apply

    def branch(self, depth):
        blocks = self.block(depth - 1, 1), self.block(depth - 1, 1)

        def branch(block):
            # Both branches of `cond` must have the same length and weak type.
            return lambda p, h, ids: block(p, h, ids)[: len(h)].astype(h.dtype)

        return lambda p, h, ids: lax.cond(h.sum() > 0, *map(branch, blocks), p, h, ids)

    def inner_gradient(self, depth):
        inner = self.block(0, 1)

        def apply(p, h, ids):
            slope = jax.grad(lambda w: jnp.sum(inner({**p, "dense": w}, h, ids) @ w))
            return h @ (p["dense"] - 0.1 * slope(p["dense"]))

        return apply

    def batched(self, depth):
        inner = self.block(depth - 1, 1)

        def apply(p, h, ids):
            both = jnp.stack([h, -h])
            return jax.vmap(lambda h: inner(p, h, ids))(both).sum(0)

        return apply


def make(seed):
    """Return a loss, its parameters and a batch."""
    maker = Maker(seed)
    rng = maker.rng
    body = maker.block(2, int(rng.integers(2, 6)))
    positions = int(maker.pick([1, 2, 5]))

    def loss(p, example):
        x, ids = example
        h = body(p, x, ids)
        return jnp.mean(jnp.sin(3 * h))

    def normal(shape):
        size = shape[-2] if len(shape) > 1 else 1
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(size), jnp.float64)

    params = {name: normal(shape) for name, shape in SHAPES.items()}
    x = normal((3, positions, N))
    ids = jnp.asarray(rng.integers(0, V, (3, positions)), jnp.int32)
    return loss, params, (x, ids)
