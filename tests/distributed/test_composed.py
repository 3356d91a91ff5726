"""`shard_map` with other JAX features: partly manual, nested, vmap and grad."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from optclip.functional import clip_by_global_norm, global_norm
from tests.support import helpers
from tests.support.mapped import NORM, SPECS, TREE, mapped, mesh_of


def only(axis):
    """Reduce the specs to `axis`, for a map over only that axis."""
    return {
        key: P(*(name if name == axis else None for name in spec))
        for key, spec in SPECS.items()
    }


@pytest.mark.parametrize(
    ("axis", "kind"), [("data", AxisType.Auto), ("model", AxisType.Explicit)], ids=str
)
def test_global_norm_partly_manual_mesh_spans_all_axes(axis, kind):
    mesh, specs = mesh_of(kind), only(axis)
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
    with jax.set_mesh(mesh):
        step = jax.shard_map(
            lambda tree: clip_by_global_norm(tree, 1.0),
            in_specs=(specs,),
            out_specs=(specs, P()),
            axis_names={axis},
        )
        clipped, norm = helpers.quick_jit(step)(jax.device_put(TREE, places))
    np.testing.assert_allclose(norm, NORM, rtol=1e-6)
    for key, x in TREE.items():
        np.testing.assert_allclose(clipped[key], x / NORM, rtol=1e-6)


def test_global_norm_nested_maps_spans_both_axes():
    inner = jax.shard_map(
        global_norm, in_specs=(only("model"),), out_specs=P(), axis_names={"model"}
    )
    outer = jax.shard_map(
        inner,
        mesh=mesh_of(),
        in_specs=(only("data"),),
        out_specs=P(),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh_of()):
        np.testing.assert_allclose(helpers.quick_jit(outer)(TREE), NORM, rtol=1e-6)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="jax 0.8.3 has no psum in such a vmap"
)
def test_global_norm_vmap_in_map_spans_devices_per_example():
    def norms(tree):
        scales = jnp.array([1.0, 2.0])
        return jax.vmap(lambda s: global_norm(jax.tree.map(lambda x: s * x, tree)))(
            scales
        )

    np.testing.assert_allclose(mapped(norms)(TREE), [NORM, 2 * NORM], rtol=1e-6)


def test_clip_derivative_in_map_goes_through_whole_norm():
    def gradients(total):
        def loss(tree, ord):
            clipped, norm = clip_by_global_norm(tree, 2.0, ord=ord)
            cubes = {key: jnp.sum(x**3) for key, x in clipped.items()}
            return norm + sum(total(key, cube) for key, cube in cubes.items())

        return lambda tree: [jax.grad(loss)(tree, ord) for ord in (2, 3, np.inf)]

    def over_devices(key, cube):
        axes = {"both": ("data", "model"), "split": "data", "whole": ()}[key]
        return jax.lax.psum(cube, axes) if axes else cube

    found = mapped(gradients(over_devices), [SPECS] * 3)(TREE)
    expected = helpers.quick_jit(gradients(lambda key, cube: cube))(TREE)
    assert all(np.any(x) for x in jax.tree.leaves(expected))
    chex.assert_trees_all_close(found, expected, rtol=2e-6, atol=1e-6)
