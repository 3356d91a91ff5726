"""Train with optax's and with optclip's clipping, in float32 and bfloat16.

Plots the norm after clipping of 1,000 steps in bfloat16.

`python -m docs.plots_and_tables.optax_comparison_plot` draws
`docs/images/both_clips.png` and prints the figures that `docs/migrating.md` states.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from examples import plot_style

PLOT = pathlib.Path(__file__).parents[1] / "images" / "both_clips.png"
STEPS, LAYERS, WIDTH, MAX_NORM = 1000, 48, 32, 0.1
COLORS = plot_style.ORANGE, plot_style.BLUE
CLIPS = {
    "optax": optax.clip_by_global_norm(MAX_NORM),
    "optclip": optclip.clip_by_global_norm(MAX_NORM, record=False),
}


def init(key, dtype):
    keys = jax.random.split(key, LAYERS)
    kernels = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH for k in keys]
    layers = [{"kernel": k, "bias": jnp.zeros(WIDTH)} for k in kernels]
    return jax.tree.map(lambda x: x.astype(dtype), layers)


def loss(params, x, y):
    for layer in params:
        x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square((x - y).astype(jnp.float32)))


def train(clip, dtype):
    """Return the loss and the norm after clipping of each step, in float32."""
    target = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH))
    tx = optax.chain(clip, optax.sgd(0.1))
    params = init(jax.random.key(0), dtype)

    def step(carry, key):
        params, state = carry
        x = jax.random.normal(key, (64, WIDTH))
        y = 2 * jnp.tanh(x @ target / 6)
        value, grads = jax.value_and_grad(loss)(params, x.astype(dtype), y)
        clipped, _ = clip.update(grads, clip.init(params))
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), clipped)
        norm = optclip.functional.global_norm(wide)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (value, norm)

    keys = jax.random.split(jax.random.key(2), STEPS)
    return jax.device_get(jax.lax.scan(step, (params, tx.init(params)), keys)[1])


def draw(norms):
    """Draw by how much the norms of each step exceed the threshold, in percent."""
    figure = plot_style.figure(3.4)
    axes = figure.subplots()
    for (name, of_steps), color in zip(norms.items(), COLORS, strict=True):
        excess = 100 * (of_steps / MAX_NORM - 1)
        axes.plot(excess, ".", ms=3, color=color, label=name)
    axes.set(
        title="Norm after clipping to 0.1, bfloat16 gradients", xlabel="step",
        xlim=(0, STEPS), ylabel="above the threshold, %",
    )  # fmt: skip
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    plot_style.finish(axes)
    axes.legend(
        loc="upper right", ncols=2, frameon=False, fontsize=plot_style.SMALL,
        markerscale=3,
    )  # fmt: skip
    figure.savefig(PLOT)


if __name__ == "__main__":
    runs = {
        (dtype, name): jax.jit(lambda clip=clip, dtype=dtype: train(clip, dtype))()
        for dtype in ("float32", "bfloat16")
        for name, clip in CLIPS.items()
    }
    draw({name: runs["bfloat16", name][1] for name in CLIPS})
    for (dtype, name), (losses, norms) in runs.items():
        last = np.mean(losses[-100:])
        largest = np.max(norms)
        print(f"{dtype:8} {name:7} final loss {last:.4f}, largest norm {largest:.4f}")
    for dtype in ("float32", "bfloat16"):
        pair = [runs[dtype, name][0] for name in CLIPS]
        difference = np.max(np.abs(pair[0] - pair[1]) / pair[1])
        print(f"{dtype:8} the losses differ by at most {difference:.1e}")
