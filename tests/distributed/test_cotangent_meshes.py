"""Cotangents of activations on meshes: clipped, and counted, as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import clip_cotangent, cotangent_probe

RNG = np.random.default_rng(0)
SHAPE = (8, 6, 16)  # Examples, tokens, features.
SIZES = np.exp(RNG.normal(size=(8, 6, 1)))
X = jnp.asarray(RNG.normal(size=SHAPE), jnp.float32)
COTANGENT = jnp.asarray(RNG.normal(size=SHAPE) * SIZES, jnp.float32)

SPECS = (
    P("data"), P(None, None, "model"), P("data", None, "model"),
    P(None, "data", "model"), P(("data", "model")),
)  # fmt: skip


def fifth(norms):
    return jnp.sort(norms)[-5]


OPTIONS = {
    "row": {},
    "whole": {"axis": None},
    "element": {"axis": ()},
    "two axes": {"axis": (0, 2)},
    "rms": {"relative": "rms"},
    "median": {"relative": "median"},
    "quantile of elements": {"relative": 0.8, "axis": ()},
    "the largest": {"relative": fifth, "response": "drop"},
}


def mesh_of(kind):
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


def gradients(weighted, x, cotangent):
    """The clipped cotangent, and the record of the probe."""

    def value(x, probe):
        return jnp.sum(weighted(x, cotangent, probe))

    return jax.jit(jax.grad(value, argnums=(0, 1)))(x, cotangent_probe())


def weighted_by(options, **more):
    limit = 0.9 if "relative" in options else 2.0

    def weighted(x, cotangent, probe):
        out, _ = clip_cotangent(x, limit, probe=probe, **options, **more)
        return out * cotangent

    return weighted


def on_devices(weighted, spec, **how):
    """A function of shards, whose arrays are split as `spec` says."""
    specs = {"in_specs": (spec, spec, P()), "out_specs": spec}
    return jax.shard_map(weighted, mesh=mesh_of(AxisType.Auto), **specs, **how)


@pytest.fixture(scope="module")
def alone():
    """On one device, with every kind of clip."""
    found = {}
    for name, options in OPTIONS.items():
        found[name] = gradients(weighted_by(options), X, COTANGENT)
        assert found[name][1].cotangent_clipped > 0
    return found


def assert_same(found, wanted):
    def same(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * abs(b).max())

    jax.tree.map(same, found, wanted)


@pytest.mark.covering(name=tuple(OPTIONS), spec=SPECS)
def test_in_shard_map_the_spec_says_what_a_norm_spans(alone, name, spec):
    weighted = weighted_by(OPTIONS[name], axis_name=spec)
    found = gradients(on_devices(weighted, spec), X, COTANGENT)
    assert_same(found, alone[name])


@pytest.mark.covering(
    name=tuple(OPTIONS), spec=SPECS, kind=(AxisType.Auto, AxisType.Explicit)
)
def test_under_jit_xla_and_the_types_say_it(alone, name, spec, kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        x, g = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (X, COTANGENT))
        assert_same(gradients(weighted_by(OPTIONS[name]), x, g), alone[name])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_probe_of_a_vmap_over_split_examples_matches_one_device(kind):
    def weighted(x, cotangent, probe):
        def one(x, g):
            x, passed = clip_cotangent(x, 2.0, probe=probe)
            return clip_cotangent(3 * x, 4.0, probe=passed)[0] * g

        return jax.vmap(one)(x, cotangent)

    expected = gradients(weighted, X, COTANGENT)
    assert expected[1].cotangent_norms == 2 * 8 * 6
    assert expected[1].cotangent_clipped > 48
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data"))
        x, g = (jax.device_put(a, place) for a in (X, COTANGENT))
        assert_same(gradients(weighted, x, g), expected)


@pytest.mark.parametrize(
    ("name", "spec", "axis_name"),
    [
        ("row", P("data"), ()),
        ("row", P("data", None, "model"), "model"),
        ("median", P("data", None, "model"), ("model",)),
        ("whole", P("data", None, "model"), None),
    ],
)
def test_names_do_where_types_say_the_rest(alone, name, spec, axis_name):
    weighted = weighted_by(OPTIONS[name], axis_name=axis_name)
    found = gradients(on_devices(weighted, spec), X, COTANGENT)
    assert_same(found, alone[name])


def test_what_a_row_spans_is_asked_for_where_no_type_says_it():
    mesh = mesh_of(AxisType.Auto)
    specs = {"in_specs": P("data"), "out_specs": P("data")}

    def rows(x, **how):
        return jax.shard_map(
            lambda x: clip_cotangent(x, 2.0, **how), mesh=mesh, **specs
        )(x)

    with pytest.raises(ValueError, match="split over the mesh axes.*PartitionSpecs"):
        rows(X)
    _, pull = jax.vjp(lambda x: rows(x, axis_name=P("data")), X)
    assert float(jnp.max(jnp.abs(pull(COTANGENT)[0] - COTANGENT))) > 1
    unchecked = {"mesh": mesh, "check_vma": False, **specs}
    with pytest.raises(ValueError, match="check_vma=False.*Give axis_name=()"):
        jax.shard_map(lambda x: clip_cotangent(x, 2.0), **unchecked)(X)


@pytest.mark.parametrize("name", ["row", "element", "two axes", "median"])
def test_with_check_vma_off_the_spec_says_it_too(alone, name):
    """Of activations that are split over all mesh axes, which at_scale.md asks for."""
    spec = P("data", None, "model")
    limit = 0.9 if name == "median" else 2.0

    def weighted(x, cotangent, probe):
        del probe
        out = clip_cotangent(x, limit, **OPTIONS[name], axis_name=spec)
        return out * cotangent

    found = gradients(on_devices(weighted, spec, check_vma=False), X, COTANGENT)
    assert_same(found[0], alone[name][0])


def test_steps_of_a_scan_on_devices_are_counted_once():
    """Features split, tokens whole: the largest norm is that of all of them."""

    def run(x, probe, **how):
        def step(carry, row):
            h, probe = clip_cotangent(carry[0] * 0.9 + row, 0.5, probe=carry[1], **how)
            return (h, probe), None

        start = jax.tree.map(jnp.zeros_like, x[0]) * x[0]
        (h, _), _ = jax.lax.scan(step, (start, probe), x)
        return jnp.sum(h**2, axis=-1)

    def value(function, x, probe):
        return jnp.sum(function(x, probe))

    wanted = jax.grad(value, argnums=(1, 2))(run, X, cotangent_probe())
    spec = P(None, None, "model")

    def mapped(x, probe):
        local = run(x, probe, axis_name=P(None, "model"))
        return jax.lax.psum(local, "model")

    found = jax.shard_map(
        mapped, mesh=mesh_of(AxisType.Auto), in_specs=(spec, P()), out_specs=P()
    )
    gradient = jax.jit(jax.grad(value, argnums=(1, 2)), static_argnums=0)
    assert_same(gradient(found, X, cotangent_probe()), wanted)
    assert optclip.metrics(wanted[1])["cotangent/fraction"] > 0


@pytest.mark.parametrize("name", ["row", "rms", "median"])
def test_second_derivatives_on_devices_are_those_of_one(name):
    options = OPTIONS[name]
    limit = 0.9 if "relative" in options else 2.0
    spec = P("data", None, "model")

    def cubes(x, probe, **how):
        out, _ = clip_cotangent(x, limit, probe=probe, **options, **how)
        return out**3

    def bend(function):
        def slope(x):
            gradient = jax.grad(lambda x: jnp.sum(function(x, cotangent_probe())))
            return jnp.sum(gradient(x) ** 2)

        return jax.jit(jax.grad(slope))(COTANGENT)

    mapped = jax.shard_map(
        lambda x, probe: cubes(x, probe, axis_name=spec),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(spec, P()),
        out_specs=spec,
    )
    assert_same(bend(mapped), bend(cubes))


def test_what_is_compared_is_asked_for_where_no_type_says_it():
    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}

    def compared(x, **how):
        return jax.shard_map(
            lambda x: clip_cotangent(x, 0.9, relative="median", **how),
            mesh=mesh_of(AxisType.Auto),
            **specs,
        )(x)

    for how in ({"axis": ()}, {"axis_name": ()}, {"axis_name": "model"}):
        with pytest.raises(ValueError, match="`axis_name` must be the PartitionSpec"):
            compared(X, **how)
