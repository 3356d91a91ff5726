"""What method="ghost" rejects, and its sum for unusual data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip.per_example import clipped_grad, norms
from tests.support.helpers import optimized_jit, quick_jit

ONES, BATCH = np.ones(2, np.float32), np.ones((3, 2), np.float32)


def linear(w, x):
    return jnp.sum(w * x)


def dense(w, x):
    return jnp.sum(jnp.tanh(x @ w))


@pytest.mark.parametrize(
    ("params", "over", "threshold"),
    [
        ({}, "tree", 1.0),
        (
            {"w": ONES, "v": None},
            *(optclip.groups({"w": "a", "v": "b"}), {"a": 1.0, "b": 1.0}),
        ),
    ],
    ids=["none", "group"],
)
def test_ghost_without_leaves_equals_vmap(params, over, threshold):
    def loss(p, x):
        return jnp.sum(x) + sum(linear(w, x) for w in jax.tree.leaves(p))

    results = []
    for method in ("vmap", "ghost"):
        f = clipped_grad(loss, threshold, method=method, over=over)
        measure = norms(loss, method=method, over=over)
        results.append((f(params, BATCH), measure(params, BATCH)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_ghost_rejects_complex_parameters():
    params = np.ones(2, np.complex64)

    def modulus(w, x):
        return jnp.sum(jnp.abs(w * x))

    with pytest.raises(ValueError, match="complex parameters.*method='vmap'"):
        clipped_grad(modulus, 1.0, method="ghost", strict=False)(params, BATCH)
    f = clipped_grad(modulus, 1.0)
    found, _ = quick_jit(f)(params, BATCH)
    np.testing.assert_allclose(found, 3 * ONES / np.sqrt(2), rtol=1e-3)


# A loss, its parameter `n` and the error.
REJECTED = {
    "integer": (
        lambda p, x: linear(p["w"], x),
        np.int32(300),
        "dense array of floats .* got the leaf 'n'",
    ),
    "probe": (
        lambda p, x: jnp.sum(optclip.clip_cotangent(p["w"] * x, 1.0, probe=p["n"])[0]),
        optclip.cotangent_probe(),
        "must not contain a cotangent_probe",
    ),
}


@pytest.mark.parametrize("method", ["vmap", "ghost"])
@pytest.mark.parametrize("name", REJECTED)
def test_clipped_grad_parameter_without_gradient_raises(name, method):
    loss, n, words = REJECTED[name]
    f = clipped_grad(loss, 1.0, method=method)
    with pytest.raises(TypeError, match=words):
        f({"w": ONES, "n": n}, BATCH)


def square_in(of_data=None, of_weight=None):
    def loss(w, x):
        w = w.astype(of_weight).astype(w.dtype) if of_weight else w
        x, w = (x.astype(of_data), w.astype(of_data)) if of_data else (x, w)
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) ** 2)

    return loss


WIDE = (np.random.default_rng(0).normal(size=(32, 32)) / 9).astype(np.float32)
SAME = np.tile(np.float32(np.random.default_rng(1).normal(size=32)), (512, 1))


@pytest.mark.parametrize("casts", [("bfloat16", None), (None, "float16")], ids=str)
def test_strict_ghost_in_half_precision_raises(casts):
    """The sum over examples is rounded to the dtype in which parameters meet data."""
    loss = square_in(*casts)
    for params in (WIDE, jnp.asarray(WIDE, jnp.bfloat16)):
        with pytest.raises(ValueError, match="`strict` must be False .*bfloat16"):
            jax.eval_shape(clipped_grad(loss, 0.01, method="ghost"), params, SAME)


def test_ghost_of_half_precision_parameters_is_float32_without_strict():
    half = jnp.ones(2, jnp.bfloat16)
    f = clipped_grad(linear, 1.0, method="ghost", strict=False)
    found, info = quick_jit(f)(half, BATCH)
    assert found.dtype == np.float32
    np.testing.assert_allclose(info.norms, np.sqrt(2), rtol=1e-2)
    # Computing only norms needs no sum.
    jax.eval_shape(norms(linear, method="ghost"), half, BATCH)


def test_ghost_sum_in_float32_keeps_bound():
    f = clipped_grad(square_in(), 0.01, method="ghost")
    run = optimized_jit(f)
    whole, info = run(WIDE, SAME, padding=np.zeros(512, bool))
    less, _ = run(WIDE, SAME, padding=np.arange(512) == 7)
    assert (info.norms > 0.01).all()
    change = np.linalg.norm(np.float64(whole) - np.float64(less))
    assert 0.0099 < change <= f.sensitivity() * (1 + 512 * 515 * 2.0**-23)


def test_ghost_sum_has_derivative_by_closed_over_value():
    """Through the norms too: `c` scales gradients, of which one of two is clipped."""
    w, x = np.float32(np.eye(3) / 3), np.float32(np.arange(6).reshape(2, 3) / 6)

    def total(c, method):
        f = clipped_grad(lambda w, e: c * dense(w, e), 0.5, method=method, strict=False)
        grads, info = f(w, x)
        return jnp.sum(grads * w), info.coefficients

    run = quick_jit(jax.grad(total, has_aux=True), static_argnums=1)
    found, coefficients = run(0.4, "ghost")
    np.testing.assert_array_equal(coefficients < 1, [False, True])
    np.testing.assert_allclose(found, run(0.4, "vmap")[0], rtol=1e-5)


def test_ghost_sum_ignores_data_that_derivatives_divide_by():
    """The first example has infinite derivatives and cotangents, the last is padding."""
    x = np.array([[1.0, 0.0], [1.0, 2.0], [2.0, 0.5], [0.0, 0.0]], np.float32)
    params, padding = {"w": ONES, "v": ONES}, np.arange(4) == 3

    def loss(p, x):
        return jnp.sum(p["w"] / x) + jnp.sum(jnp.sqrt(p["v"] * x))

    ghost, vmap = (
        quick_jit(clipped_grad(loss, 1.0, over="leaf", method=method))
        for method in ("ghost", "vmap")
    )
    found, info = ghost(params, x, padding=padding)
    wanted, _ = vmap(params, x, padding=padding)
    coefficients = info.coefficients["w"]
    np.testing.assert_array_equal(coefficients == 0, [True, False, False, True])
    assert (coefficients < 1).all()
    nothing, _ = ghost(params, x, padding=np.ones(4, bool))
    for key, right in wanted.items():
        np.testing.assert_allclose(found[key], right, rtol=1e-5)
        np.testing.assert_array_equal(nothing[key], 0)


def test_ghost_propagate_makes_rows_nan_that_example_does_not_use():
    def loss(rows, example):
        ids, x = example
        return jnp.sum(rows[ids] * x)

    rows = np.ones((4, 2), np.float32)
    ids, x = np.array([0, 1]), np.array([[np.nan, 1], [1, 1]], np.float32)
    f = clipped_grad(loss, 1.0, method="ghost", nonfinite="propagate")
    found, _ = quick_jit(f)(rows, (ids, x))
    assert np.isnan(found).all()
