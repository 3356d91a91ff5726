"""The sum of clipped gradients of examples, beside NumPy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import per_example
from optclip.per_example import clipped_grad, clipped_sum, norms
from optclip.per_example._responses import response_of

PARAMS = {"w": jnp.array([[0.3, -0.2], [0.1, 0.4], [0.5, 0.2]]), "b": jnp.ones(2)}
BATCH = jax.random.normal(jax.random.key(0), (7, 3)) * jnp.linspace(0.2, 2, 7)[:, None]
# Past this are about half of the norms over the tree, over groups and of leaves.
BOUND = 1.0
LABELS = {"w": "matrix", "b": "vector"}


def loss(params, example):
    return jnp.sum(jnp.tanh(example @ params["w"]) ** 2) + example[0] * jnp.sum(
        params["b"]
    )


def gradients(params=PARAMS, batch=BATCH):
    """By hand: d/dw and d/db of the loss of each example."""
    w, x = np.asarray(params["w"], np.float64), np.asarray(batch, np.float64)
    y = np.tanh(x @ w)
    dw = x[:, :, None] * (2 * y * (1 - y**2))[:, None, :]
    return {"w": dw, "b": np.repeat(x[:, :1], 2, axis=1)}


def norm_of(*leaves):
    return np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))


def by_scope(over):
    """The norms of all examples, by leaf."""
    g = gradients()
    if over == "tree":
        return dict.fromkeys(g, norm_of(*g.values()))
    return {key: norm_of(leaf) for key, leaf in g.items()}


COEFFICIENTS = {
    "hard": lambda n, c: np.minimum(1, c / n),
    "auto_s": lambda n, c: c / (n + 0.01),
    "normalize": lambda n, c: c / n,
    "drop": lambda n, c: (n <= c).astype(float),
    "smooth": lambda n, c: c / np.hypot(c, n),
    "unit": lambda n, c: np.minimum(1, c / n) / c,
}
SCOPES = {"tree": "tree", "leaf": "leaf", "groups": optclip.groups(LABELS)}


def expected(over, response, threshold=BOUND, rows=slice(None)):
    found = {}
    for key, norm in by_scope(over).items():
        k = COEFFICIENTS[response](norm, threshold)
        assert (k[rows] != 1).any()
        found[key] = np.einsum("i,i...->...", k[rows], gradients()[key][rows])
    return found


def assert_close(found, wanted, rtol=2e-6):
    for key, leaf in wanted.items():
        np.testing.assert_allclose(found[key], leaf, rtol, rtol * np.abs(leaf).max())


@pytest.mark.covering(
    response=[*COEFFICIENTS],
    over=[*SCOPES],
    size=[None, 1, 3, 7, 9],
    run=["eager", "jit"],
)
def test_it_is_the_sum_of_each_clipped(response, over, size, run):
    f = clipped_grad(
        loss, BOUND, over=SCOPES[over], response=response, microbatch_size=size,
        strict=False,
    )  # fmt: skip
    found, info = run(f)(PARAMS, BATCH)
    assert_close(found, expected(over, response))
    own = by_scope(over)
    shown = {
        "tree": lambda t: {"w": t, "b": t}, "leaf": lambda t: t,
        "groups": lambda t: {key: t[label] for key, label in LABELS.items()},
    }  # fmt: skip
    assert_close(shown[over](info.norms), own)
    wanted = {key: COEFFICIENTS[response](n, BOUND) for key, n in own.items()}
    times = BOUND if response == "unit" else 1
    wanted = {key: np.minimum(times * k, 1e9) for key, k in wanted.items()}
    assert_close(shown[over](info.coefficients), wanted)
    np.testing.assert_allclose(
        info.values, jax.vmap(loss, (None, 0))(PARAMS, BATCH), rtol=1e-6
    )
    assert not np.any(jax.tree.leaves(info.nonfinite))
    assert not info.padding.any()


def test_thresholds_by_group_and_by_leaf_have_their_own_bound():
    thresholds = {"matrix": 0.5, "vector": 1.0}
    f = clipped_grad(
        loss, thresholds, over=optclip.groups(LABELS), strict=False, normalize_by=4.0
    )
    found, _ = f(PARAMS, BATCH)
    wanted = expected("leaf", "hard", 0.5)
    wanted["b"] = expected("leaf", "hard", 1.0)["b"]
    assert_close(found, {key: leaf / 4 for key, leaf in wanted.items()})
    assert f.sensitivity() == pytest.approx(np.sqrt(1.25) / 4)
    by_leaf = clipped_grad(loss, {"w": 0.5, "b": 1.0}, over="leaf", strict=False)
    assert_close(by_leaf(PARAMS, BATCH)[0], wanted)
    assert by_leaf.sensitivity("zero_out", PARAMS) == pytest.approx(np.sqrt(1.25))
    assert f.sensitivity("replace_one") == pytest.approx(2 * np.sqrt(1.25) / 4)


def test_unit_divides_each_leaf_by_its_threshold():
    thresholds = {"matrix": 0.5, "vector": 0.0}
    f = clipped_grad(
        loss, thresholds, over=optclip.groups(LABELS), response="unit", strict=False
    )
    found, _ = f(PARAMS, BATCH)
    assert_close(found, {"w": expected("leaf", "unit", 0.5)["w"], "b": np.zeros(2)})
    assert f.sensitivity() == pytest.approx(np.sqrt(2))
    assert clipped_grad(loss, 5.0, response="unit").sensitivity() == 1


def test_sensitivity_counts_leaves_where_one_threshold_stands_for_several():
    f = clipped_grad(loss, 2.0, over="leaf")
    with pytest.raises(ValueError, match=r"`params` must be given.*params=params"):
        f.sensitivity()
    assert f.sensitivity(params=PARAMS) == pytest.approx(2 * np.sqrt(2))
    groups = clipped_grad(loss, 2.0, over=optclip.groups(lambda tree: "all"))
    with pytest.raises(TypeError, match="must return a tree"):
        groups.sensitivity(params=PARAMS)


def test_a_leaf_without_a_threshold_is_not_clipped_and_has_no_bound():
    f = clipped_grad(loss, {"w": 0.5, "b": None}, over="leaf", strict=False)
    found, _ = f(PARAMS, BATCH)
    wanted = expected("leaf", "hard", 0.5) | {"b": gradients()["b"].sum(0)}
    assert_close(found, wanted)
    assert f.sensitivity(params=PARAMS) == np.inf


def test_sensitivity_is_computed_in_float64():
    assert clipped_grad(loss, np.int8(100)).sensitivity("replace_one") == 200
    half = clipped_grad(loss, jnp.bfloat16(1.0), normalize_by=7)
    assert half.sensitivity() == 1 / 7
    assert jax.jit(lambda c: clipped_grad(loss, c).sensitivity())(-1.0) == 0


def test_what_has_no_norm_is_refused():
    whole = {"w": jnp.ones((3, 2)), "n": jnp.arange(3)}
    with pytest.raises(TypeError, match="array of floats, got the leaf 'n' of int32"):
        clipped_sum(whole, 1.0)


def test_all_of_a_tree_is_clipped_in_its_widest_precision():
    with jax.enable_x64(True):
        grads = {"a": jnp.full((1, 3), 0.1, jnp.float32), "b": jnp.ones((1, 2))}
        found, _ = clipped_sum(grads, 0.7)
        assert {x.dtype for x in found.values()} == {jnp.dtype("float64")}
        whole = np.concatenate([x.ravel() for x in found.values()])
        assert 0.7 - 1e-11 < np.linalg.norm(whole) <= 0.7


def test_a_padded_nan_reaches_no_derivative():
    padding, batch = np.arange(7) == 3, BATCH.at[3].set(jnp.nan)

    def total(params):
        found, _ = clipped_grad(loss, BOUND)(params, batch, padding=padding)
        return jnp.sum(found["w"])

    with jax.debug_nans(True):
        slope = jax.grad(total)(PARAMS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope))
    keys = jax.random.split(jax.random.key(0), 7)

    def noisy(params, example, key):
        return loss(params, example + jax.random.normal(key, (3,)))

    f = clipped_grad(noisy, BOUND, batch_argnums=(1, 2))
    assert np.isfinite(f(PARAMS, batch, keys, padding=padding)[0]["w"]).all()


def test_sensitivity_of_a_traced_threshold_is_an_array():
    def of(threshold):
        tree = clipped_grad(loss, threshold).sensitivity("replace_one")
        leaf = clipped_grad(loss, {"w": threshold, "b": 1.0}, over="leaf")
        return tree, leaf.sensitivity(params=PARAMS)

    tree, leaf = jax.jit(of)(3.0)
    assert tree == 6
    assert leaf == pytest.approx(np.sqrt(10))
    assert isinstance(clipped_grad(loss, jnp.float32(3.0)).sensitivity(), float)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "REPLACE_SPECIAL"])
def test_names_of_dp_accounting_are_taken(relation):
    assert clipped_grad(loss, 3.0).sensitivity(relation) == 3
    with pytest.raises(ValueError, match="`relation` must be 'add_or_remove', "):
        clipped_grad(loss, 3.0).sensitivity("near")


@pytest.mark.parametrize("size", [None, 2, 3])
def test_padding_changes_no_bit_whatever_is_there(size):
    padding = np.array([False, True, False, False, True, False, False])
    f = jax.jit(clipped_grad(loss, BOUND, microbatch_size=size))
    first, info = f(PARAMS, BATCH, padding=padding)
    for junk in (jnp.nan, jnp.inf, 1e30, 0.0):
        batch = jnp.where(padding[:, None], junk, BATCH)
        again, other = f(PARAMS, batch, padding=padding)
        jax.tree.map(np.testing.assert_array_equal, first, again)
        for name in ("values", "norms", "coefficients", "nonfinite"):
            assert not np.any(getattr(other, name)[padding]), name
    np.testing.assert_array_equal(info.padding, padding)
    rows = np.flatnonzero(~padding)
    assert_close(first, expected("tree", "hard", rows=rows), 3e-4)
    nothing, _ = f(PARAMS, BATCH, padding=np.ones(7, bool))
    assert not any(map(np.any, jax.tree.leaves(nothing)))


def test_the_size_of_a_microbatch_changes_roundings_alone():
    whole = clipped_grad(loss, BOUND)(PARAMS, BATCH)
    for size in (1, 2, 4, 6):
        found = clipped_grad(loss, BOUND, microbatch_size=size)(PARAMS, BATCH)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, whole)


@pytest.mark.parametrize(("number", "size"), [(12, 4), (13, 1), (61, 1), (13, 8)])
def test_any_number_of_microbatches_counts_each_example_once(number, size):
    """Three are added one by one, 13 by sevens, 61 by eights."""
    batch = np.arange(1.0, number + 1)
    f = clipped_grad(lambda w, x: w * x, 5.0, microbatch_size=size, strict=False)
    found, info = f(jnp.float32(0), batch)
    assert found == 1 + 2 + 3 + 4 + 5 * (number - 4)
    np.testing.assert_array_equal(info.norms, batch)


def test_a_sum_of_microbatches_loses_what_a_few_of_them_lose():
    """2**24 + 1 is no float32. Nine are added by five, 64 by eight: 4 and 7 are lost."""
    for number, most in ((9, 4), (64, 7)):
        ones = jnp.ones(number - 1)
        examples = jnp.concatenate([jnp.full(1, 2.0**24), ones])
        f = clipped_grad(lambda w, x: w * x, 1e9, microbatch_size=1, strict=False)
        found = float(f(jnp.float32(0), examples)[0])
        assert abs(found - (2.0**24 + number - 1)) <= most


@pytest.mark.parametrize("size", [None, 3])
def test_not_reduced_each_is_its_own(size):
    f = clipped_grad(loss, BOUND, reduce="none", microbatch_size=size, strict=False)
    found, _ = f(PARAMS, BATCH)
    k = COEFFICIENTS["hard"](by_scope("tree")["w"], BOUND)
    wanted = {key: np.einsum("i,i...->i...", k, g) for key, g in gradients().items()}
    assert_close(found, wanted)


def test_aux_is_kept_by_example_and_arguments_may_stand_anywhere():
    def other(x, first, scale, y, second):
        value = loss({"w": first, "b": second}, x) * scale + 0 * y
        return value, {"y": y}

    y = jnp.arange(7.0)
    f = clipped_grad(
        other, BOUND, argnums=(1, 4), batch_argnums=(0, 3), has_aux=True,
        microbatch_size=2, strict=False,
    )  # fmt: skip
    (w, b), info = f(BATCH, PARAMS["w"], 1.0, y, PARAMS["b"])
    assert_close({"w": w, "b": b}, expected("tree", "hard"))
    np.testing.assert_array_equal(info.aux["y"], y)


POLICIES = {"zero": 0.0, "propagate": np.nan, "drop": 1.0}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_example_does_as_the_policy_says(policy, bad):
    grads = jnp.array([[bad, 1.0], [0.0, 2.0]])
    found, info = clipped_sum(grads, 3.0, nonfinite=policy)
    np.testing.assert_allclose(found[1], POLICIES[policy] + 2, rtol=1e-6)
    np.testing.assert_array_equal(info.nonfinite, [True, False])
    assert np.isnan(found[0]) == (policy == "propagate")


def test_float16_and_bfloat16_are_clipped_and_summed_in_float32():
    grads = jnp.full((300, 2), 200.0, jnp.float16)
    found, info = clipped_sum(grads, 1.0, strict=False)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 300 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(info.norms, 200 * np.sqrt(2), rtol=1e-6)
    ones = jnp.ones((300, 1), jnp.bfloat16)
    assert clipped_sum(ones, 1.0, strict=False)[0] == 300


def test_equal_responses_are_compiled_once():
    assert hash(response_of("auto_s")) == hash(response_of("auto_s"))


@pytest.mark.parametrize(("is_double", "flushed"), [(False, -43), (True, -480)])
def test_normalize_bounds_norms_whose_squares_are_flushed(is_double, flushed):
    """The squares of that much may be flushed to zero in a norm of 2**40 elements."""
    how = response_of("normalize")
    with jax.enable_x64(is_double):
        for exponent in (flushed, flushed + 3, flushed + 20):
            norm = jnp.asarray(2.0**exponent)
            found = float(how.coefficient(norm, jnp.ones_like(norm)))
            assert 0 < found * (2.0**exponent + 2.0**flushed) <= 1 + 2.0**-23


def test_a_response_of_your_own_is_cut_at_the_threshold():
    grads = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    found, _ = clipped_sum(grads, 1.0, response=lambda n, c: 10.0, strict=False)
    np.testing.assert_allclose(found, [1.2, 1.6], rtol=1e-6)
    less, _ = clipped_sum(grads, 1.0, response=lambda n, c: c / (n + 1), strict=False)
    np.testing.assert_allclose(less, [0.5 + 0.2, 2 / 3 + 0.4 / 1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("nonfinite", "method"),
    [("zero", "vmap"), ("zero", "ghost"), ("drop", "vmap"), ("raise", "vmap")],
)
def test_nan_from_response_makes_sum_nan_under_each_policy(nonfinite, method):
    """Policies are for gradients: a faulty response must not go unnoticed."""
    f = clipped_grad(
        loss, BOUND, nonfinite=nonfinite, method=method,
        response=lambda n, c: jnp.where(n > 2 * c, jnp.nan, jnp.minimum(1, c / n)),
    )  # fmt: skip
    total, info = f(PARAMS, BATCH)
    assert jnp.isnan(info.coefficients).any()
    assert (info.coefficients < 1).any()
    assert all(jnp.isnan(x).all() for x in jax.tree.leaves(total))


def test_a_response_that_compares_norms_is_refused():
    with pytest.raises(ValueError, match="one that looks at one norm at a time"):
        clipped_grad(loss, 1.0, response=optclip.responses.detached("proportional"))


def test_a_response_with_a_schedule_is_refused():
    band = optclip.responses.band(low=optax.constant_schedule(0.5))
    with pytest.raises(ValueError, match="`response` must be without a schedule"):
        clipped_grad(loss, 1.0, response=band)


@pytest.mark.parametrize("response", COEFFICIENTS)
def test_thresholds_of_zero_and_inf(response):
    grads = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    assert not clipped_sum(grads, 0.0, response=response)[0].any()
    found, _ = clipped_sum(grads, jnp.inf, response=response)
    wanted = [0, 0] if response == "unit" else [3, 4]
    np.testing.assert_array_equal(found, wanted)


def test_norms_are_those_of_each_example():
    for over in SCOPES:
        values, found = norms(loss, over=SCOPES[over], microbatch_size=2)(PARAMS, BATCH)
        own = by_scope(over)
        if over == "tree":
            own = own["w"]
        elif over == "groups":
            own = {LABELS[key]: n for key, n in own.items()}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, own)
        assert values.shape == (7,)
    padding = np.arange(7) > 3
    values, found = norms(loss)(PARAMS, BATCH * jnp.nan, padding=padding)
    np.testing.assert_array_equal(np.isnan(found), ~padding)
    assert not values[padding].any()


def test_an_aggregator_of_optax_is_the_same_sum():
    per_gradient = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, BATCH)
    clip = per_example.aggregate(BOUND, normalize_by=7.0, strict=False)
    tx = optax.chain(clip, optax.scale(-1.0))
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    found, _ = update(per_gradient, state, PARAMS)
    wanted = expected("tree", "hard")
    assert_close(found, {key: -leaf / 7 for key, leaf in wanted.items()})
    padding = jnp.arange(7) > 3
    found, _ = update(per_gradient, state, PARAMS, padding=padding)
    wanted = expected("tree", "hard", rows=slice(4))
    assert_close(found, {key: -leaf / 7 for key, leaf in wanted.items()})


def test_an_aggregator_notices_gradients_that_are_averaged_already():
    clip = per_example.aggregate(BOUND, normalize_by=7.0)
    with pytest.raises(ValueError, match="must have an axis of examples before those"):
        clip.update(PARAMS["w"], clip.init(PARAMS["w"]), PARAMS["w"])


def test_in_a_chain_of_optax_it_says_where_it_belongs():
    f = clipped_grad(loss, BOUND)
    with pytest.raises(AttributeError, match=r"must change gradients.*in place of"):
        optax.chain(f, optax.sgd(1.0))
    assert not hasattr(f, "clip")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A model that can be called, as those of Flax NNX and Equinox."""

    w: jax.Array
    b: jax.Array

    def __call__(self, example):
        return loss({"w": self.w, "b": self.b}, example)


