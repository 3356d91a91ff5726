"""Parameters in places of their own: each is right, or an error says what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optclip.per_example._ghost import _formulas, _plan, _squares
from optclip.per_example._ghost._choice import choice_of
from tests.support import per_example_oracle
from tests.support.per_example_oracle import scaled_squares

N, T, B = 4, 3, 2


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed + len(shape))
    return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)


PARAMS = {"w": normal(N, N), "v": normal(N), "s": normal(2, N, N), "n": jnp.arange(3)}
EXAMPLES = normal(B, T, N, seed=5)


def check(loss, params=PARAMS, examples=EXAMPLES, **how):
    per_example_oracle.check(loss, params, examples, **how)


def kind_of_w(loss, params=PARAMS):
    return choice_of(loss, params, EXAMPLES[0]).kinds["w"]


def test_parameters_that_meet_no_data():
    check(lambda p, x: jnp.sum(p["w"] ** 2))
    check(lambda p, x: jnp.sum(x @ p["w"]) + jnp.sum(p["w"] ** 2))


def test_a_loss_without_parameters_and_parameters_without_leaves():
    check(lambda p, x: jnp.sum(x))
    values, aux, squares = scaled_squares(lambda p, x: jnp.sum(x), {}, EXAMPLES)
    np.testing.assert_allclose(values, EXAMPLES.sum((1, 2)), rtol=1e-6)
    assert (aux, squares) == (None, {})


def test_what_needs_no_compiler():
    check(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) * p["v"]), run=lambda f: f)


def test_aux_comes_for_each_example():
    def loss(p, x):
        y = x @ p["w"]
        return jnp.sum(y), {"y": y, "index": jnp.argmax(y[0]), "w": p["v"]}

    values, aux, _ = scaled_squares(loss, PARAMS, EXAMPLES, has_aux=True)
    y = EXAMPLES @ PARAMS["w"]
    np.testing.assert_allclose(values, y.sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(aux["y"], y, rtol=1e-5)
    np.testing.assert_array_equal(aux["index"], y[:, 0].argmax(-1))
    np.testing.assert_array_equal(aux["w"], np.stack([PARAMS["v"]] * B))


def test_a_loop_that_changes_a_parameter(monkeypatch):
    def loss(p, x):
        def step(i, carry):
            x, w = carry
            x = jnp.tanh(x @ w)
            return x, w + 0.1 * x.mean()

        return jnp.sum(lax.fori_loop(0, 3, step, (x, p["w"]))[0])

    check(loss)
    # Of a large one the loop is one site.
    monkeypatch.setattr(_plan, "LARGE", 8)
    check(loss)


def test_a_loop_of_unknown_length_is_an_error_of_jax():
    def loss(p, x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + p["v"] ** 2, x).sum()

    with pytest.raises(ValueError, match="Reverse-mode differentiation"):
        scaled_squares(loss, PARAMS, EXAMPLES)


def test_effects_see_parameters_and_data():
    seen = []

    def loss(p, x):
        jax.debug.callback(lambda w: seen.append(w.sum()), p["w"])
        return jnp.sum(x @ p["w"])

    check(loss)
    assert seen


def test_a_reference_that_a_parameter_is_written_to():
    def loss(p, x):
        ref = jax.new_ref(p["w"])
        ref[...] = ref[...] * x.sum()
        return jnp.sum(jnp.tanh(x @ ref[...]))

    check(loss)


def test_what_gives_no_number_is_no_site():
    def loss(p, x):
        chosen = jnp.argmax(x[0] * p["v"])
        return jnp.sum(jnp.where(x > p["v"], x, 0) @ p["w"]) + x[0, chosen]

    check(loss)


def test_branches_in_loops():
    def loss(p, x):
        def step(x, w):
            x = lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x - w[0], p["w"])
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(step, x, p["s"])[0])

    check(loss)


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.uint8])
def test_ghost_integer_data_equals_loop(dtype):
    """A matrix product takes them as they are."""
    check(
        lambda p, x: jnp.sum(jnp.tanh(x @ p["w"])),
        examples=(10 * EXAMPLES).astype(dtype),
    )


def test_layers_made_of_parameters_in_the_loop():
    """A loop that gives what it makes of parameters alone."""

    def loss(p, x):
        def step(x, w):
            return jnp.tanh(x @ w), (jnp.sin(w), jnp.arange(N))

        x, (made, steps) = lax.scan(step, x, p["s"])
        return jnp.sum(x @ made[0] + made[1].sum() + steps.sum())

    check(loss)


def test_rows_by_index_out_of_bounds_and_by_several():
    for mode in ("clip", "fill", "drop"):
        ids = jnp.array([[0, 9, -9], [3, 3, 4]])

        def loss(p, i, mode=mode):
            rows = p["w"].at[i].get(mode=mode, fill_value=0)
            return jnp.sum(jnp.sin(rows * jnp.arange(12.0).reshape(3, 4)))

        assert choice_of(loss, PARAMS, ids[0]).kinds["w"] == "embedding"
        check(loss, examples=ids)
    check(lambda p, i: jnp.sin(p["s"][i % 2, i]).sum(), examples=jnp.array([[1], [2]]))


MOVES = {
    "transposed": lambda w: w.T,
    "reshaped": lambda w: w.reshape(2, -1).reshape(N, N),
    "reversed": lambda w: w[::-1],
    "cut": lambda w: w[:, :3],
    "split": lambda w: jnp.split(w, 2, axis=1)[0],
    "negated": lambda w: -w,
    "cast": lambda w: w.astype(jnp.bfloat16),
    "lifted": lambda w: jnp.squeeze(w[None], 0),
}


@pytest.mark.parametrize("move", MOVES)
def test_elements_that_are_moved_about_keep_their_formula(move):
    assert kind_of_w(lambda p, x: jnp.sum(x @ MOVES[move](p["w"]))) == "product"


def test_elements_that_are_changed_or_taken_twice_have_none():
    for change in (jnp.sin, lambda w: w + w, lambda w: jnp.stack([w, w])[1]):
        kind = kind_of_w(lambda p, x, change=change: jnp.sum(x @ change(p["w"])))
        assert kind == "materialized"


def test_elements_that_two_products_take_of_one_leaf():
    check(lambda p, x: jnp.sum(jnp.tanh(x @ p["s"][0]) @ p["s"][1]))
    check(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["w"]))


def test_products_of_complex_numbers_and_empty_arrays():
    def loss(p, x):
        y = jnp.fft.fft(x) @ p["w"].astype(jnp.complex64)
        return jnp.sum(jnp.abs(y) ** 2) + jnp.sum(x[:0] @ p["s"][0]) + p["v"].sum()

    check(loss)


def test_convolutions_that_are_no_dense_layer():
    numbers = ("NHC", "HIO", "NHC")

    def loss(p, x):
        def one(x):
            return lax.conv_general_dilated(
                x[None], p["s"], (1,), "SAME", dimension_numbers=numbers
            )

        # Here the kernel is data.
        y = lax.conv_general_dilated(
            p["w"][None], x[:, None], (1,), "SAME",
            dimension_numbers=numbers, feature_group_count=N,
        )  # fmt: skip
        return jnp.sum(jax.vmap(one)(jnp.stack([x, 2 * x])) ** 2) + jnp.sum(y**2)

    check(loss)


def test_large_leaves_are_made_one_by_one(monkeypatch):
    monkeypatch.setattr(_squares, "SMALL", 0)
    monkeypatch.setattr(_formulas, "CHUNK", 16)
    tied = jnp.zeros((40, N)) + 0.1 + jnp.arange(160.0).reshape(40, N) / 99

    def loss(p, x):
        def step(state, x):
            return state * x, state

        moved = lax.scan(step, p["w"][0], x)[1]
        return jnp.sum(jnp.tanh(x[:1] @ p["e"].T) @ p["e"]) * jnp.sum(p["v"] * moved)

    check(loss, {"e": tied, "v": PARAMS["v"], "w": PARAMS["w"]})


def test_weak_types_and_numpy_and_numbers_of_python():
    params = {"w": np.asarray(PARAMS["w"]), "scale": 2.0}
    examples = np.asarray(EXAMPLES)

    def loss(p, x):
        return jnp.sum(lax.scan(lambda c, x: (c * p["scale"], x @ p["w"]), 1.0, x)[1])

    _, _, squares = scaled_squares(loss, params, examples)
    expected = np.square(examples.sum(1)).sum(-1) * N
    np.testing.assert_allclose(squares["w"].norm() ** 2, expected, rtol=1e-5)
    np.testing.assert_array_equal(squares["scale"].norm(), [0, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype):
    """Of parameters, or of the computation alone: as right as what is computed."""
    low = jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, PARAMS)
    rtol = 4 * float(jnp.finfo(dtype).eps)

    def cast(p, x):
        return jnp.sum(
            jnp.tanh(x.astype(dtype) @ p["w"].astype(dtype)), dtype="float32"
        )

    for params in (PARAMS, low):
        check(cast, params, rtol=rtol)


def test_meshes():
    """Examples over devices, in shard_map: no sum over devices comes in."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def loss(p, x):
        h = jnp.tanh(x @ p["w"] + p["v"])
        return jnp.sum(lax.scan(lambda h, w: (h @ w, None), h, p["s"])[0] @ p["w"])

    def squares(params, examples):
        return scaled_squares(loss, params, examples)[2]

    whole = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), PARAMS)
    mapped = jax.shard_map(squares, mesh=mesh, in_specs=(whole, spec), out_specs=spec)
    expected = jax.jit(squares)(PARAMS, EXAMPLES)
    for found in (
        jax.jit(mapped)(PARAMS, EXAMPLES),
        jax.jit(squares)(
            PARAMS, jax.device_put(EXAMPLES, jax.NamedSharding(mesh, spec))
        ),
    ):
        for one, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-6)


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="must be real.*complex64.*two leaves"):
        scaled_squares(lambda p, x: p.real.sum(), jnp.ones(2, complex), EXAMPLES)


@pytest.mark.parametrize("loss", [lambda p, x: x @ p["w"], lambda p, x: jnp.int32(3)])
def test_a_loss_that_is_no_number_is_refused(loss):
    with pytest.raises(ValueError, match="one real number for one example"):
        scaled_squares(loss, PARAMS, EXAMPLES)
