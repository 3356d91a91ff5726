"""Run a transformation over several steps, in one compiled scan."""

import functools

import jax

import optclip
from tests.support import helpers


@functools.cache
def scanned(tx):
    """Compile a run over rows of updates, parameters and further arguments."""

    def step(state, row):
        updates, params, extra = row
        out, state = tx.update(updates, state, params, **extra)
        return state, (out, state)

    def run(rows):
        first = jax.tree.map(lambda x: x[0], rows[0])
        return jax.lax.scan(step, tx.init(first), rows)[1]

    return helpers.quick_jit(run)


def over_steps(tx, updates, params=None, **extra):
    """Return the updates and the state of each step, stacked."""
    return jax.device_get(scanned(tx)((updates, params, extra)))


@helpers.quick_jit
def metrics_of(states):
    return jax.vmap(optclip.metrics)(states)


def history(tx, updates, **extra):
    """Return the updates and metrics of each step, and the last state."""
    outs, states = over_steps(tx, updates, **extra)
    last = jax.tree.map(lambda x: x[-1], states)
    return outs, jax.device_get(metrics_of(states)), last


def unstacked(trees):
    """Return a list of the trees of each step."""
    length = len(jax.tree.leaves(trees)[0])
    return [jax.tree.map(lambda x, i=i: x[i], trees) for i in range(length)]
