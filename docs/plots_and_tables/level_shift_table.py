"""Write the table of level shifts in `docs/choosing_a_threshold.md`.

Run `python -m docs.plots_and_tables.level_shift_table`, which takes minutes.
"""

import pathlib
import re
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from optclip import recipes, thresholds

PAGE = pathlib.Path(__file__).resolve().parents[1] / "choosing_a_threshold.md"
SHIFT, END = 1000, 3000
HUGE = 3e5


def tree(rule: thresholds.Rule) -> optax.GradientTransformationExtraArgs:
    return optclip.clip_by_global_norm(rule)


ROWS = {
    "`thresholds.quantile(0.9)`": tree(thresholds.quantile(0.9)),
    "`autoclip()`": recipes.autoclip(),
    "`thresholds.quantile(0.9, window=100)`": tree(thresholds.quantile(0.9, 100)),
    "`mean_std_clip()`, `thresholds.mean_plus_std()`": recipes.mean_std_clip(),
    "`olmo_ratio()`": recipes.olmo_ratio(),
    "`adagc(max_norm=None)`, `thresholds.ema(max_norm=None)`": recipes.adagc(
        max_norm=None
    ),
    "`zclip(max_norm=None)`, `thresholds.zscore()`": recipes.zclip(max_norm=None),
    "`thresholds.previous_norm()`": tree(thresholds.previous_norm()),
    "`olmo_skip(tx, use_loss=False)`": recipes.olmo_skip(
        optax.identity(), use_loss=False
    ),
}


def histories() -> tuple[np.ndarray, np.ndarray]:
    """Return the norms and their level: steady, up, down, and with a huge norm.

    A low-discrepancy sequence replaces draws from a log-normal distribution.
    """
    steps = np.arange(END)
    uniform = (steps + 0.5) * (np.sqrt(5) - 1) / 2 % 1
    usual = np.exp(0.3 * np.array([NormalDist().inv_cdf(u) for u in uniform]))
    levels = np.array([np.where(steps < SHIFT, 1, x) for x in (1, 10, 0.1, 1)])
    norms = usual * levels
    norms[-1, 0] = HUGE
    return norms, levels


def responses(tx: Any) -> np.ndarray:
    """Return, per history and step, the lengths of two clipped gradients.

    Their norms are the usual one and 10 times it, in units of the level.
    """

    def step(state, now):
        norm, level = now

        def clipped(probe):
            return tx.update(probe[None] * level, state)[0][0] / level

        _, new = tx.update(norm[None], state)
        return new, jnp.stack([clipped(jnp.ones(())), clipped(jnp.full((), 10.0))])

    def run(norms, levels):
        return jax.lax.scan(step, tx.init(jnp.zeros(1)), (norms, levels))[1]

    return np.asarray(jax.jit(jax.vmap(run))(*map(jnp.float32, histories())))


def row(name: str) -> str:
    """Format the steps until both gradients are clipped as in the steady history."""
    steady, *others = responses(ROWS[name])
    cells = [name]
    for start, found in zip((SHIFT, SHIFT, 1), others, strict=True):
        within = (found >= steady / 2) & (found <= 2 * steady)
        differs = np.flatnonzero(~within.all(axis=1)[start:])
        steps = differs[-1] + 1 if len(differs) else 0
        never = steps > END - SHIFT - 100
        cells.append(f"over {END - SHIFT:,}" if never else f"{steps:,}")
    return f"| {' | '.join(cells)} |"


def with_table(page: str) -> str:
    """Return the page with the current table."""
    head = "| rule or recipe | norms rise tenfold | norms fall to a tenth | first norm of 3e5 |"
    table = "\n".join([head, "|---" * 4 + "|", *map(row, ROWS)])
    marked = re.compile(r"(<!-- shifts -->\n).*?(<!-- end of shifts -->)", re.DOTALL)
    return marked.sub(lambda m: f"{m[1]}{table}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
