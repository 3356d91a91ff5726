"""Ghost norms and weighted sums: accuracy in float64, memory and traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optclip.per_example import norms
from tests.support import (
    covering,
    example_losses,
    helpers,
    per_example_oracle,
    random_losses,
)
from tests.support.example_losses import PLACE_EXAMPLES, PLACE_PARAMS, PLACES, cnn


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
