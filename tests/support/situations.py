"""Make runs, a state with a history or the log of a trainer, and read their findings."""

import contextlib
import functools
import io
import json
import runpy
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from optclip import plot
from tests.support import helpers

LEAVES = ("embed", "attn_key", "attn_out", "mlp_in", "mlp_out", "head")
# Runs of all lengths share a compiled program.
LONGEST = 512


def noise(size, width=0.1, seed=0):
    """Return factors around 1."""
    return np.exp(width * np.random.default_rng(seed).normal(size=size))


def along(steps, points):
    """Return values between published points, on straight lines of logarithms."""
    x, y = np.log([*points]), np.log([*points.values()])
    return np.exp(np.interp(np.log(steps), x, y))


def at(values, changes):
    """Return values with other numbers in some rows, by row or `(start, stop)`."""
    values = np.array(values, float)
    for rows, x in changes.items():
        values[slice(*rows) if isinstance(rows, tuple) else rows] = x
    return values


def log(norms, loss=None, steps=None):
    """Return the columns that a trainer logs; steps start at 0 by default."""
    steps = np.arange(len(norms)) if steps is None else steps
    columns = {"step": steps, "grad_norm": norms, "loss": loss}
    return {k: np.array(x, float) for k, x in columns.items() if x is not None}


@functools.cache
def _recorder(tx, rows, has_loss):
    tx = optclip.with_history(tx, steps=rows)

    def run(grads, losses, count):
        def step(i, state):
            row = jax.tree.map(lambda x: x[i], grads)
            extra = {"value": losses[i]} if has_loss else {}
            return tx.update(row, state, row, **extra)[1]

        first = tx.init(jax.tree.map(lambda x: x[0], grads))
        return jax.lax.fori_loop(0, count, step, first)

    return helpers.quick_jit(run)


def run(tx, norms, loss=None, rows=LONGEST, **leaves):
    """Return the state after gradients in equal leaves, but for those passed."""
    equal = np.asarray(norms) / len(LEAVES) ** 0.5
    columns = {
        "loss": np.zeros(equal.size) if loss is None else loss,
        **dict.fromkeys(LEAVES, equal),
    }
    columns = {
        k: np.pad(np.float32(x), (0, LONGEST - len(equal)))
        for k, x in (columns | leaves).items()
    }
    losses, unit = columns.pop("loss"), np.full((2, 2), np.float32(0.5))
    grads = {k: x[:, None, None] * unit for k, x in columns.items()}
    return _recorder(tx, rows, loss is not None)(grads, losses, len(equal))


# A model that predicts one of two equally likely successors of a symbol.
SYMBOLS, STEPS = 16, 300
SMALL = optax.chain(
    optclip.clip_by_global_norm(1.0, record="leaves"), optax.scale_by_adam()
)


def _loss(params, symbols, successors, weight):
    hidden = jnp.tanh(params["embed"][symbols] @ params["hidden"])
    scores = jax.nn.log_softmax(hidden @ params["out"])
    return -weight * jnp.take_along_axis(scores, successors[:, None], 1).mean()


@functools.cache
def _trainer():
    tx = optclip.with_history(SMALL, steps=STEPS)

    def step(carry, batch):
        params, state = carry
        *examples, rate = batch
        loss, grads = jax.value_and_grad(_loss)(params, *examples)
        updates, state = tx.update(grads, state, params, value=loss)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return (params, state), None

    return helpers.quick_jit(
        lambda params, *batches: jax.lax.scan(step, (params, tx.init(params)), batches)[
            0
        ][1]
    )


def trained(random=(), weights=None, rate=0.01):
    """Train the model; successors are random in some steps, weights multiply losses."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (SYMBOLS, 32), "hidden": (32, 32), "out": (32, SYMBOLS)}
    params = {k: rng.normal(size=x) / x[0] ** 0.5 for k, x in shapes.items()}
    symbols, noises = rng.integers(SYMBOLS, size=(2, STEPS, 128))
    successors = (3 * symbols + noises % 2) % SYMBOLS
    successors[[*random]] = noises[[*random]]
    warm_up = np.minimum(1, np.arange(1, STEPS + 1) / 20)
    batches = symbols, successors, at(np.ones(STEPS), weights or {}), rate * warm_up
    return _trainer()(*jax.tree.map(jnp.asarray, (params, *batches)))


def _report(path):
    """Return the findings of the command line."""
    arguments = mock.patch.object(
        sys, "argv", ["optclip", "report", str(path), "--json"]
    )
    out = contextlib.redirect_stdout(io.StringIO())
    with arguments, out as text, contextlib.suppress(SystemExit):
        runpy.run_module("optclip", run_name="__main__")
    return json.loads(text.getvalue())["verdict"]


def _summary(source):
    """Return the findings of a summary."""
    lines = helpers.unwrapped(optclip.summary(source))
    return [line.removeprefix("-> ") for line in lines if line.startswith("->")]


def readings(run, folder):
    """Return the findings by the form in which a run is read."""
    path, state = folder / "run.jsonl", folder / "trainer_state.json"
    if not isinstance(run, dict):
        columns = optclip.history(run)
        plot.save(columns, path)
        found = {"state": _summary(run.history_inner), "history": _summary(columns)}
        return found | {"kept": _summary(run), "lines": _report(path)}
    columns = {k: x.tolist() for k, x in run.items()}
    rows = [
        dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    state.write_text(json.dumps({"log_history": [*rows, {"eval_loss": 99.0}]}))
    columns["grad_norm/norm"] = columns.pop("grad_norm")
    found = {"history": _summary(columns), "lines": _report(path)}
    return found | {"trainer_state": _report(state)}