@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_parameters_may_be_a_model_that_can_be_called(method):
    f = clipped_grad(
        lambda model, x: model(x), BOUND, strict=False, method=method, over="leaf"
    )
    found, info = f(Module(**PARAMS), BATCH)
    assert_close(vars(found), expected("leaf", "hard"), 1e-5)
    assert_close(vars(info.norms), by_scope("leaf"), 1e-5)


def test_a_loss_of_a_tuple_or_a_dict_is_refused():
    for kind, wrong in {
        "tuple": lambda w, x: (w["a"] * x, 1),
        "dict": jax.grad(lambda w, x: w["a"] * x),
    }.items():
        with pytest.raises(TypeError, match=f"for one example, got {kind}.*has_aux"):
            clipped_grad(wrong, 1.0)({"a": jnp.ones(())}, jnp.ones(3))


@pytest.mark.parametrize(
    ("returned", "kind"), [(lambda x: x, r"float32\[\]"), (lambda x: (x,) * 3, "tuple")]
)
def test_has_aux_loss_without_pair_raises(returned, kind):
    f = clipped_grad(lambda w, x: returned(w * x), 1.0, has_aux=True)
    with pytest.raises(TypeError, match=rf"must return \(value, aux\), got {kind}"):
        f(jnp.ones(()), jnp.ones(3))


