"""Clipping with norms alone gives what clipping gradients gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip.per_example import clipped_grad, norms

KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (11, 6)),
    "layer": {
        "kernel": jax.random.normal(KEYS[1], (6, 40)) / 2,
        "bias": jnp.full(40, 0.1),
    },
    "head": jax.random.normal(KEYS[2], (40, 11)) / 3,
}
TOKENS = jax.random.randint(KEYS[3], (9, 5), 0, 11)
WEIGHTS = jnp.linspace(0.2, 3, 9)
PADDING = jnp.arange(9) == 4
LABELS = {"embed": "first", "layer": "first", "head": "last"}
SCOPES = {"tree": "tree", "leaf": "leaf", "groups": optclip.groups(LABELS)}
BOUND = 1.5


def loss(params, tokens, weight):
    x = params["embed"][tokens]
    x = jnp.tanh(x @ params["layer"]["kernel"] + params["layer"]["bias"])
    logits = x[:-1] @ params["head"]
    own = jnp.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]
    value = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own)
    return weight * value, {"length": jnp.float32(len(tokens))}


def both(padding=PADDING, weights=WEIGHTS, **options):
    options = {"strict": False, "batch_argnums": (1, 2), "has_aux": True} | options
    for method in ("ghost", "vmap"):
        f = jax.jit(clipped_grad(loss, BOUND, method=method, **options))
        yield f(PARAMS, TOKENS, weights, padding=padding)


def assert_same(found, wanted, rtol=1e-5):
    def same(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol, rtol * np.abs(b[b == b]).max(initial=0))

    jax.tree.map(same, found, wanted)


@pytest.mark.covering(
    over=[*SCOPES],
    response=["hard", "auto_s", "normalize", "drop", "smooth", "unit"],
    size=[None, 1, 4],
    strict=[True, False],
)
def test_it_is_the_sum_by_gradients(over, response, size, strict):
    ours, wanted = both(
        over=SCOPES[over], response=response, microbatch_size=size, strict=strict
    )
    assert_same(ours, wanted)
    coefficients = np.stack(jax.tree.leaves(ours[1].coefficients))
    assert (coefficients[:, ~PADDING] != 1).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [None, 3])
def test_a_bad_example_adds_nothing(bad, size):
    spoiled = WEIGHTS.at[2].set(bad)
    ours, wanted = both(weights=spoiled, microbatch_size=size)
    assert_same(ours[0], wanted[0])
    assert bool(ours[1].nonfinite[2])
    assert np.isfinite(ours[0]["head"]).all()
    loud, _ = both(weights=spoiled, nonfinite="propagate")
    assert all(np.isnan(x).all() for x in jax.tree.leaves(loud[0]))


@pytest.mark.parametrize("padding", [np.ones(9, bool), np.zeros(9, bool)])
def test_all_padding_and_none(padding):
    ours, wanted = both(padding=padding)
    assert_same(ours[0], wanted[0])


@pytest.mark.parametrize("over", SCOPES)
def test_norms_are_those_of_gradients(over):
    found, wanted = (
        norms(
            loss, method=method, over=SCOPES[over], microbatch_size=4, has_aux=True,
            batch_argnums=(1, 2),
        )(PARAMS, TOKENS, WEIGHTS, padding=PADDING)
        for method in ("ghost", "vmap")
    )  # fmt: skip
    assert_same(found, wanted, 2e-6)


def test_auto_takes_what_needs_less_memory_and_says_so():
    def dense(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    f = clipped_grad(dense, 1.0, method="auto")
    one = f.plan(jnp.ones((256, 256)), jnp.ones((8, 256)))
    assert (one.method, one.leaves) == ("ghost", "gram")
    assert one.vmap_bytes == 8 * 256 * 256 * 4
    assert one.ghost_bytes < one.vmap_bytes / 10
    alone = clipped_grad(dense, 1.0, method="auto", microbatch_size=1)
    assert alone.plan(jnp.ones((256, 256)), jnp.ones((8, 256))).method == "vmap"
    assert (
        clipped_grad(dense, 1.0).plan(jnp.ones((3, 3)), jnp.ones((2, 3)))[0] == "vmap"
    )
    alone = norms(dense, method="auto", microbatch_size=1)
    for g, wanted in ((norms(dense, method="auto"), "ghost"), (alone, "vmap")):
        assert g.plan(jnp.ones((256, 256)), jnp.ones((8, 256))).method == wanted
    x = jax.random.normal(KEYS[5], (8, 256))
    w = jax.random.normal(KEYS[4], (256, 256)) / 16
    auto, _ = f(w, x)
    wanted, _ = clipped_grad(dense, 1.0)(w, x)
    np.testing.assert_allclose(
        auto, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max()
    )


def test_what_would_break_a_promise_is_refused():
    def f(params, **options):
        g = clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, method="ghost", **options)
        return g(params, jnp.ones((3, 2), params.dtype))

    half = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="`strict` must be False .*bfloat16"):
        f(half)
    assert f(half, strict=False)[0].dtype == jnp.float32
    auto = clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, method="auto")
    assert auto.plan(half, jnp.ones((3, 2), half.dtype)).method == "vmap"
    assert auto(half, jnp.ones((3, 2), half.dtype))[0].dtype == jnp.float32
    for policy in ("drop", "raise"):
        with pytest.raises(
            ValueError, match="'zero' or 'propagate' for method='ghost'"
        ):
            f(jnp.ones(2), nonfinite=policy)
    with pytest.raises(ValueError, match="must be 'vmap' for reduce='none'"):
        f(jnp.ones(2), reduce="none")
    with pytest.raises(ValueError, match="complex parameters.*method='vmap'"):
        clipped_grad(
            lambda w, x: jnp.sum(jnp.abs(w * x)), 1.0, method="ghost", strict=False
        )(jnp.ones(2, complex), jnp.ones((3, 2)))


def test_norms_alone_of_half_precision_need_no_sum():
    f = norms(lambda w, x: jnp.sum(w * x), method="ghost")
    _, found = f(jnp.ones(2, jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16))
    np.testing.assert_allclose(found, np.sqrt(2), rtol=1e-2)


@pytest.mark.parametrize("method", ["vmap", "auto"])
def test_the_plan_of_complex_parameters_is_to_make_their_gradients(method):
    def loss(w, x):
        return jnp.sum(jnp.abs(w * x))

    params, examples = jnp.ones(2, complex), jnp.ones((3, 2))
    plan = clipped_grad(loss, 1.0, method=method).plan(params, examples)
    assert plan[:4] == ("vmap", "materialized", 3 * 2 * 8, 3 * 2 * 8)
    assert "complex parameters" in plan.unsupported
    clipped_grad(loss, 1.0, method=method)(params, examples)


@pytest.mark.parametrize("method", ["vmap", "ghost", "auto"])
def test_clipped_grad_integer_parameter_raises(method):
    f = clipped_grad(lambda p, e: jnp.sum(e * p["w"]), 1.0, method=method)
    params = {"w": jnp.ones(3), "n": jnp.int32(300)}
    for call in (f, f.plan):
        with pytest.raises(TypeError, match="dense array of floats, got the leaf 'n'"):
            call(params, jnp.ones((2, 3)))


def test_clipped_grad_probe_among_parameters_raises():
    def loss(p, e):
        return jnp.sum(optclip.clip_cotangent(p["w"] * e, 1.0, probe=p["probe"])[0])

    params = {"w": jnp.ones(3), "probe": optclip.cotangent_probe()}
    with pytest.raises(TypeError, match="must not contain a cotangent_probe"):
        clipped_grad(loss, 1.0)(params, jnp.ones((2, 3)))


def test_ghost_sum_has_derivative_by_closed_over_value():
    """Through the norms too: `c` scales gradients, of which one of two is clipped."""
    w, x = jnp.eye(3) / 3, jnp.arange(6.0).reshape(2, 3) / 6

    def total(c, method):
        f = clipped_grad(
            lambda w, e: c * jnp.sum(jnp.tanh(e @ w)), 0.5, method=method, strict=False
        )
        grads, info = f(w, x)
        return jnp.sum(grads * w), info.coefficients

    (found, coefficients), (wanted, _) = (
        jax.grad(total, has_aux=True)(0.4, method) for method in ("ghost", "vmap")
    )
    np.testing.assert_array_equal(coefficients < 1, [False, True])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "casts", [(None, None), ("bfloat16", None), (None, "float16")], ids=str
)
@pytest.mark.parametrize("method", ["ghost", "auto"])
def test_ghost_sum_in_half_precision_keeps_bound_or_raises(casts, method):
    """The sum over examples is rounded to the dtype in which parameters meet data."""
    of_data, of_weight = casts
    w = jnp.asarray(np.random.default_rng(0).normal(size=(32, 32)) / 9, jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 32)), jnp.float32)
    batch, without = jnp.tile(x, (512, 1)), jnp.arange(512) == 7

    def loss(w, x):
        w = w.astype(of_weight).astype(w.dtype) if of_weight else w
        x, w = (x.astype(of_data), w.astype(of_data)) if of_data else (x, w)
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) ** 2)

    f = clipped_grad(loss, 0.01, method=method)
    if any(casts) and method == "ghost":
        with pytest.raises(ValueError, match="`strict` must be False .*bfloat16"):
            f(w, batch)
        return
    plan = f.plan(w, batch)
    assert plan.method == ("vmap" if any(casts) else "ghost")
    assert plan.unsupported.startswith("`strict`") == any(casts)
    whole, info = jax.jit(f)(w, batch)
    less, _ = jax.jit(f)(w, batch, padding=without)
    assert (info.norms > 0.01).all()
    change = np.linalg.norm(np.float64(whole) - np.float64(less))
    assert 0.0099 < change <= f.sensitivity() * (1 + 512 * 515 * 2.0**-23)


@pytest.mark.parametrize("over", ["tree", "leaf"])
def test_ghost_sum_ignores_data_that_derivatives_divide_by(over):
    """Of the first example a derivative is infinite, of the last all is padding."""
    x = jnp.array([[1.0, 0.0], [1.0, 2.0], [2.0, 0.5], [0.0, 0.0]])
    params = {"w": jnp.ones(2), "v": jnp.ones(2)}
    padding = jnp.array([False, False, False, True])

    def loss(p, x):
        return jnp.sum(p["w"] / x) + jnp.sum(p["v"] * x)

    found, wanted = (
        clipped_grad(loss, 1.0, over=over, method=method)(params, x, padding=padding)
        for method in ("ghost", "vmap")
    )
    coefficients = jax.tree.leaves(found[1].coefficients)[-1]
    np.testing.assert_array_equal(coefficients == 0, [True, False, False, True])
    assert (coefficients < 1).all()
    assert_same(found[0], wanted[0])
