"""`shard_map` together with the rest of JAX: partly manual, nested, vmap, grad, donated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip._arrays import _axis_names
from optclip.functional import clip_by_global_norm, global_norm
from tests.support import helpers
from tests.support.mapped import NORM, SPECS, TREE


def tree():
    return jax.tree.map(jnp.asarray, TREE)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def placed(mesh):
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
    return jax.device_put(tree(), places)


def only(axis):
    """The specs as far as they name `axis`: what a map over it alone is given."""
    return {
        key: P(*(name if name == axis else None for name in spec))
        for key, spec in SPECS.items()
    }


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("axis", ["data", "model"])
def test_some_axes_manual_and_the_others_not(axis, kind):
    mesh, specs = mesh_of(kind), only(axis)
    with jax.set_mesh(mesh):
        step = jax.shard_map(
            lambda tree: clip_by_global_norm(tree, 1.0),
            in_specs=(specs,), out_specs=(specs, P()), axis_names={axis},
        )  # fmt: skip
        clipped, norm = helpers.quick_jit(step)(placed(mesh))
    np.testing.assert_allclose(norm, NORM, rtol=1e-6)
    for key, x in tree().items():
        np.testing.assert_allclose(clipped[key], x / NORM, rtol=1e-6)


def test_a_map_in_a_map():
    inner = jax.shard_map(
        global_norm, in_specs=(only("model"),), out_specs=P(), axis_names={"model"}
    )
    outer = jax.shard_map(
        inner, mesh=mesh_of(), in_specs=(only("data"),), out_specs=P(),
        axis_names={"data"},
    )  # fmt: skip
    with jax.set_mesh(mesh_of()):
        np.testing.assert_allclose(helpers.quick_jit(outer)(tree()), NORM, rtol=1e-6)


@pytest.mark.skipif(_axis_names.IS_OLD, reason="jax 0.8.3 has no psum in such a vmap")
def test_vmap_in_a_map():
    """Each example has its norm, over all devices."""

    def norms(tree):
        scaled = [jax.tree.map(lambda x, s=s: s * x, tree) for s in (1.0, 2.0)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *scaled)
        return jax.vmap(global_norm)(stacked)

    found = helpers.quick_jit(
        jax.shard_map(norms, mesh=mesh_of(), in_specs=(SPECS,), out_specs=P())
    )(tree())
    np.testing.assert_allclose(found, [NORM, 2 * NORM], rtol=1e-6)


@pytest.mark.parametrize("ord", [1.0, 2.0, 3.0, float("inf")])
def test_the_derivative_in_a_map(ord):
    """That of the whole norm, to what each device holds."""

    def gradient(tree):
        def loss(tree):
            clipped, norm = clip_by_global_norm(tree, 2.0, ord=ord)
            return norm + sum(jnp.sum(x**3) for x in jax.tree.leaves(clipped))

        return jax.grad(loss)(tree)

    def in_a_map(tree):
        def loss(tree):
            clipped, norm = clip_by_global_norm(tree, 2.0, ord=ord)
            cubes = {key: jnp.sum(x**3) for key, x in clipped.items()}
            total = cubes["whole"] + jax.lax.psum(cubes["split"], "data")
            return norm + total + jax.lax.psum(cubes["both"], ("data", "model"))

        return jax.grad(loss)(tree)

    step = jax.shard_map(in_a_map, mesh=mesh_of(), in_specs=(SPECS,), out_specs=SPECS)
    found, expected = (
        helpers.quick_jit(step)(tree()),
        helpers.quick_jit(gradient)(tree()),
    )
    for key, x in expected.items():
        assert np.any(x)
        np.testing.assert_allclose(found[key], x, rtol=2e-6, atol=1e-6)


def test_a_state_that_is_donated():
    """Over MultiSteps, which changes a state in both branches of a condition."""
    clip = optclip.recipes.autoclip(0.5, window=4)
    tx = optax.MultiSteps(optax.chain(clip, optax.sgd(1.0)), every_k_schedule=2)
    params = tree()
    specs = optax.tree_map_params(
        tx.gradient_transformation(),
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        SPECS,
        transform_non_params=lambda _: P(),
    )
    step = helpers.quick_jit(
        jax.shard_map(
            tx.update, mesh=mesh_of(), in_specs=(SPECS, specs), out_specs=(SPECS, specs)
        ),
        donate_argnums=1,
    )
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh_of(), spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    on_one_device = helpers.quick_jit(tx.update)
    state, alone = jax.device_put(tx.init(params), places), tx.init(params)
    for scale in (1.0, 2.0, 30.0, 20.0):
        grads = jax.tree.map(lambda x, scale=scale: scale * x, tree())
        old, (found, state) = state, step(grads, state)
        expected, alone = on_one_device(grads, alone)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        chex.assert_trees_all_close(found, expected, rtol=1e-6)
    # The second mean, 25 times the tree, was clipped to between it and the first.
    assert float(global_norm(found)) < 24 * NORM
    assert float(optclip.metrics(state)["clip/threshold"]) > 2 * NORM
