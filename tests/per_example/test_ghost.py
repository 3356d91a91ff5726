"""Ghost norms and sums: accuracy in float64, memory, ids, rules, overflow, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optclip
from optclip.per_example import clipped_grad, norms
from tests.support import (
    covering,
    example_losses,
    helpers,
    per_example_oracle,
    random_losses,
)
from tests.support.example_losses import PLACE_EXAMPLES, PLACE_PARAMS, PLACES, cnn
from tests.support.helpers import optimized_jit, quick_jit


def kinds_of(loss, params=PLACE_PARAMS, examples=PLACE_EXAMPLES):
    return per_example_oracle.kinds_of(loss, params, examples)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (cnn(), {"formula", "materialized"}),
        ((PLACES["rows_out_of_bounds"],), {"formula", "unused"}),
    ],
    ids=["cnn", "rows_out_of_bounds"],
)
def test_plan_names_kinds_of_leaves_of_model(given, kinds):
    assert set(jax.tree.leaves(kinds_of(*given))) == kinds


def test_ghost_cnn_equals_gradients():
    """The session `stacks` compares a transformer of Flax."""
    run = jax.jit if covering.full else per_example_oracle.always_quick_jit
    per_example_oracle.check(*cnn(), run=run)


@pytest.mark.parametrize("first", range(4))
def test_ghost_random_program_equals_gradients(request, first):
    count = request.config.getoption("examples") or (2000 if covering.full else 0)
    seeds = range(count) if count else random_losses.FEW
    with jax.enable_x64(True):
        for seed in seeds[first::4]:
            loss, params, examples = random_losses.make(seed)
            try:
                per_example_oracle.check(loss, params, examples, rtol=1e-9)
            except AssertionError as error:
                raise AssertionError(f"The loss of the seed {seed}.") from error
            if seed % 100 > 95:
                jax.clear_caches()


@pytest.mark.parametrize("name", PLACES)
def test_ghost_unusual_use_of_parameters_equals_gradients(name):
    per_example_oracle.check(PLACES[name], PLACE_PARAMS, PLACE_EXAMPLES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ghost_low_precision_equals_gradients(dtype):
    """Of the computation, and in bfloat16 of parameters too."""
    params = PLACE_PARAMS
    if dtype == "bfloat16":
        params = {name: jnp.asarray(x, dtype) for name, x in params.items()}

    def loss(p, x):
        y = jnp.tanh(x.astype(dtype) @ p["w"].astype(dtype))
        return jnp.sum(y, dtype="float32")

    rtol = 4 * float(jnp.finfo(dtype).eps)
    per_example_oracle.check(loss, params, PLACE_EXAMPLES, rtol=rtol)


def large_loop(p, x):
    """The loop changes a weight of over 2**20 elements, and so is one site."""

    def step(_, carry):
        x, w = carry
        x = jnp.tanh(x @ w)
        return x, w + 0.1 * x.mean()

    return jnp.sum(lax.fori_loop(0, 2, step, (x, p["w"]))[0])


def large_tied_head(p, x):
    """Two uses of a leaf; gradients of over 2**22 elements are made one by one.

    Beside it a small leaf, the first state of a scan, is measured by itself.
    """
    states = lax.scan(lambda state, x: (state * x, state), p["v"], x)[1]
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["w"].T) + jnp.sum(states * x)


@pytest.mark.parametrize(
    ("loss", "shape"), [(large_loop, (1025, 1025)), (large_tied_head, (1025, 2050))]
)
def test_ghost_large_leaf_equals_gradients(loss, shape):
    params = {"w": example_losses.normal(*shape) / 16, "v": example_losses.normal(1025)}
    examples = example_losses.normal(2, 1, shape[0])
    per_example_oracle.check(loss, params, examples, rtol=1e-5)


CHANGES = {
    "transposed": (lambda w: w.T, "formula"),
    "reshaped": (lambda w: w.reshape(2, -1).reshape(4, 4), "formula"),
    "reversed": (lambda w: w[::-1], "formula"),
    "cut": (lambda w: w[:, :3], "formula"),
    "split": (lambda w: jnp.split(w, 2, axis=1)[0], "formula"),
    "negated": (lambda w: -w, "formula"),
    "cast": (lambda w: w.astype(jnp.bfloat16), "formula"),
    "lifted": (lambda w: jnp.squeeze(w[None], 0), "formula"),
    "sine": (jnp.sin, "materialized"),
    "doubled": (lambda w: w + w, "materialized"),
    "stacked": (lambda w: jnp.stack([w, w])[1], "materialized"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_plan_keeps_formula_for_moved_elements_only(name):
    change, kind = CHANGES[name]
    assert kinds_of(lambda p, x: jnp.sum(x @ change(p["w"])))["w"] == kind


def test_ghost_norm_of_python_number_counts_it():
    params = {"w": PLACE_PARAMS["w"], "scale": 2.0}
    f = norms(lambda p, x: jnp.sum(x) * p["scale"], method="ghost", over="leaf")
    _, found = helpers.quick_jit(f)(params, PLACE_EXAMPLES)
    expected = np.abs(PLACE_EXAMPLES.astype(float).sum((1, 2)))
    np.testing.assert_allclose(found["scale"], expected, rtol=1e-5)
    np.testing.assert_array_equal(found["w"], [0, 0])


BATCH, T, WIDTH, LAYERS, WORDS = 64, 4, 256, 2, 1000


def word_model(p, ids):
    h = p["words"][ids]
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["layers"])[0]
    return jnp.sum(jnp.tanh(h @ p["head"]))


def test_ghost_norms_allocate_no_batch_of_gradients():
    params = {
        "words": jnp.zeros((WORDS, WIDTH)),
        "layers": jnp.zeros((LAYERS, WIDTH, WIDTH)),
        "head": jnp.zeros((WIDTH, 2 * WIDTH)),
    }
    ids = np.zeros((BATCH, T), np.int32)
    assert set(kinds_of(word_model, params, ids).values()) == {"formula"}
    f = helpers.optimized_jit(norms(word_model, method="ghost"))
    memory = f.lower(params, ids).compile().memory_analysis()
    leaves = 4 * sum(x.size for x in params.values())
    assert memory.temp_size_in_bytes < BATCH * leaves / 5


def test_ghost_norms_trace_loss_equally_often_for_any_batch():
    shapes, params = [], np.ones((3, 2), np.float32)

    def counted(p, x):
        shapes.append(x.shape)
        return jnp.sum(x @ p)

    for batch in (5, 50):
        examples = np.ones((batch, 3), np.float32)
        jax.eval_shape(norms(counted, method="ghost"), params, examples)
    assert shapes == [(3,)] * 2 * (len(shapes) // 2)


# Ids of each integer dtype.

NUM_IDS = 6
LOOKUPS = {
    "fill": lambda w, ids: jnp.take(w, ids, axis=0, mode="fill", fill_value=0),
    "clip": lambda w, ids: jnp.take(w, ids, axis=0, mode="clip"),
    "columns": lambda w, ids: jnp.take(w.T, ids, axis=1, mode="fill", fill_value=0).T,
    "drop": lambda w, ids: w.at[ids].get(mode="drop", fill_value=0),
    "indexed": lambda w, ids: w[ids],
}
WEIGHTS = np.random.default_rng(0).normal(size=(2, NUM_IDS, 2)).astype(np.float32)


# Dtypes of each lookup. JAX rejects signed ids in "drop" and "indexed".
DTYPES = {
    "fill": ("int8", "uint8", "int16", "uint16", "int32", "uint32"),
    "clip": ("uint8", "uint16"),
    "columns": ("int8", "uint8"),
    "drop": ("uint8",),
    "indexed": ("uint8",),
}


def sizes(dtype):
    """Return table sizes below, at and above the number of ids of a dtype."""
    count = np.iinfo(dtype).max + 1
    return [300] if count > 2**16 else [count - 1, count, count + 1]


def test_ghost_ids_of_integer_dtype_equal_gradients():
    # Below, at and above the number of ids for one lookup, above it for the others.
    cases = [("fill", d, n) for d in DTYPES["fill"] for n in sizes(d)]
    cases += [(k, d, sizes(d)[-1]) for k in LOOKUPS for d in DTYPES[k] if k != "fill"]
    tables = [np.ones((rows, 2), np.float32) for *_, rows in cases]
    lasts = [(dtype, min(np.iinfo(dtype).max, rows + 2)) for _, dtype, rows in cases]
    ids = [
        np.array([[0, 1, n // 2, n, n, n - 1], [n, 3, 43, 44, n - 1, 3]], dtype)
        for dtype, n in lasts
    ]

    def loss(tables, example):
        ids, weights = example
        total = 0.0
        for (lookup, *_), w, of_one in zip(cases, tables, ids, strict=True):
            total += jnp.sum(LOOKUPS[lookup](w, of_one) * weights)
        return total

    f = norms(loss, method="ghost", over="leaf")
    assert {*per_example_oracle.kinds_of(loss, tables, (ids, WEIGHTS))} == {"formula"}
    _, measured = helpers.quick_jit(f)(tables, (ids, WEIGHTS))
    for case, of_one, norm in zip(cases, ids, measured, strict=True):
        lookup, _, rows = case
        limit = rows - 1 if lookup == "clip" else rows + 2
        grads = np.zeros((2, rows + 3, 2))
        np.add.at(grads, ([[0], [1]], np.minimum(np.int64(of_one), limit)), WEIGHTS)
        expected = np.linalg.norm(grads[:, :rows], axis=(1, 2))
        np.testing.assert_allclose(norm, expected, rtol=1e-6, err_msg=str(case))


def test_ghost_sum_of_small_ids_is_bounded():
    def loss(w, ids):
        return 1e3 * jnp.sum(jnp.take(w, ids, axis=0))

    f = clipped_grad(loss, 1.0, method="ghost")
    ids = np.array([[100, 200, 250, 104]], np.uint8)
    total, info = helpers.quick_jit(f)(jnp.ones((300, 4)), ids)
    np.testing.assert_allclose(info.norms, [4e3], rtol=1e-6)
    assert jnp.linalg.norm(total) <= f.sensitivity()


@pytest.mark.parametrize(("rows", "kind"), [(46_000, "formula"), (70_000, "")])
def test_plan_has_formula_for_rows_that_int32_counts(rows, kind):
    """70,000 squared rows overflow."""
    kinds = []
    table = jax.ShapeDtypeStruct((rows, rows, 1), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, NUM_IDS), jnp.int32)
    kinds_of = functools.partial(
        per_example_oracle.kinds_of, lambda w, i: jnp.sum(w[i, i])
    )
    jax.eval_shape(lambda *given: kinds.append(kinds_of(*given)), table, ids)
    assert kinds == [kind or "materialized"]


# A `jax.custom_vjp` in the loss: ghost clipping equals a loop, or raises.

BOUND, N = 0.05, 32


# It is not linear in the cotangent.
def clipping_rule(x):
    return optclip.clip_cotangent(x, 0.1, axis=None)


def looped(step, p, x):
    return lax.scan(lambda h, _: (step(p, h), None), x, None, length=3)[0]


def site(how):
    """A matrix product whose rule changes the cotangents of both operands."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(kept, g):
        _, pull = jax.vjp(jnp.matmul, *kept)
        return jax.tree.map(lambda g: jax.vjp(how, g)[1](g)[0], pull(g))

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return lambda p, x: product(x, p["w"])


