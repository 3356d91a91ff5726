"""Rules by themselves, handed norms and memories, and in a clip over many steps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import optclip
from optclip.thresholds import Seen
from tests.support import helpers

INF = math.inf


def seen(norm, *, step=0, finite=True):
    norm = jax.tree.map(jnp.float32, norm)

    def keep(limits):
        return jax.tree.map(jnp.minimum, norm, limits)

    finite = jax.tree.map(lambda x: jnp.full(x.shape, finite), norm)
    return Seen(
        norm, finite, keep, lambda tree: tree, updates=None, params=None,
        step=jnp.int32(step), extra={},
    )  # fmt: skip


@functools.cache
def compiled(rule):
    def update(norm, finite, step, memory):
        return rule.update(seen(norm, finite=finite, step=step), memory)

    return helpers.quick_jit(update)


def updated(rule, norm, memory, *, step=0, finite=True):
    """The threshold and the new memory, of a program that all steps share."""
    norm = jax.tree.map(np.float32, norm)
    return compiled(rule)(norm, finite, np.int32(step), memory)


DIRECTION = np.array([0.6, -0.8])


def gradient(norm):
    """A vector of that norm; what is not finite in one entry only."""
    found = norm * DIRECTION if math.isfinite(norm) else [1.0, norm]
    return np.asarray(found, np.float32)


@functools.cache
def scanned(tx, jit=helpers.quick_jit):
    """All steps in one program: outputs, metrics and the last state."""

    def step(state, row):
        out, state = tx.update(row, state)
        return state, (out, optclip.metrics(state))

    def run(rows):
        first = jax.tree.map(lambda x: x[0], rows)
        state, (outs, metrics) = jax.lax.scan(step, tx.init(first), rows)
        return outs, metrics, state

    return jit(run)


def thresholds_of(tx, norms, jit=helpers.quick_jit):
    """The threshold of each step, its gradient clipped or not, and the last state."""
    rows = np.stack([gradient(n) for n in norms])
    outs, metrics, state = scanned(tx, jit)(rows)
    found, seen = (
        np.asarray(metrics[f"clip/{key}"], np.float64) for key in ("threshold", "norm")
    )
    finite = np.isfinite(seen)
    left = np.linalg.norm(np.asarray(outs, np.float64)[finite], axis=1)
    np.testing.assert_allclose(left, np.minimum(seen, found)[finite], rtol=1e-6)
    return found, seen > found, state