@pytest.mark.parametrize("make", [functools.partial(clipped_grad, threshold=1), norms])
def test_loss_argument_passed_by_keyword_raises(make):
    with pytest.raises(TypeError, match=r"must be positional, got .*\['example'\]"):
        make(loss)(PARAMS, example=BATCH)


@pytest.mark.parametrize("call", ["values", "grad"])
def test_it_can_be_derived_by_the_threshold_and_parameters(call):
    def whole(threshold, w):
        params = PARAMS | {"w": w}
        found, info = clipped_grad(loss, threshold, strict=False)(params, BATCH)
        return jnp.sum(info.norms if call == "values" else found["w"] ** 2)

    for slope in jax.grad(whole, (0, 1))(BOUND, PARAMS["w"]):
        assert np.isfinite(slope).all()


def test_a_loss_is_refused_in_words():
    def f(function, *args, **more):
        return clipped_grad(function, 1.0, **more)(*args)

    with pytest.raises(TypeError, match="one real number for one example, got float32"):
        f(lambda w, x: w * x, jnp.ones(2), jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="at least 2 arguments, .* got 1"):
        f(loss, PARAMS)
    with pytest.raises(ValueError, match="must have the same first axis"):
        f(lambda w, x: w, jnp.ones(()), [jnp.ones(2), jnp.ones(3)])
    with pytest.raises(ValueError, match="must have the same first axis"):
        f(lambda w, x: w, jnp.ones(()), jnp.ones(()))
    with pytest.raises(ValueError, match="must have the same first axis"):
        f(lambda w, x: w, jnp.ones(()), [])
    with pytest.raises(ValueError, match="in a group, got the leaf 'b' in none"):
        f(loss, PARAMS, BATCH, over=optclip.groups({"w": "all", "b": None}))
    ok = functools.partial(f, loss, PARAMS, BATCH)
    assert ok(over=optclip.groups({"w": "all", "b": "all"}))


@pytest.mark.parametrize(
    ("padding", "error"),
    [(jnp.zeros(7), TypeError), ("x", TypeError), (np.zeros(6, bool), ValueError)],
)
def test_padding_is_refused_in_words(padding, error):
    with pytest.raises(error, match="`padding` must be an array of 7 bools"):
        clipped_grad(loss, 1.0)(PARAMS, BATCH, padding=padding)


@pytest.mark.parametrize("size", [None, 1, 2])
def test_outputs_may_be_empty(size):
    def loss(w, x):
        return jnp.sum(w * x), jnp.zeros((0, 2))

    f = clipped_grad(loss, 1.0, has_aux=True, microbatch_size=size)
    _, info = f(jnp.zeros(3), jnp.ones((6, 3)))
    assert info.aux.shape == (6, 0, 2)
