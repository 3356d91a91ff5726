"""AGC's units: each output of a layer by itself, whatever its rank, stacked or not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes


def arrays(shape, seed=0):
    rng = np.random.default_rng(seed)
    params, grads = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    return params, grads * rng.choice([1e-3, 1.0], size=shape[-1:])


def expected_of(grads, params, axis, ratio=0.01, least=1e-3):
    """Brock et al. 2021, equation 3, in float64."""
    grads, params = (np.asarray(x, np.float64) for x in (grads, params))
    n = np.sqrt(np.sum(grads**2, axis=axis, keepdims=True))
    size = np.sqrt(np.sum(params**2, axis=axis, keepdims=True))
    limit = ratio * np.maximum(size, least)
    return np.where(n > limit, grads * limit / np.where(n > 0, n, 1), grads)


def clipped(tx, grads, params):
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((), ()),
        ((5,), (0,)),
        ((4, 5), (0,)),
        ((3, 4, 5), (0, 1)),
        ((2, 3, 4, 5), (0, 1, 2)),
        ((2, 2, 2, 3, 4, 5), (0, 1, 2, 3, 4)),
    ],
)
def test_units_of_every_rank_are_those_of_the_paper(shape, axis):
    params, grads = arrays(shape) if shape else (np.float32(2.0), np.float32(3.0))
    found = clipped(recipes.agc(), grads, params)
    expected = expected_of(grads, params, axis)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    assert not np.allclose(found, grads)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4, 5)])
def test_units_are_as_in_optax_where_that_is_right(shape):
    params, grads = arrays(shape)
    theirs = optax.adaptive_grad_clip(0.01)
    expected, _ = theirs.update(grads, theirs.init(params), params)
    found = clipped(recipes.agc(), grads, params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_stacked_layers_are_as_if_apart():
    layers = {"kernel": (4, 5), "bias": (5,), "scale": ()}
    pairs = {
        name: [arrays(shape, i) if shape else (np.float32(i), np.float32(1)) for i in range(3)]
        for name, shape in layers.items()
    }  # fmt: skip
    apart = {
        name: [np.asarray(clipped(recipes.agc(), g, p)) for p, g in rows]
        for name, rows in pairs.items()
    }
    stacked = {
        i: {"layers": {name: np.stack([row[i] for row in rows]) for name, rows in pairs.items()}}
        for i in range(2)
    }  # fmt: skip
    tx = recipes.agc(stacked=lambda path: path.startswith("layers"))
    found = clipped(tx, stacked[1], stacked[0])["layers"]
    for name, rows in apart.items():
        np.testing.assert_allclose(found[name], np.stack(rows), rtol=1e-6, atol=1e-9)
    plain = clipped(recipes.agc(), stacked[1], stacked[0])["layers"]
    assert not np.allclose(plain["bias"], found["bias"])


def test_axes_of_units_may_go_by_path_and_shape():
    params, grads = arrays((4, 2, 5))

    def axis(path, shape):
        assert len(shape) == 3
        return 0 if "attention" in path else None

    tx = recipes.agc(axis=axis)
    tree = {"attention": grads, "conv": grads}
    found = clipped(tx, tree, {"attention": params, "conv": params})
    heads, conv = expected_of(grads, params, (0,)), expected_of(grads, params, (0, 1))
    np.testing.assert_allclose(found["attention"], heads, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["conv"], conv, rtol=1e-5, atol=1e-9)


def test_a_zero_parameter_can_move_and_the_head_is_left_out():
    params = {"body": jnp.zeros((3, 2)), "head": jnp.zeros((3, 2))}
    grads = {"body": jnp.ones((3, 2)), "head": jnp.ones((3, 2))}
    mask = optclip.by_path(lambda path: "head" not in path)
    found = clipped(recipes.agc(mask=mask), grads, params)
    norms = np.linalg.norm(found["body"], axis=0)
    np.testing.assert_allclose(norms, 1e-5, rtol=1e-5)
    np.testing.assert_array_equal(found["head"], grads["head"])


def test_parameters_of_a_dead_run_clip_nothing():
    """Their squares are not kept in range; those of the gradients are."""
    tx = optclip.clip_by_norm(optclip.thresholds.relative_to_params(0.5))
    grads, huge = jnp.array([6e25, 8e25]), jnp.full(2, 1e25)
    found, _ = tx.update(grads, tx.init(grads), huge)
    np.testing.assert_array_equal(found, grads)
    dropping = optclip.clip_by_norm(
        optclip.thresholds.relative_to_params(0.5), nonfinite="drop"
    )
    found, _ = dropping.update(grads, dropping.init(grads), huge)
    np.testing.assert_array_equal(found, grads)
    found, _ = tx.update(grads, tx.init(grads), jnp.array([6.0, 8.0]))
    np.testing.assert_allclose(found, [3.0, 4.0], rtol=1e-6)