# Its derivative is linear: JAX transposes it.
twice = jax.custom_jvp(lambda w, x: x @ w)
twice.defjvp(lambda given, by: (twice(*given), 2 * (given[1] @ by[0])))

# What a layer does with a rule: on its way to the loss, and between a parameter and the
# product with data, where it need not scale with the coefficient.
ON_DATA = {
    "custom_jvp on a weight": lambda how: (
        lambda p, x: how(twice(jnp.sin(p["w"]), x)) * p["b"]
    ),
    "linear solve": lambda how: (
        lambda p, x: jax.lax.custom_linear_solve(
            lambda v: v,
            p["w"] @ x.T,
            lambda _, b: b,
            lambda _, g: jax.vjp(how, g)[1](g)[0],
        )
    ),
    "before": lambda how: lambda p, x: jnp.tanh(how(x)) @ p["w"] * p["b"],
    "scan": lambda how: (
        lambda p, x: looped(lambda p, h: jnp.tanh(how(h) @ p["w"] + p["b"]), p, x)
    ),
    "stopped": lambda how: lambda p, x: x @ p["w"] + how(lax.stop_gradient(p["w"])[0]),
}
ON_WEIGHT = {
    "weight": lambda how: lambda p, x: jnp.tanh(x @ how(p["w"])),
    "weight in jit": lambda how: lambda p, x: x @ jax.jit(lambda w: how(2 * w))(p["w"]),
    "weight in cond": lambda how: (
        lambda p, x: x @ lax.cond(p["b"][0] > 0, how, jnp.sin, p["w"])
    ),
    "weight in scan": lambda how: (
        lambda p, x: looped(lambda p, h: jnp.tanh(h @ how(p["w"])), p, x)
    ),
    "solved weight": lambda how: (
        lambda p, x: (
            x
            @ jax.lax.custom_linear_solve(
                lambda v: v,
                p["w"],
                lambda _, b: b,
                lambda _, g: jax.vjp(how, g)[1](g)[0],
            )
        )
    ),
    "site": site,
    "site in cond": lambda how: (
        lambda p, x: lax.cond(x.sum() > 0, lambda: how(x @ p["w"]), lambda: x @ p["w"])
    ),
    "site in scan": lambda how: lambda p, x: looped(site(how), p, x),
}
PARAMS = {
    "w": (np.random.default_rng(0).normal(size=(N, N)) / 6).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=N).astype(np.float32),
}
EXAMPLES = np.random.default_rng(2).normal(size=(4, 3, N)).astype(np.float32)


