"""`use_norm=` clips by a global norm that the caller passes to `update`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import optclip
from optclip import functional

TREE = {"a": np.float32([3, 4]), "b": np.float32([[12]])}
NORM = 13.0


@jax.jit
def step(updates, state, norm):
    tx = optclip.clip_by_global_norm(
        2.0, use_norm="grad_norm", nonfinite="zero", eps=0.5
    )
    state = tx.init(updates) if state is None else state
    return tx.update(updates, state, loss=0.0, grad_norm=norm)


def test_use_norm_clips_and_records_by_passed_norm():
    # Twice the norm of the tree, to show which one is used.
    clipped, state = step(TREE, None, 2 * NORM)
    for key, x in TREE.items():
        np.testing.assert_allclose(clipped[key], x * 2 / (2 * NORM + 0.5), rtol=1e-6)
    logged = optclip.metrics(state)
    assert logged["clip/norm"] == 2 * NORM
    assert logged["clip/rate"] == 1


@pytest.mark.parametrize("norm", [np.inf, np.nan])
def test_use_norm_nonfinite_follows_policy(norm):
    clipped, state = step(TREE, step(TREE, None, 1.0)[1], norm)
    assert not any(np.any(x) for x in jax.tree.leaves(clipped))
    assert optclip.metrics(state)["clip/nonfinite"] == 1


def test_use_norm_rule_learns_passed_norm():
    tx = optclip.clip_by_global_norm(
        optclip.thresholds.previous_norm(), use_norm="norm"
    )
    _, state = tx.update(TREE, tx.init(TREE), norm=0.5 * NORM)
    clipped, _ = tx.update(TREE, state, norm=NORM)
    np.testing.assert_allclose(clipped["a"], TREE["a"] / (0.5 * NORM), rtol=1e-6)


@pytest.mark.parametrize("use_norm", ["grad_norm", None])
def test_use_norm_measures_nothing(use_norm):
    tx = optclip.clip_by_global_norm(1.0, use_norm=use_norm)

    def clips(updates):
        pure = functional.clip_by_global_norm(updates, 1.0, use_norm=use_norm and NORM)
        return pure, tx.update(updates, tx.init(updates), grad_norm=NORM)

    sums = str(jax.make_jaxpr(clips)(TREE)).count("reduce_sum")
    assert sums == 0 if use_norm else sums > 1


def test_use_norm_varying_over_devices_raises():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = optclip.clip_by_global_norm(1.0, use_norm="norm")

    def update(tree):
        return tx.update(tree, tx.init(tree), norm=jnp.sqrt(jnp.sum(tree**2)))[0]

    spec = P("data")
    with pytest.raises(ValueError, match="`norm` varies over the mesh axes"):
        jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec)(TREE["a"])
