"""Matrices on a mesh: split on one side their Gram matrix is added over devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from optclip.functional import clip_by_singular_value, clip_by_spectral_norm

CLIPS = {
    "spectral norm": functools.partial(clip_by_spectral_norm, max_norm=2.0),
    "eigh": functools.partial(clip_by_singular_value, max_value=2.0),
    "products": functools.partial(
        clip_by_singular_value, max_value=2.0, method="newton_schulz"
    ),
}
each_clip = pytest.mark.parametrize("clip", CLIPS)


def matrix():
    return jnp.asarray(np.random.default_rng(0).standard_normal((16, 48)), jnp.float32)


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))


def same(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(np.asarray(want) - matrix()).max() > 0.1


@each_clip
@pytest.mark.parametrize("spec", [P(None, "a"), P("b", None), P(None, ("a", "b"))])
def test_in_shard_map_a_matrix_split_on_one_side_is_clipped_as_a_whole(clip, spec):
    clip = CLIPS[clip]
    mapped = jax.shard_map(
        functools.partial(clip, axis_name=spec), mesh=mesh(), in_specs=spec,
        out_specs=spec,
    )  # fmt: skip
    same(jax.jit(mapped)(matrix()), clip(matrix()))


@pytest.mark.parametrize("method", ["eigh", "newton_schulz"])
def test_in_shard_map_as_many_singular_values_are_recorded_as_there_are(method):
    """Also where the smaller side is split, so that the Gram matrix is the large one."""
    spec = P("b", None)

    def record(x, axis_name):
        tx = optclip.clip_by_singular_value(2.0, method=method, axis_name=axis_name)
        return optclip.metrics(tx.update(x, tx.init(x))[1])

    mapped = jax.shard_map(
        lambda x: record(x, spec), mesh=mesh(), in_specs=spec, out_specs=P()
    )
    got, want = jax.jit(mapped)(matrix()), record(matrix(), None)
    assert want["clip/fraction"] == 1
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_on_explicit_axes_power_iteration_takes_a_matrix_split_on_either_side():
    devices = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    tx = optclip.clip_by_spectral_norm(2.0, method="power_iteration", steps=100)

    def twice(x):
        _, state = tx.update(x, tx.init(x))
        return tx.update(x, state)[0]

    with jax.set_mesh(devices):
        for spec in (P(None, "a"), P("b", None), P("b", "a")):
            x = jax.device_put(matrix(), NamedSharding(devices, spec))
            same(jax.jit(twice)(x), clip_by_spectral_norm(matrix(), 2.0))


@each_clip
def test_in_shard_map_a_matrix_split_on_both_sides_is_refused(clip):
    spec = P("b", "a")
    mapped = jax.shard_map(
        functools.partial(CLIPS[clip], axis_name=spec), mesh=mesh(), in_specs=spec,
        out_specs=spec,
    )  # fmt: skip
    words = r"whole on one of its sides.* axes \('b',\) and \('a',\)"
    with pytest.raises(ValueError, match=words):
        jax.jit(mapped)(matrix())


@pytest.mark.parametrize("largest", [10, 2000])
@pytest.mark.parametrize("spec", [P(None, "a"), P("b", None)])
def test_derivatives_are_those_on_one_device(spec, largest):
    """In shard_map, and on Explicit axes, which ask where each product is to be.

    Where the smaller side is split, two thirds of the singular values are zeros.
    """
    u, s, vt = np.linalg.svd(matrix(), full_matrices=False)
    x = jnp.asarray(u * np.append(largest, s[1:]) @ vt, jnp.float32)
    along = matrix()[::-1]

    def change(clip, x, along):
        return jax.jvp(clip, (x,), (along,))[1]

    want = jax.jit(functools.partial(change, CLIPS["eigh"]))(x, along)
    clip = functools.partial(CLIPS["eigh"], axis_name=spec)
    mapped = jax.shard_map(
        functools.partial(change, clip), mesh=mesh(), in_specs=(spec, spec),
        out_specs=spec,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(mapped)(x, along), want, atol=1e-4)
    devices = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(devices):
        place = NamedSharding(devices, spec)
        given = (jax.device_put(each, place) for each in (x, along))
        found = jax.jit(functools.partial(change, CLIPS["eigh"]))(*given)
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_in_shard_map_power_iteration_wants_whole_matrices():
    spec = P(None, "a")
    tx = optclip.clip_by_spectral_norm(2.0, method="power_iteration", axis_name=spec)
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(x))[0], mesh=mesh(), in_specs=spec,
        out_specs=spec,
    )  # fmt: skip
    with pytest.raises(ValueError, match="method='exact'"):
        jax.jit(mapped)(matrix())


@each_clip
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(None, "a"), P("b", None), P("b", "a")])
def test_under_jit_split_matrices_are_clipped_as_on_one_device(clip, kind, spec):
    clip = CLIPS[clip]
    devices = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(devices):
        x = jax.device_put(matrix(), NamedSharding(devices, spec))
        got = jax.jit(clip)(x)
    same(got, clip(matrix()))


@each_clip
def test_a_larger_side_that_is_split_is_not_gathered(clip):
    place = NamedSharding(mesh(), P(None, "a"))
    compiled = jax.jit(
        CLIPS[clip], in_shardings=place, out_shardings=place
    ).lower(matrix()).compile()  # fmt: skip
    text = compiled.as_text()
    assert "all-reduce" in text
    gathered = [line for line in text.splitlines() if " all-gather" in line]
    assert not any("16,48]" in line for line in gathered), gathered


@pytest.mark.parametrize("spec", [P(None, "a"), P("b", None)])
def test_in_shard_map_spectra_scales_by_the_shape_of_the_whole(spec):
    def step(x):
        tx = optclip.recipes.spectra(optax.identity(), 2.0, axis_name=spec)
        return tx.update(x, tx.init(x))[0]

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=spec, out_specs=spec)
    want = np.sqrt(3) * CLIPS["products"](matrix(), response="soft")
    same(jax.jit(mapped)(matrix()), want)