def loss_of(layer):
    return lambda p, x: jnp.sum(layer(p, x) ** 2)


# The rule on the way from data to the loss is in the random programs.
@pytest.mark.parametrize("place", ON_DATA)
def test_custom_vjp_outside_weights_equals_gradients(place):
    loss = loss_of(ON_DATA[place](clipping_rule))
    per_example_oracle.check(loss, PARAMS, EXAMPLES, rtol=1e-5)


@pytest.mark.parametrize("place", ON_WEIGHT)
def test_ghost_custom_vjp_on_weight_raises(place):
    loss = loss_of(ON_WEIGHT[place](clipping_rule))
    for make in (norms, lambda loss, **how: clipped_grad(loss, BOUND, **how)):
        with pytest.raises(ValueError, match=r"custom_vjp.*leaf 'w'.*method='vmap'"):
            jax.eval_shape(make(loss, method="ghost"), PARAMS, EXAMPLES)


# Where squares overflow, vanish or cancel.

ROWS, INPUTS, OUTPUTS = 3, 32, 8


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def products(p, example):
    """Compute a loss with gradients `x.T d` (matrix) and sums of `d` (bias, rows)."""
    x, d, ids = example
    return jnp.sum((x @ p["w"] + p["b"] + p["rows"][ids]) * d)


