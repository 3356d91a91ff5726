"""Draw whether the norm of the update rises before the loss, in a small GPT.

Run `python -m docs.plots_and_tables.update_norm_plot`, which takes a minute. It trains
the GPT of `examples/train_gpt.py` unclipped for 400 steps. From step 100 on, the learning
rate is 30 times as high for 3 steps; from step 250 on, 16 batches are corrupted. It
writes `docs/images/update_norm.png` and prints the norms around both.
"""

import pathlib
import sys

import jax
import numpy as np
import optax

import optclip

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import plot_style  # noqa: E402
import train_gpt as gpt  # noqa: E402

STEPS, JUMP, BURST = 400, range(100, 103), range(250, 266)
EVENTS = {"corrupted batches": BURST, "learning rate times 30": JUMP}
TICKS = (0.5, 1, 2, 4, 8, 16, 32)
COLORS = {
    "loss": plot_style.BASELINE,
    "gradient norm": plot_style.ORANGE,
    "update norm": plot_style.BLUE,
}


def rate(step):
    usual = optax.warmup_cosine_decay_schedule(0.0, gpt.RATE, STEPS // 20, STEPS)
    jumps = (step >= JUMP.start) & (step < JUMP.stop)
    return usual(step) * jax.numpy.where(jumps, 30.0, 1.0)


def recorded():
    """Train, and return the loss and both norms of each step."""
    corpus, key = gpt.read_corpus(), jax.random.key(0)
    unclipped = float("inf")
    tx = optax.chain(
        optclip.clip_by_global_norm(unclipped, name="gradient"),
        optax.adamw(rate, b2=0.95, weight_decay=0.1),
        optclip.clip_by_global_norm(unclipped, name="update"),
    )
    params = gpt.init_params(key, corpus.letters)

    @jax.jit
    def step(carry, number):
        params, state = carry
        corrupted = (number >= BURST.start) & (number < BURST.stop)
        batch = gpt.draw_batch(jax.random.fold_in(key, number), corpus, corrupted)
        loss, grads = jax.value_and_grad(gpt.mean_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        logged = optclip.metrics(state)
        norms = logged["gradient/norm"], logged["update/norm"]
        return (optax.apply_updates(params, updates), state), (loss, *norms)

    carry, rows = (params, tx.init(params)), []
    for number in range(STEPS):
        carry, row = step(carry, number)
        rows.append(row)
    columns = np.array(jax.device_get(rows)).T
    return dict(zip(COLORS, columns, strict=True))


def main():
    """Train, print the quantities around both events, and draw them."""
    run, figure = recorded(), plot_style.figure(5.2)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, (title, event) in zip(panels, EVENTS.items(), strict=True):
        first, after = event.start, np.arange(-8, 25)
        axes.axvspan(-0.5, len(event) - 0.5, color=plot_style.SHADE, lw=0, zorder=0)
        print(title)
        for name, values in run.items():
            times = values[first + after] / np.median(values[first - 32 : first])
            print(f"  {name:<14}", *(f"{x:.2f}" for x in times[6:18]))
            axes.plot(after, times, ".-", color=COLORS[name], label=name)
        axes.set(title=f"Shaded: {title}", ylabel="times the usual", yscale="log")
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
        plot_style.finish(axes)
    panels[-1].legend(loc="upper right", frameon=False, fontsize=plot_style.SMALL)
    panels[-1].set_xlabel("steps after the first shaded step")
    figure.savefig(ROOT / "docs" / "images" / "update_norm.png")


if __name__ == "__main__":
    main()
