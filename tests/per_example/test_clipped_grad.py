"""The sum of clipped gradients of examples equals NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optclip
from optclip import per_example

# Private import: test arrays have too few elements to lose as much as 2**40 may.
from optclip._per_example._bound import response_of
from optclip.per_example import clipped_grad, clipped_sum, norms
from tests.support.helpers import optimized_jit, quick_jit

PARAMS = {
    "w": np.array([[0.3, -0.2], [0.1, 0.4], [0.5, 0.2]], np.float32),
    "b": np.ones(2, np.float32),
}
SIZES = np.linspace(0.2, 2, 7)[:, None]
BATCH = (np.random.default_rng(0).normal(size=(7, 3)) * SIZES).astype(np.float32)
# About half of the norms over the tree, over groups and of leaves are larger.
BOUND = 0.8
LABELS = {"w": "matrix", "b": "vector"}
SCOPES = {"tree": "tree", "leaf": "leaf", "groups": optclip.groups(LABELS)}


def loss(params, example):
    y = jnp.tanh(example @ params["w"])
    return jnp.sum(y**2) + example[0] * jnp.sum(params["b"])


def linear(w, x):
    return jnp.sum(w * x)


def gradients(batch=BATCH):
    """Return the gradients of the loss of each example, by hand."""
    w, x = np.float64(PARAMS["w"]), np.float64(batch)
    y = np.tanh(x @ w)
    dw = x[:, :, None] * (2 * y * (1 - y**2))[:, None, :]
    return {"w": dw, "b": np.repeat(x[:, :1], 2, axis=1)}


def norm_of(*leaves):
    return np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))


def norms_of(over):
    """Return the norms of all examples, by leaf."""
    g = gradients()
    if over == "tree":
        return dict.fromkeys(g, norm_of(*g.values()))
    return {key: norm_of(leaf) for key, leaf in g.items()}


def in_scope(over, by_leaf):
    """Arrange values of leaves like the norms of a scope."""
    if over == "tree":
        return by_leaf["w"]
    if over == "leaf":
        return by_leaf
    return {label: by_leaf[key] for key, label in LABELS.items()}


COEFFICIENTS = {
    "hard": lambda n, c: np.minimum(1, c / n),
    "auto_s": lambda n, c: c / (n + 0.01),
    "normalize": lambda n, c: c / n,
    "drop": lambda n, c: (n <= c).astype(float),
    "smooth": lambda n, c: c / np.hypot(c, n),
    "unit": lambda n, c: np.minimum(1, c / n) / c,
}


def coefficients(over="tree", response="hard", threshold=BOUND):
    """Return the coefficients of all examples, by leaf."""
    found = COEFFICIENTS[response]
    return {key: found(norm, threshold) for key, norm in norms_of(over).items()}


def expected(over="tree", response="hard", threshold=BOUND, rows=slice(None)):
    factors, g = coefficients(over, response, threshold), gradients()
    assert all((k[rows] != 1).any() for k in factors.values())
    return {
        key: np.einsum("i,i...->...", k[rows], g[key][rows])
        for key, k in factors.items()
    }


def assert_close(found, wanted, rtol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol * np.abs(b).max()),
        *(found, wanted),
    )


@pytest.mark.covering(
    over=[*SCOPES],
    response=["hard", "unit", "drop"],
    size=[None, 1, 3],
    method=["vmap", "ghost"],
)
def test_clipped_grad_equals_formula(over, response, size, method):
    f = clipped_grad(
        loss, BOUND, over=SCOPES[over], response=response, microbatch_size=size,
        method=method, strict=False,
    )  # fmt: skip
    found, info = quick_jit(f)(PARAMS, BATCH)
    assert_close(found, expected(over, response))
    assert_close(info.norms, in_scope(over, norms_of(over)))
    times = BOUND if response == "unit" else 1
    k = {key: times * k for key, k in coefficients(over, response).items()}
    assert_close(info.coefficients, in_scope(over, k))
    values = np.sum(np.tanh(np.float64(BATCH) @ PARAMS["w"]) ** 2, 1) + 2 * BATCH[:, 0]
    assert_close(info.values, values)
    assert not np.any(jax.tree.leaves(info.nonfinite))
    assert not info.padding.any()


@pytest.mark.parametrize("response", COEFFICIENTS)
def test_clipped_sum_response_equals_formula(response):
    grads = {key: np.float32(x) for key, x in gradients().items()}

    f = functools.partial(clipped_sum, over="leaf", response=response, strict=False)
    thresholds = np.float32([BOUND, 0, np.inf])
    found, info = quick_jit(jax.vmap(f, (None, 0)))(grads, thresholds)
    first, zero, infinite = ({key: x[i] for key, x in found.items()} for i in range(3))
    assert_close(first, expected("leaf", response))
    times = BOUND if response == "unit" else 1
    assert_close(info.coefficients["w"][0], times * coefficients("leaf", response)["w"])
    assert not any(x.any() for x in zero.values())
    # In units of an infinite threshold, the sum is 0.
    share = 0 if response == "unit" else 1
    assert_close(infinite, {key: share * x.sum(0) for key, x in gradients().items()})


@pytest.mark.parametrize(
    ("over", "thresholds", "response"),
    [
        ("groups", {"matrix": 0.5, "vector": 1.0}, "hard"),
        ("groups", {"matrix": 0.5, "vector": 0.0}, "unit"),
        ("leaf", {"w": 0.5, "b": 1.0}, "hard"),
        ("leaf", {"w": 0.5, "b": None}, "hard"),
    ],
)
def test_clipped_grad_uses_threshold_of_each_group_or_leaf(over, thresholds, response):
    f = clipped_grad(
        loss, thresholds, over=SCOPES[over], response=response, strict=False,
        normalize_by=4.0,
    )  # fmt: skip
    wanted = {}
    for key, c in zip(("w", "b"), thresholds.values(), strict=True):
        wanted[key] = gradients()[key].sum(0) if c is None else np.zeros(2)
        if c:
            wanted[key] = expected("leaf", response, c)[key]
    found, _ = quick_jit(f)(PARAMS, BATCH)
    assert_close(found, {key: x / 4 for key, x in wanted.items()})


# The magnitude of two weights is above its limit of 2.
WEIGHTS = np.array([1.5, -2.5, 0.0, 3.0, 1.0, 2.0, np.nan], np.float32)
IS_PADDING = np.arange(7) == 6


def weighted(over, limits):
    """Return each weighted gradient; the last is padding, the third has weight 0."""
    w = np.where(IS_PADDING, 0, np.clip(WEIGHTS, -2, 2))
    g = gradients()
    factors = {
        key: w * coefficients(over, "hard", c)[key]
        for key, c in zip(g, limits, strict=True)
    }
    return {key: np.einsum("i,i...->i...", k, g[key]) for key, k in factors.items()}


@pytest.mark.parametrize(
    ("over", "size", "method"),
    [("tree", None, "ghost"), ("groups", 3, "ghost"), ("leaf", 3, "vmap"),
     ("groups", None, "vmap")],
)  # fmt: skip
def test_weights_of_examples_equal_formula(over, size, method):
    most = {"matrix": BOUND, "vector": 0.5} if over == "groups" else BOUND
    f = clipped_grad(
        loss, most, over=SCOPES[over], microbatch_size=size, method=method,
        strict=False, max_weight=2.0, normalize_by=4.0,
    )  # fmt: skip
    batch = np.where((np.arange(7) % 4 == 2)[:, None], np.float32(np.nan), BATCH)
    found, info = quick_jit(f)(PARAMS, batch, padding=IS_PADDING, weights=WEIGHTS)
    each = weighted(over, (BOUND, 0.5 if over == "groups" else BOUND))
    assert_close(found, {key: x.sum(0) / 4 for key, x in each.items()})
    # The record describes the gradients without their weights.
    wanted = jax.tree.map(lambda x: x[:2], norms_of(over))
    assert_close(jax.tree.map(lambda x: x[:2], info.norms), in_scope(over, wanted))
    assert all(np.isnan(x[2]) for x in jax.tree.leaves(info.norms))


def test_sums_of_computed_gradients_equal_formula():
    clip = per_example.aggregate(BOUND, normalize_by=4.0, strict=False)
    tx = optax.chain(clip, optax.scale(-4.0))
    f = clipped_grad(
        loss, BOUND, reduce="none", microbatch_size=3, strict=False, max_weight=2.0
    )

    @quick_jit
    def of_all(grads, weights):
        own = {"padding": IS_PADDING, "weights": weights}
        summed, _ = clipped_sum(grads, BOUND, strict=False, **own)
        updates, state = tx.update(grads, tx.init(PARAMS), PARAMS, **own)
        plain, _ = tx.update(grads, state, PARAMS, padding=IS_PADDING)
        return (summed, updates, plain), f(PARAMS, BATCH, **own)[0]

    grads = {key: np.float32(x) for key, x in gradients().items()}
    found, of_each = of_all(grads, np.clip(WEIGHTS, -2, 2))
    each = weighted("tree", (BOUND, BOUND))
    assert_close(of_each, each)
    wanted = {key: x.sum(0) for key, x in each.items()}
    negative = jax.tree.map(np.negative, (wanted, expected(rows=slice(6))))
    assert_close(found, (wanted, *negative))


@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_nan_weight_is_visible(method):
    """Also where `nonfinite="zero"` hides a gradient that is NaN."""
    f = clipped_grad(linear, 1.0, method=method, nonfinite="zero", max_weight=np.inf)
    for bad in (np.nan, np.inf):
        weights = np.float32([1.0, bad])
        found, _ = quick_jit(f)(np.ones(2, np.float32), np.eye(2), weights=weights)
        assert not np.isfinite(found).any()


def test_clipped_sum_clips_tree_in_its_widest_precision():
    with jax.enable_x64(True):
        grads = {"a": np.full((1, 3), 0.1, np.float32), "b": np.ones((1, 2))}
        found, _ = optimized_jit(clipped_sum)(grads, 0.7)
        assert {x.dtype for x in found.values()} == {np.dtype("float64")}
        whole = np.concatenate([x.ravel() for x in found.values()])
        assert 0.7 - 1e-11 < np.linalg.norm(whole) <= 0.7


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clipped_sum_of_half_precision_is_float32(dtype):
    clipped = optimized_jit(functools.partial(clipped_sum, strict=False))
    found, info = clipped(jnp.full((300, 2), 200.0, dtype), 1.0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 300 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(info.norms, 200 * np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize(("size", "method"), [(3, "vmap"), (None, "ghost")])
def test_clipped_grad_ignores_contents_of_padding(size, method):
    padding = np.array([False, True, False, False, True, False, False])
    f = optimized_jit(clipped_grad(loss, BOUND, microbatch_size=size, method=method))
    first, info = f(PARAMS, BATCH, padding=padding)
    for junk in (np.nan, np.inf, 1e30, 0.0):
        batch = np.where(padding[:, None], np.float32(junk), BATCH)
        again, other = f(PARAMS, batch, padding=padding)
        jax.tree.map(np.testing.assert_array_equal, first, again)
        for name in ("values", "norms", "coefficients", "nonfinite"):
            assert not np.any(getattr(other, name)[padding]), name
    np.testing.assert_array_equal(info.padding, padding)
    assert_close(first, expected(rows=np.flatnonzero(~padding)), 3e-4)
    nothing, _ = f(PARAMS, BATCH, padding=np.ones(7, bool))
    assert not any(map(np.any, jax.tree.leaves(nothing)))


def test_clipped_grad_warns_of_labels_without_batch_axis():
    """Each example would be compared with all labels, which voids the guarantee."""
    f = clipped_grad(lambda w, x, y: jnp.sum((w * x - y) ** 2), BOUND)
    words = r"argument 2 .* pass batch_argnums=\(1, 2\)"
    with pytest.warns(UserWarning, match=words) as warned:
        f(np.float32(1), np.ones(4, np.float32), np.ones(4, np.float32))
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("number", "size"), [(12, 4), (13, 1), (61, 1), (13, 8)])
def test_microbatches_of_any_number_count_each_example_once(number, size):
    """Three are added one by one, 13 by sevens, 61 by eights."""
    batch = np.arange(1.0, number + 1, dtype=np.float32)
    f = clipped_grad(linear, 5.0, microbatch_size=size, strict=False)
    found, info = quick_jit(f)(np.float32(0), batch)
    assert found == 1 + 2 + 3 + 4 + 5 * (number - 4)
    np.testing.assert_array_equal(info.norms, batch)


def test_physical_batches_summed_by_multi_steps_equal_one_batch():
    """With noise once. The mean of `MultiSteps` would divide by their number again."""
    f = quick_jit(clipped_grad(loss, BOUND, normalize_by=7, strict=False))
    noisy = optax.chain(optax.add_noise(0.01, 0.0, 0), optax.sgd(1.0))
    noise, _ = noisy.update(jax.tree.map(jnp.zeros_like, PARAMS), noisy.init(PARAMS))
    tx = optax.MultiSteps(noisy, 2, use_grad_mean=False)
    state, update = tx.init(PARAMS), quick_jit(tx.update)
    # The last physical batch is padded.
    for part, padding in ((BATCH[:4], np.arange(4) > 3), (BATCH[3:], np.arange(4) < 1)):
        grads, _ = f(PARAMS, part, padding=padding)
        updates, state = update(grads, state, PARAMS)
    wanted = {key: noise[key] - leaf / 7 for key, leaf in expected().items()}
    assert_close(updates, wanted)


@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_clipped_grad_takes_arguments_anywhere_and_keeps_aux_per_example(method):
    def other(x, first, scale, y, second, key):
        y += 0 * jax.random.normal(key)
        value = loss({"w": first, "b": second}, x) * scale + 0 * y
        aux = {"y": y, "w": first, "empty": jnp.zeros((0, 2)), "best": jnp.argmax(x)}
        return value, aux

    y = np.arange(7, dtype=np.float32)
    f = clipped_grad(
        other, BOUND, argnums=(1, 4), batch_argnums=(0, 3, 5), has_aux=True,
        microbatch_size=2, strict=False, method=method,
    )  # fmt: skip
    args = (
        BATCH,
        PARAMS["w"],
        1.0,
        y,
        PARAMS["b"],
        jax.random.split(jax.random.key(0), 7),
    )
    (w, b), info = quick_jit(f)(*args, padding=np.zeros(7, bool))
    assert_close({"w": w, "b": b}, expected())
    aux = {"y": y, "w": np.stack([PARAMS["w"]] * 7), "empty": np.zeros((7, 0, 2))}
    aux["best"] = BATCH.argmax(1)
    jax.tree.map(np.testing.assert_array_equal, info.aux, aux)


@pytest.mark.parametrize(
    ("method", "policy", "adds"),
    [
        ("vmap", "zero", 0), ("vmap", "propagate", np.nan),
        ("ghost", "zero", 0), ("ghost", "propagate", np.nan),
    ],
)  # fmt: skip
def test_clipped_grad_nonfinite_example_follows_policy(method, policy, adds):
    run = quick_jit(clipped_grad(linear, 3.0, nonfinite=policy, method=method))
    for bad in (np.nan, np.inf, -np.inf):
        batch = np.array([[bad, 1.0], [0.0, 2.0]], np.float32)
        found, info = run(np.ones(2, np.float32), batch)
        np.testing.assert_allclose(found[1], adds + 2, rtol=1e-6)
        np.testing.assert_array_equal(info.nonfinite, [True, False])
        assert np.isnan(found[0]) == (policy == "propagate")


@pytest.mark.parametrize(
    ("nonfinite", "method"),
    [("zero", "vmap"), ("zero", "ghost"), ("raise", "vmap")],
)
def test_nan_from_response_makes_sum_nan_under_each_policy(nonfinite, method):
    """Policies apply to gradients and must not hide a faulty response."""
    f = clipped_grad(
        loss, BOUND, nonfinite=nonfinite, method=method,
        response=lambda n, c: jnp.where(n > 2 * c, jnp.nan, jnp.minimum(1, c / n)),
    )  # fmt: skip
    error, (total, info) = quick_jit(checkify.checkify(f))(PARAMS, BATCH)
    error.throw()
    assert np.isnan(info.coefficients).any()
    assert (info.coefficients < 1).any()
    assert all(np.isnan(x).all() for x in jax.tree.leaves(total))


def test_custom_response_is_limited_to_threshold():
    grads = np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)

    found, less = (
        quick_jit(functools.partial(clipped_sum, response=f, strict=False))(grads, 1.0)[
            0
        ]
        for f in (lambda n, c: 10.0, lambda n, c: c / (n + 1))
    )
    np.testing.assert_allclose(found, [1.2, 1.6], rtol=1e-6)
    np.testing.assert_allclose(less, [0.5 + 0.2, 2 / 3 + 0.4 / 1.5], rtol=1e-6)


@pytest.mark.parametrize(("is_double", "flushed"), [(False, -43), (True, -480)])
def test_normalize_bounds_norm_with_flushed_squares(is_double, flushed):
    """Flushing loses at most this much for 2**40 elements, more than a test has."""
    response = response_of("normalize")
    with jax.enable_x64(is_double):
        norms = 2.0 ** np.array([flushed, flushed + 3, flushed + 20])
        given = jnp.asarray(norms), jnp.ones(3)
        found = np.float64(optimized_jit(response.coefficient)(*given))
    bounds = found * (norms + 2.0**flushed)
    assert ((bounds > 0) & (bounds <= 1 + 2.0**-23)).all()


@pytest.mark.parametrize(("over", "method"), [("groups", "vmap"), ("leaf", "ghost")])
def test_norms_equal_norms_of_gradients(over, method):
    f = norms(loss, over=SCOPES[over], microbatch_size=2, method=method)
    values, found = quick_jit(f)(PARAMS, BATCH)
    assert_close(found, in_scope(over, norms_of(over)))
    assert values.shape == (7,)
    padding = np.arange(7) > 3
    values, found = quick_jit(f)(PARAMS, np.nan * BATCH, padding=padding)
    for norm in jax.tree.leaves(found):
        np.testing.assert_array_equal(np.isnan(norm), ~padding)
    assert not values[padding].any()


def test_clipped_grad_takes_callable_model_as_parameters():
    """Like the models of Flax NNX and Equinox."""
    model = jax.tree_util.Partial(
        lambda example, **params: loss(params, example), **PARAMS
    )
    f = clipped_grad(lambda model, x: model(x), BOUND, strict=False, over="leaf")
    found, info = quick_jit(f)(model, BATCH)
    assert_close(found.keywords, expected("leaf"))
    assert_close(info.norms.keywords, norms_of("leaf"))


@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_clipped_grad_derivative_by_threshold_equals_formula(method):
    """Of each clipped gradient the sum grows by its direction; NaN is padding."""
    padding = np.arange(7) == 3
    batch = np.where(padding[:, None], np.float32(np.nan), BATCH)

    def total(threshold, params):
        f = clipped_grad(loss, threshold, strict=False, method=method)
        found, _ = f(params, batch, padding=padding)
        return jnp.sum(found["w"])

    with jax.debug_nans(True):
        slope, others = quick_jit(jax.grad(total, (0, 1)))(BOUND, PARAMS)
    norm = norms_of("tree")["w"]
    directions = gradients()["w"].sum((1, 2)) / norm
    is_clipped = (norm > BOUND) & ~padding
    np.testing.assert_allclose(slope, directions[is_clipped].sum(), rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(others))


NO_EXAMPLES, NO_PADDING = np.zeros((0, 3), np.float32), np.zeros(0, bool)


@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_clipped_grad_of_no_example_is_zeros(method):
    """As Poisson sampling draws it."""
    f = clipped_grad(loss, 1.0, method=method, microbatch_size=4)
    each, _ = clipped_grad(loss, 1.0, reduce="none")(PARAMS, NO_EXAMPLES)
    assert {key: x.shape for key, x in each.items()} == {"w": (0, 3, 2), "b": (0, 2)}
    found, info = f(PARAMS, NO_EXAMPLES)
    assert info.values.shape == info.norms.shape == (0,)
    for sums in (
        *(found, f(PARAMS, NO_EXAMPLES, padding=NO_PADDING)[0]),
        clipped_sum(each, 1.0, over=SCOPES["groups"], padding=NO_PADDING)[0],
    ):
        jax.tree.map(
            np.testing.assert_array_equal, sums, jax.tree.map(np.zeros_like, PARAMS)
        )
    values, found = norms(loss, method=method, over="leaf")(PARAMS, NO_EXAMPLES)
    assert {x.shape for x in (values, *found.values())} == {(0,)}


def call(function, *args, **options):
    return lambda: jax.eval_shape(clipped_grad(function, 1.0, **options), *args)


ONE, THREE = np.ones((), np.float32), np.ones(3, np.float32)
SCHEDULED = optclip.responses.band(low=optax.constant_schedule(0.5))
POSITIONAL = "unexpected keyword argument .example."
ERRORS = {
    "loss of tuple": (
        call(lambda w, x: (w * x, 1), ONE, THREE),
        (TypeError, "for one example, got tuple.*has_aux"),
    ),
    "loss of dict": (
        call(jax.grad(lambda w, x: w["a"] * x), {"a": ONE}, THREE),
        (TypeError, "for one example, got dict.*has_aux"),
    ),
    "aux missing": (
        call(lambda w, x: w * x, ONE, THREE, has_aux=True),
        (TypeError, r"must return \(value, aux\), got float32\[\]"),
    ),
    "aux of three": (
        call(lambda w, x: (w * x,) * 3, ONE, THREE, has_aux=True),
        (TypeError, r"must return \(value, aux\), got tuple"),
    ),
    "argument missing": (
        call(loss, PARAMS),
        (TypeError, "at least 2 arguments .* got 1"),
    ),
    "keyword": (
        lambda: clipped_grad(loss, 1.0)(PARAMS, example=BATCH),
        (TypeError, POSITIONAL),
    ),
    "keyword of norms": (
        lambda: norms(loss)(PARAMS, example=BATCH),
        (TypeError, POSITIONAL),
    ),
    "integer gradient": (
        lambda: clipped_sum({"w": np.ones((3, 2)), "n": np.arange(3)}, 1.0),
        (TypeError, "array of floats .* got the leaf 'n' of int"),
    ),
    "random key among the parameters": (
        lambda: call(loss, {"w": ONE, "dropout": jax.random.key(0)}, BATCH)(),
        (TypeError, r"the leaf 'dropout' of key<fry>.*nnx\.split.*copy=True"),
    ),
    "comparing response": (
        call(loss, response=optclip.responses.detached("proportional")),
        (ValueError, "a response that depends on a single norm"),
    ),
    "scheduled response": (
        call(loss, response=SCHEDULED),
        (ValueError, "`response` must be a response without schedules"),
    ),
    "averaged gradients": (
        lambda: per_example.aggregate(1.0, normalize_by=7.0).update(THREE, (), THREE),
        (
            ValueError,
            r"must have a leading axis of examples.*chain\(aggregate, optax.Mu",
        ),
    ),
    **{
        f"ghost with {option}": (
            call(linear, ONE, THREE, method="ghost", **{option: value}),
            (ValueError, words),
        )
        for option, value, words in (
            ("nonfinite", "raise", "'zero' or 'propagate' for method='ghost'"),
            ("reduce", "none", "must be 'vmap' for reduce='none'"),
        )
    },
    "weights without their limit": (
        lambda: clipped_grad(loss, 1.0)(PARAMS, BATCH, weights=np.ones(7)),
        (ValueError, r"max_weight=\) must be passed with `weights`.*largest magnitude"),
    ),
    "limit without weights": (
        lambda: clipped_grad(loss, 1.0, max_weight=0.5)(PARAMS, BATCH),
        (ValueError, "`weights` must be passed with `max_weight`"),
    ),
    "relation": (
        lambda: clipped_grad(linear, 2.0).sensitivity("near"),
        (ValueError, "`relation` must be 'add_or_remove', "),
    ),
    "sensitivity of leaves without parameters": (
        lambda: clipped_grad(linear, 2.0, over="leaf").sensitivity(),
        (ValueError, r"`params` must be the parameters.*params=params"),
    ),
    "sensitivity of groups without a tree": (
        lambda: clipped_grad(
            linear, 2.0, over=optclip.groups(lambda tree: "all")
        ).sensitivity(params=PARAMS),
        (TypeError, "must return a tree"),
    ),
    **{
        f"padding of {kind}": (
            functools.partial(clipped_grad(loss, 1.0), PARAMS, BATCH, padding=padding),
            (error, "`padding` must be an array of 7 bools"),
        )
        for kind, padding, error in (
            ("no array", "x", TypeError),
            ("six", np.zeros(6, bool), ValueError),
        )
    },
}


@pytest.mark.parametrize("name", ERRORS)
def test_clipped_grad_bad_argument_raises(name):
    bad_call, (error, message) = ERRORS[name]
    with pytest.raises(error, match=message):
        bad_call()