ZEROS = {
    "w": np.zeros((INPUTS, OUTPUTS), np.float32),
    "b": np.zeros(OUTPUTS, np.float32),
    "rows": np.zeros((9, OUTPUTS), np.float32),
}
IDS = np.array([[1, 1, 2]])
NORMS = {over: norms(products, method="ghost", over=over) for over in ("leaf", "tree")}
RUN = {over: jax.jit(f) for over, f in NORMS.items()}


def found_and_expected(x, d):
    """Norms of each leaf and the tree for one example, and those in float64."""
    x, d = (np.asarray(each, np.float32) for each in (x, d))
    (_, found), (_, whole) = (f(ZEROS, (x[None], d[None], IDS)) for f in RUN.values())
    x, d = np.float64(x), np.float64(d)
    rows = [d[0] + d[1], d[2]]
    expected = {"w": x.T @ d, "b": d.sum(0), "rows": rows}
    expected = {name: np.linalg.norm(g) for name, g in expected.items()}
    expected["tree"] = np.hypot.reduce([*expected.values()])
    return {
        k: float(norm[0]) for k, norm in (found | {"tree": whole}).items()
    }, expected


@pytest.mark.parametrize(
    ("of_x", "of_d"),
    [
        (1, 1), (0, 0), (1e-25, 1e15), (1e25, 1e-20), (1e10, 1e20), (1e-12, 1e-6),
        (1, 1e30), (1e20, 1e20), (1e-20, 1e-20), (1e-30, 1e20), (1e-30, 1e30),
        # Leaves of unequal size.
        (1e25, 1e-15), (0, 1e15), (1e-20, 1e10),
    ],
)  # fmt: skip
def test_ghost_norm_of_any_size_is_accurate_or_inf_or_0(of_x, of_d):
    found, expected = found_and_expected(
        normal(ROWS, INPUTS) * of_x, normal(ROWS, OUTPUTS, seed=1) * of_d
    )
    for name, right in expected.items():
        if right < 2.0**-60:
            right = 0
        elif right > np.finfo(np.float32).max:
            right = np.inf
        np.testing.assert_allclose(found[name], right, rtol=1e-6)


