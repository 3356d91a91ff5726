"""Matrices on a mesh: devices sum the Gram matrices of a sharded side."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

import optclip
from optclip.functional import clip_by_singular_value
from tests.support import covering, helpers, meshes, oracles


def orthogonalize(matrix_axes=(-2, -1), **options):
    over = optclip.singular_values(matrix_axes, method="newton_schulz")
    return optclip.clip_by(2.0, over=over, response="normalize", **options)


CLIPS = {
    "spectral norm": functools.partial(optclip.clip_by_spectral_norm, 2.0),
    "eigh": functools.partial(optclip.clip_by_singular_value, 2.0),
    "products": functools.partial(
        optclip.clip_by_singular_value, 2.0, method="newton_schulz"
    ),
    "orthogonal": orthogonalize,
    "power iteration": functools.partial(
        optclip.clip_by_spectral_norm, 2.0, method="power_iteration", steps=20
    ),
}
LARGER, SMALLER, BOTH = P(None, ("data", "model")), P("data", None), P("data", "model")
MATRIX = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
# Of the matrix with its columns on three axes, both of them split, or both of its sides.
FLAT, FLAT_BOTH = P(None, "data", "model", None), P("data", None, "model", None)
ONE_SIDE = [LARGER, SMALLER, FLAT]


def shaped(spec):
    """Return the matrix in the shape of the spec, and the option for this shape."""
    if len(spec) == 2:
        return MATRIX, {}
    return MATRIX.reshape(8, 2, 4, 3), {"matrix_axes": (0, ...)}


def update_of(tx):
    return helpers.quick_jit(meshes.update_of(tx))


def mapped(function, spec, out, count=1):
    return helpers.quick_jit(
        jax.shard_map(
            function,
            mesh=meshes.mesh_of("2x4", "shard_map"),
            in_specs=(spec,) * count,
            out_specs=out,
        )
    )


@functools.cache
def on_one_device(clip):
    return update_of(CLIPS[clip]())(MATRIX)


@pytest.mark.covering(
    clip=list(CLIPS),
    spec=[LARGER, SMALLER, BOTH, FLAT, FLAT_BOTH],
    mode=meshes.MODES,
    where=lambda clip, spec, mode: (
        (mode != "shard_map" or (spec in ONE_SIDE and clip != "power iteration"))
        # Of the same products as the default cap by products.
        and (covering.full or clip != "orthogonal")
    ),
)
def test_matrix_clip_split_matches_one_device(clip, spec, mode):
    """Also the number of singular values, where the larger Gram matrix is used."""
    mesh, (given, options) = meshes.mesh_of("2x4", mode), shaped(spec)
    if mode == "shard_map":
        tx = CLIPS[clip](axis_name=spec, **options)
        update = mapped(meshes.update_of(tx), spec, (spec, P()))
    else:
        update = update_of(CLIPS[clip](**options))
        given = jax.device_put(given, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        updates, metrics = update(given)
    updates = np.asarray(updates).reshape(MATRIX.shape)
    expected, expected_metrics = on_one_device(clip)
    assert np.max(np.abs(expected - MATRIX)) > 0.1
    np.testing.assert_allclose(updates, expected, atol=2e-5)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-5)


@pytest.mark.parametrize("clip", list(CLIPS)[:3])
def test_matrix_clip_larger_split_side_is_not_gathered(clip):
    place = NamedSharding(meshes.mesh_of("2x4", "auto"), LARGER)
    update = helpers.quick_jit(
        meshes.update_of(CLIPS[clip]()),
        in_shardings=place,
        out_shardings=(place, None),
    )
    program = update.lower(MATRIX).compile().as_text()
    assert "all-reduce" in program
    gathered = [line for line in program.splitlines() if " all-gather" in line]
    assert not any("8,24]" in line for line in gathered), gathered


@pytest.mark.parametrize(
    ("clip", "spec", "words"),
    [
        *((clip, BOTH, "split along one side only") for clip in list(CLIPS)[:3]),
        ("eigh", FLAT_BOTH, "split along one side only"),
        ("power iteration", LARGER, "method='exact'"),
    ],
)
def test_matrix_clip_shard_map_missing_side_raises(clip, spec, words):
    x, options = shaped(spec)
    tx = CLIPS[clip](axis_name=spec, **options)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(mapped(meshes.update_of(tx), spec, (spec, P())), x)


def change(axis_name, x, along):
    def clip(x):
        return clip_by_singular_value(x, 2.0, axis_name=axis_name)

    return jax.jvp(clip, (x,), (along,))[1]


change_under_jit = helpers.quick_jit(functools.partial(change, None))


@pytest.mark.parametrize(
    ("spec", "largest"),
    [(LARGER, 10), (SMALLER, 2000)] + [(LARGER, 2000), (SMALLER, 10)] * covering.full,
)
def test_singular_value_derivative_split_matches_one_device(spec, largest):
    """In shard_map, and on Explicit axes, where each product needs a sharding.

    Where the smaller side is split, two thirds of the singular values are zeros.
    """
    u, s, vt = np.linalg.svd(MATRIX, full_matrices=False)
    x = np.float32(u * np.append(largest, s[1:]) @ vt)
    along = MATRIX[::-1]
    expected = change_under_jit(x, along)
    assert np.max(np.abs(expected - along)) > 0.1
    in_shard_map = mapped(functools.partial(change, spec), spec, spec, count=2)
    np.testing.assert_allclose(in_shard_map(x, along), expected, atol=1e-4)
    mesh = meshes.mesh_of("2x4", "explicit")
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, spec)
        derivative = change_under_jit(*jax.device_put((x, along), place))
    np.testing.assert_allclose(derivative, expected, atol=1e-4)


@pytest.mark.parametrize("spec", ONE_SIDE)
def test_spectra_in_shard_map_scales_by_whole_shape(spec):
    x, options = shaped(spec)
    tx = optclip.recipes.spectra(optax.identity(), 2.0, axis_name=spec, **options)
    updates, _ = mapped(meshes.update_of(tx), spec, (spec, P()))(x)
    smooth = oracles.by_singular_value(np.float64(MATRIX), 2.0, oracles.smooth)
    np.testing.assert_allclose(
        np.ravel(updates), np.sqrt(3) * smooth.ravel(), atol=5e-5
    )
