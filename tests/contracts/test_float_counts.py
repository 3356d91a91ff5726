"""Counts that come back as floats, as from a state averaged over replicas or cast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support import covering, helpers
from tests.support.registry import ENTRIES, by_trait

TREE = helpers.gradients()
MATRIX = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([[0.0, 12.0]])}
RULES = {
    "ema": thresholds.ema(max_norm=2.0),
    "mean_over_rms": thresholds.mean_over_rms(),
    "mean_plus_std": thresholds.mean_plus_std(window=4),
    "of_gradients": thresholds.of_gradients(thresholds.ema(max_norm=2.0)),
    "quantile": thresholds.quantile(0.5, 4),
    "zscore": thresholds.zscore(max_norm=2.0),
}
TXS = {
    **{
        f"{name} per {scope}": optclip.clip_by(rule, over=scope)
        for i, (name, rule) in enumerate(RULES.items())
        for scope in covering.rotated(("tree", "leaf"), i)
    },
    "schedule": optclip.clip_by_norm(optax.linear_schedule(1.0, 2.0, 4)),
    "moment": optclip.clip_by_value(thresholds.moment()),
    "skip": optclip.skip(
        optclip.clip_by_norm(thresholds.quantile(0.5, 4)),
        max_norm=thresholds.quantile(0.5, 4),
        max_loss=thresholds.mean_plus_std(window=4),
        max_consecutive=2,
        learn_skipped=False,
    ),
    "reset": optclip.with_periodic_reset(
        optclip.clip_by_global_norm(thresholds.zscore(max_norm=2.0)), 2
    ),
    "constrain": optclip.constrain(
        optclip.clip_by_norm(1.0), optclip.clip_by_norm(thresholds.initial_norm())
    ),
    "error feedback": optclip.recipes.uclip(optclip.clip_by_value(1.0)),
}


def with_floats(state):
    """Return a state whose counts are floats, off by a rounding."""

    def as_float(x):
        is_count = jnp.issubdtype(x.dtype, jnp.integer)
        return x.astype(jnp.float32) * np.float32(1 - 1e-7) if is_count else x

    return jax.tree.map(as_float, state)


def call(tx, state, tree):
    return tx.update(tree, state, tree, value=jnp.float32(1.0), gradients=tree)


@pytest.mark.parametrize(
    ("tx", "tree"),
    [
        *(pytest.param(e.make(), TREE, id=e.id) for e in by_trait(ENTRIES, "state")),
        *(pytest.param(tx, MATRIX, id=name) for name, tx in TXS.items()),
    ],
)
def test_update_with_float_counts_equals_integer_counts(tx, tree):
    """Updates and state, with its dtypes."""
    run = helpers.quick_jit(functools.partial(call, tx))
    _, state = run(tx.init(tree), tree)
    helpers.assert_identical(run(with_floats(state), tree), run(state, tree))