def test_ghost_norm_ignores_overflow_at_position_without_activation():
    """The squares of its cotangent overflow, but it does not enter the gradient."""
    x, d = normal(ROWS, INPUTS), normal(ROWS, OUTPUTS, seed=1)
    x[0], d[0] = 0, 1e30
    x[1], d[1] = 1e-20 * x[1], 1e20 * d[1]
    d[2] = 0
    x[2] *= 1e30
    found, expected = found_and_expected(x, d)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_ghost_norm_of_nonfinite_data_is_nonfinite(bad, place):
    arrays = [normal(ROWS, INPUTS), normal(ROWS, OUTPUTS, seed=1)]
    arrays[place][1, 2] = bad
    with np.errstate(invalid="ignore"):
        found, _ = found_and_expected(*arrays)
    assert not np.isfinite(found["w"])
    assert np.isfinite(found["b"]) == (place == 0)


@pytest.mark.parametrize("rest", [0, 1e-6, 1e-4, 1e-2, 0.1, 0.5])
def test_ghost_norm_of_canceling_positions_keeps_precision(rest):
    """As accurate as float32; products would keep half of the digits."""
    x, d = normal(ROWS, INPUTS), normal(ROWS, OUTPUTS, seed=1)
    x[1], d[1] = x[0] + rest * x[1], -d[0]
    d[2] *= rest
    example = (x[None], d[None], IDS)
    assert per_example_oracle.kinds_of(products, ZEROS, example)["w"] == "formula"
    found, expected = found_and_expected(x, d)
    least = 1e-7 * np.linalg.norm(x) * np.linalg.norm(d)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6, atol=least)


# What method="ghost" rejects, and its sum for unusual data.

ONES, PAIRS = np.ones(2, np.float32), np.ones((3, 2), np.float32)


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
        both = helpers.quick_jit(lambda p, f=f, m=measure: (f(p, PAIRS), m(p, PAIRS)))
        results.append(both(params))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_ghost_rejects_complex_parameters():
    params = np.ones(2, np.complex64)

    def modulus(w, x):
        return jnp.sum(jnp.abs(w * x))

    with pytest.raises(ValueError, match="complex parameters.*method='vmap'"):
        clipped_grad(modulus, 1.0, method="ghost", strict=False)(params, PAIRS)
    f = clipped_grad(modulus, 1.0)
    found, _ = quick_jit(f)(params, PAIRS)
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
        f({"w": ONES, "n": n}, PAIRS)


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
    found, info = quick_jit(f)(half, PAIRS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(info.norms, np.sqrt(2), rtol=1e-2)
    # Computing only norms needs no sum.
    jax.eval_shape(norms(linear, method="ghost"), half, PAIRS)


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
