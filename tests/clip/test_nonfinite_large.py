"""A NaN among 4,096 elements or more is in each maximum of them.

XLA on CPU loses it there (jaxlib 0.10.2 and 0.12.0.1), and in any maximum over devices.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import functional as F

SIDE = 64


def recorded(tx, x):
    return optclip.metrics(tx.update(x, tx.init(x))[1])


def thresholds_recorded(x):
    """The NaN is in a threshold, of which the record has the least."""
    tx = optclip.clip_by_value(lambda step: jnp.abs(x))
    return recorded(tx, jnp.full_like(x, 2.0))["clip/threshold"]


def logits(x):
    key = jnp.ones((SIDE, 1, 2)).at[:, 0].add(x[:, [0, -1]])
    return F.max_attention_logit(jnp.ones((SIDE, 1, 2)), key)


def slices(axis):
    def largest(x, **told):
        tx = optclip.clip_by_norm(0.5, ord=math.inf, axis=axis, **told)
        return recorded(tx, x)["clip/norm"]

    return largest


# Functions of a square matrix, the result of which is NaN if an element is.
MAXIMA = {
    "norm": lambda x: F.global_norm(x, ord=math.inf),
    "norm of order 3": lambda x: F.global_norm(x, ord=3.0),
    "rows": slices(-1),
    "columns": slices(0),
    "singular values": lambda x: F.clip_by_singular_value(x, 0.5),
    "matrix products": lambda x, **told: F.clip_by_singular_value(
        x, 0.5, method="newton_schulz", **told
    ),
    "elements": lambda x: recorded(optclip.clip_by_value(0.5), x)["clip/norm"],
    # So many are recorded in another way.
    "many elements": lambda x: recorded(
        optclip.clip_by_value(0.5), jnp.tile(x, (5, 5))
    )["clip/norm"],
    "thresholds": thresholds_recorded,
    "logits": logits,
}


def matrix(place=None):
    x = jnp.eye(SIDE)
    return x if place is None else x.at[place, place].set(jnp.nan)


@pytest.mark.parametrize("name", MAXIMA)
def test_maxima_of_large_arrays_with_nan_are_nan(name, run):
    function = run(MAXIMA[name])
    assert not np.any(np.isnan(function(matrix())))
    for place in (0, SIDE - 1):
        assert np.all(np.isnan(function(matrix(place))))


@pytest.mark.parametrize("method", ["eigh", "newton_schulz"])
def test_zero_of_a_large_matrix_with_nan_is_zeros(method, run):
    clip = run(
        lambda x: F.clip_by_singular_value(x, 0.5, method=method, nonfinite="zero")
    )
    assert not np.any(clip(matrix(0)))
    np.testing.assert_allclose(clip(matrix()), 0.5 * np.eye(SIDE), atol=1e-5)


def test_skip_skips_a_large_leaf_with_nan(run):
    tx = optclip.skip(optax.sgd(1.0), norm="inf", max_norm=5.0)
    update = run(lambda x: tx.update(x, tx.init(x))[0])
    np.testing.assert_array_equal(update(matrix()), -np.eye(SIDE))
    assert not np.any(update(matrix(0)))


@pytest.mark.parametrize(
    "name", ["norm", "norm of order 3", "rows", "matrix products", "elements"]
)
@pytest.mark.parametrize("mode", ["auto", "shard_map"])
def test_maxima_over_devices_with_nan_are_nan(name, mode):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    function = MAXIMA[name]
    if mode == "shard_map":
        by_axis = name in ("rows", "matrix products")
        told = {"axis_name": P("data")} if by_axis else {}
        function = jax.shard_map(
            functools.partial(function, **told),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data") if name == "matrix products" else P(),
        )
    for place in (0, SIDE - 1):
        x = jax.device_put(matrix(place), NamedSharding(mesh, P("data")))
        assert np.all(np.isnan(jax.jit(function)(x)))
