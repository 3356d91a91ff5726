"""Cotangents of activations on meshes are clipped and counted as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import optclip
from optclip import clip_cotangent, cotangent_probe
from tests.support import covering, meshes
from tests.support.helpers import assert_close, quick_jit

SHAPE = (8, 6, 16)  # Examples, tokens, features.
SIZES = np.exp(np.random.default_rng(0).normal(size=(8, 6, 1)))
X = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
COTANGENT = (np.random.default_rng(2).normal(size=SHAPE) * SIZES).astype(np.float32)

DATA, MODEL = P("data"), P("data", None, "model")
TOKENS, BOTH = P(None, "data", "model"), P(("data", "model"))


OPTIONS = {
    "row": {},
    "whole": {"axis": None},
    "element": {"axis": ()},
    "two axes": {"axis": (0, 2)},
    "median": {"relative": "median"},
    "median of elements": {"relative": "median", "axis": ()},
    "the largest": {"relative": lambda n: jnp.sort(n)[-5], "response": "drop"},
}


def gradients(weighted, x, cotangent):
    """Return the clipped cotangent, and the record of the probe."""

    def value(x, probe):
        return jnp.sum(weighted(x, cotangent, probe))

    return quick_jit(jax.grad(value, argnums=(0, 1)))(x, cotangent_probe())


def weighted_by(name, **more):
    limit = 0.9 if "relative" in OPTIONS[name] else 2.0

    def weighted(x, cotangent, probe):
        out, _ = clip_cotangent(x, limit, probe=probe, **OPTIONS[name], **more)
        return out * cotangent

    return weighted


def on_devices(weighted, spec, **how):
    """Return a function of shards, whose arrays are split as `spec` says."""
    specs = {"in_specs": (spec, spec, P()), "out_specs": spec}
    return jax.shard_map(weighted, mesh=meshes.mesh_of("2x4", "auto"), **specs, **how)


def on_mesh(weighted, spec, mode):
    mesh = meshes.mesh_of("2x4", mode)
    with jax.set_mesh(mesh):
        x, g = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (X, COTANGENT))
        return gradients(weighted, x, g)


@pytest.fixture(scope="module")
def alone():
    """Clip on one device with every kind of clipping."""
    found = {}
    for name in OPTIONS:
        found[name] = gradients(weighted_by(name), X, COTANGENT)
        assert found[name][1].cotangent_clipped > 0
    return found


@pytest.mark.parametrize(
    ("name", "spec", "axis_name"),
    [
        # A norm within a device, over some devices, over all of them.
        ("row", MODEL, MODEL), ("two axes", BOTH, BOTH), ("element", TOKENS, TOKENS),
        ("median", BOTH, BOTH), ("median of elements", TOKENS, TOKENS),
        ("the largest", DATA, DATA),
        # Axis names suffice if types specify the rest.
        ("row", DATA, ()), ("row", MODEL, "model"), ("median", MODEL, ("model",)),
        ("whole", MODEL, None),
        *[("row", DATA, DATA), ("two axes", TOKENS, TOKENS), ("median", MODEL, MODEL)]
        * covering.full,
    ],
)  # fmt: skip
def test_clip_cotangent_in_shard_map_equals_one_device(alone, name, spec, axis_name):
    weighted = weighted_by(name, axis_name=axis_name)
    found = gradients(on_devices(weighted, spec), X, COTANGENT)
    assert_close(found, alone[name])


@pytest.mark.parametrize("name", ["two axes", "median"])
def test_clip_cotangent_without_check_vma_equals_one_device(alone, name):
    """Of activations that are split over all mesh axes."""

    def weighted(x, cotangent, probe):
        # Without types, a record of all devices has no spec.
        del probe
        limit = 0.9 if name == "median" else 2.0
        return clip_cotangent(x, limit, **OPTIONS[name], axis_name=MODEL) * cotangent

    found = gradients(on_devices(weighted, MODEL, check_vma=False), X, COTANGENT)
    assert_close(found[0], alone[name][0])


@pytest.mark.parametrize(
    ("name", "spec", "mode"),
    [
        ("whole", TOKENS, "auto"), ("median", MODEL, "auto"),
        ("row", MODEL, "explicit"), ("two axes", BOTH, "explicit"),
        ("median", TOKENS, "explicit"), ("median", DATA, "explicit"),
        ("median of elements", BOTH, "explicit"),
        ("the largest", MODEL, "explicit"),
    ],
)  # fmt: skip
def test_clip_cotangent_of_sharded_array_equals_one_device(alone, name, spec, mode):
    assert_close(on_mesh(weighted_by(name), spec, mode), alone[name])


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_probe_in_vmap_over_split_examples_equals_one_device(mode):
    def weighted(x, cotangent, probe):
        def one(x, g):
            x, passed = clip_cotangent(x, 2.0, probe=probe)
            return clip_cotangent(3 * x, 4.0, probe=passed)[0] * g

        return jax.vmap(one)(x, cotangent)

    expected = gradients(weighted, X, COTANGENT)
    assert expected[1].cotangent_norms == 2 * 8 * 6
    assert expected[1].cotangent_clipped > 48
    assert_close(on_mesh(weighted, DATA, mode), expected)


MEDIAN = {"relative": "median"}


@pytest.mark.parametrize(
    ("how", "check_vma", "words"),
    [
        ({}, True, "split over the mesh axes.*PartitionSpecs"),
        ({}, False, "check_vma=False.*Pass axis_name=()"),
        # No type specifies on which devices the other norms are.
        (MEDIAN | {"axis": ()}, False, "`axis_name` must be the PartitionSpec"),
        (MEDIAN | {"axis_name": ()}, False, "`axis_name` must be the PartitionSpec"),
        (
            MEDIAN | {"axis_name": "model"},
            False,
            "`axis_name` must be the PartitionSpec",
        ),
    ],
)
def test_clip_cotangent_without_axis_name_in_shard_map_raises(how, check_vma, words):
    mapped = jax.shard_map(
        lambda x: clip_cotangent(x, 2.0, **how), mesh=meshes.mesh_of("2x4", "auto"),
        in_specs=DATA, out_specs=DATA, check_vma=check_vma,
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(mapped, X)


def test_probe_in_scan_on_devices_counts_each_norm_once():
    """With sharded features and whole tokens, the largest norm covers all tokens."""

    def run(x, scale, probe, **how):
        def step(carry, row):
            h, probe = clip_cotangent(carry[0] * 0.9 + row, 0.5, probe=carry[1], **how)
            return (h, probe), None

        start = jax.tree.map(jnp.zeros_like, x[0]) * x[0]
        (h, _), _ = jax.lax.scan(step, (start, probe), x)
        return scale * jnp.sum(h**2, axis=-1)

    def of_devices(x, scale, probe):
        summed = run(x, scale, probe, axis_name=P(None, "model"))
        return jax.lax.psum(summed, "model")

    expected = gradients(run, X, 1.0)
    mapped = jax.shard_map(
        of_devices, mesh=meshes.mesh_of("2x4", "auto"), out_specs=P(),
        in_specs=(P(None, None, "model"), P(), P()),
    )  # fmt: skip
    assert_close(gradients(mapped, X, 1.0), expected)
    assert optclip.metrics(expected[1])["cotangent/fraction"] > 0
