"""`explain` finds planted causes by name, and finds none where there is none."""

from operator import imul, setitem

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from tests.support import covering

BATCH, LENGTH, WORDS, WIDTH = 8, 6, 16, 8


def model_losses(params, tokens, targets, weights):
    """Return the losses of a model that predicts words by its own embedding."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    logp = jax.nn.log_softmax(x @ params["embed"].T)
    return -weights * jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]


def step_of(seed=0):
    rng = np.random.default_rng(seed)

    def matrix(*shape):
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    layers = [{"up": matrix(WIDTH, 16), "down": matrix(16, WIDTH)} for _ in range(2)]
    params = {"embed": matrix(WORDS, WIDTH), "layers": layers}
    tokens = rng.integers(0, WORDS, (2, BATCH, LENGTH))
    return params, [*tokens, np.ones((BATCH, LENGTH), np.float32)]


def test_nothing_stands_out_in_ordinary_step():
    params, batch = step_of()
    found = optclip.explain(model_losses, params, *batch, top=2)
    assert isinstance(found, optclip.typing.Explanation)
    assert found.findings == []
    assert str(found).startswith("Nothing stands out")
    assert "embed" in str(found)
    assert [len(x) for x in (found.leaves, found.examples, found.losses)] == [2, 2, 2]


# Changes of the parameters and the batch (tokens, targets, weights), and their finding.
PLANTED = {
    "bad example": (
        lambda params, batch: setitem(batch[2], 5, 100.0),
        "of the gradient is example 5.",
    ),
    "three bad examples": (
        lambda params, batch: setitem(batch[2], np.s_[[1, 3, 5]], 20.0),
        "whose loss is ",
    ),
    "bad position": (
        lambda params, batch: setitem(batch[2], (2, 4), 300.0),
        "of the gradient is position 4 of example 2.",
    ),
    "bad column": (
        lambda params, batch: setitem(batch[2], np.s_[:, 1], 100.0),
        "of the gradient is position 1.",
    ),
    "duplicated token": (
        lambda params, batch: [setitem(batch[i], 3, (7, 2, 20.0)[i]) for i in range(3)],
        "of the gradient is example 3.",
    ),
    "damaged row": (
        lambda params, batch: imul(params["embed"][11], 300),
        "Parameters: row 11 of `embed` has 3",
    ),
    "exploding layer": (
        lambda params, batch: imul(params["layers"][1]["up"], 1000),
        "Parameters: `layers/1/up` has ",
    ),
    "nan label": (
        lambda params, batch: setitem(batch[2], (2, 4), np.nan),
        "The loss of position 4 of example 2 is not finite.",
    ),
    "nan parameter": (
        lambda params, batch: setitem(params["layers"][0]["down"], (0, 0), np.nan),
        "Parameters are not finite: `layers/0/down`.",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_found(name):
    (params, batch), (plant, words) = step_of(), PLANTED[name]
    plant(params, batch)
    found = optclip.explain(model_losses, params, *batch)
    assert words in "\n".join(found.findings)
    if name == "duplicated token":
        embed = next(leaf for leaf in found.leaves if leaf.name == "embed")
        assert (embed.slice[:2], embed.slice.fraction > 0.5) == ((0, 7), True)


def by_hand(w, x, y):
    """Return each loss's fraction of the gradient in float64."""
    w, x, y = jax.tree.map(np.float64, (w, x, y))
    z = x @ w["w"] + w["b"]
    slope = 2 * (np.sin(z) - y) * np.cos(z)
    grads = slope[..., None] * np.concatenate([x, np.ones((*x.shape[:-1], 1))], -1)
    g = grads.reshape(-1, grads.shape[-1]).mean(0)
    return grads @ g / (g @ g) / slope.size, g


@jax.custom_vjp
def without_forward_mode(z):
    return jnp.sin(z)


without_forward_mode.defvjp(lambda z: (jnp.sin(z), z), lambda z, c: (c * jnp.cos(z),))


@jax.custom_vjp
def without_second_derivative(z):
    return jnp.sin(z)


def slope_by_callback(z, c):
    return (jax.pure_callback(lambda z, c: c * np.cos(z), z, z, c),)


without_second_derivative.defvjp(lambda z: (jnp.sin(z), z), slope_by_callback)


def losses_by(function):
    def losses(w, x, y):
        return jnp.square(function(x @ w["w"] + w["b"]) - y)

    return losses


def linear_step(positions=3):
    rng = np.random.default_rng(0)
    w = {"w": rng.normal(size=4), "b": np.float64(0.5)}
    x, y = rng.normal(size=(7, positions, 4)), rng.normal(size=(7, positions))
    return jax.tree.map(np.float32, (w, x, y))


@pytest.mark.parametrize(
    ("function", "microbatch_size", "scale"),
    [
        (jnp.sin, None, 1.0),
        (jnp.sin, None, 1e25),
        (jnp.sin, 3, 1e-25),
        (without_forward_mode, 3, 1.0),
    ],
)
def test_fractions_are_those_of_directional_derivative(
    function, microbatch_size, scale
):
    """Also of extreme gradients."""
    (w, x, y), losses = linear_step(), losses_by(function)
    fractions, g = by_hand(w, x, y)
    found = optclip.explain(
        lambda *given: scale * losses(*given),
        *(w, x, y), top=99, microbatch_size=microbatch_size,
    )  # fmt: skip
    assert (len(found.losses), found.method) == (21, "derivative")
    places = {(entry.example, entry.position): entry for entry in found.losses}
    pairs = [
        (places[at].fraction, fraction) for at, fraction in np.ndenumerate(fractions)
    ]
    pairs += [(e.fraction, fractions[e.example].sum()) for e in found.examples]
    np.testing.assert_allclose(*np.transpose(pairs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sum(e.fraction for e in found.positions), 1, rtol=1e-12)
    norms = {"": found.norm, **{leaf.name: leaf.norm for leaf in found.leaves}}
    expected = {"": g, "w": g[:-1], "b": g[-1:]}
    for name, part in expected.items():
        wanted = scale * np.linalg.norm(part)
        np.testing.assert_allclose(norms[name], wanted, rtol=1e-5)


def test_fractions_without_second_derivative_are_of_squared_norms():
    w, x, y = jax.tree.map(np.float64, linear_step(positions=1))
    z = x @ w["w"] + w["b"]
    slope = 2 * (np.sin(z) - y) * np.cos(z)
    squares = (slope**2 * (np.sum(x**2, -1) + 1))[:, 0]
    given = jax.tree.map(np.float32, (w, x[:, 0], y[:, 0]))
    found = optclip.explain(losses_by(without_second_derivative), *given, top=9)
    assert found.method == "norms"
    pairs = [(e.fraction, squares[e.example] / squares.sum()) for e in found.examples]
    np.testing.assert_allclose(*np.transpose(pairs), rtol=1e-4)


def test_nan_in_derivative_alone_names_example():
    def losses(w, x):
        return jnp.sqrt(jnp.abs(x @ w))

    x = np.ones((6, 2), np.float32)
    x[4] = 0
    found = optclip.explain(losses, jnp.ones(2), x)
    assert (found.nonfinite_losses, found.nonfinite_examples) == ([], [4])
    assert "All losses are finite, but the gradient is not.\n" in str(found)
    assert "gradient of the array, by example 4." in str(found)


def test_zero_gradient_has_no_contributions():
    found = optclip.explain(lambda w, x: 0 * (x @ w), jnp.ones(2), jnp.ones((3, 2)))
    assert (found.norm, found.examples, found.findings) == (0.0, [], [])


def test_history_compares_each_leaf_with_its_own_median():
    params, batch = step_of()
    usual = optclip.explain(model_losses, params, *batch, top=9).leaves
    # The norms of another transformation are not those of the gradient.
    history = {"clip/norm/embed": np.ones(5), "step": np.arange(5)}
    for leaf in usual:
        norms = np.float64([0, np.nan, 1, 1, 100])
        norms = 0 * norms if leaf.name == "layers/1/up" else norms
        history[f"skip/leaf_norm/{leaf.name}"] = leaf.norm * norms
    history["skip/leaf_norm/layers/0/down"] = history["skip/leaf_norm/embed"] * 1e-3
    found = optclip.explain(model_losses, params, *batch, history=history)
    assert found.leaves[0].name == "layers/0/down"
    assert [leaf.ratio for leaf in found.leaves[1:]] == pytest.approx([1, 1])
    assert "1 times its median" in str(found)
    assert "`layers/0/down` has " in found.findings[0]
    assert "times its median norm; the others have at most 1 times." in str(found)
    risen = {key: x / 20 if "/leaf_norm/" in key else x for key, x in history.items()}
    risen["skip/leaf_norm/layers/0/down"] = risen["skip/leaf_norm/embed"]
    risen = {key: x for key, x in risen.items() if "down" not in key}
    found = optclip.explain(model_losses, params, *batch, history=risen)
    leaves = "Leaves have 20 times to 20 times their median norms."
    assert found.findings[-1] == leaves
    # The gradient of the bias of keys is a rounding error.
    history = {"clip/leaf_norm/0": np.ones(5), "clip/leaf_norm/1": np.full(5, 1e-12)}
    found = optclip.explain(
        lambda w, x: x * w[0] + 1e-7 * w[1], [1.0, 1.0], np.ones(3), history=history
    )
    assert ([leaf.ratio for leaf in found.leaves], found.findings) == ([1, None], [])


def test_fractions_of_complex_parameters_follow_steepest_direction():
    rng = np.random.default_rng(0)
    w, *x = np.complex64(rng.normal(size=(7, 3)) + 1j * rng.normal(size=(7, 3)))
    grads = 2 * (x @ w)[:, None] * np.conj(x)
    fractions = (grads @ np.conj(grads.mean(0))).real
    found = optclip.explain(lambda w, x: jnp.abs(x @ w) ** 2, w, np.stack(x), top=9)
    pairs = [
        (e.fraction, fractions[e.example] / fractions.sum()) for e in found.examples
    ]
    np.testing.assert_allclose(*np.transpose(pairs), rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "microbatch_size"),
    [
        (kind, size)
        for i, size in enumerate([None, 4, 3])
        for kind in covering.rotated([AxisType.Explicit, AxisType.Auto], i)
    ],
)
def test_mesh_has_fractions_of_one_device(kind, microbatch_size):
    w, x, y = linear_step()
    x, y = np.concatenate([x, x[:1] * 9]), np.concatenate([y, y[:1]])
    mesh = jax.make_mesh((4,), ("i",), (kind,))
    split = jax.device_put((x, y), NamedSharding(mesh, P("i")))
    whole = jax.device_put(w, NamedSharding(mesh, P()))
    losses = losses_by(jnp.sin)
    found = optclip.explain(losses, whole, *split, microbatch_size=microbatch_size)
    expected = optclip.explain(losses, w, x, y)
    for one, other in zip(found.losses, expected.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_leaf_with_over_90_percent_is_found():
    def losses(w, x):
        return sum(
            scale * (x @ w[name]) for name, scale in (("a", 1), ("b", 9), ("c", 1))
        )

    params = dict.fromkeys("abc", jnp.ones(4))
    found = optclip.explain(losses, params, np.eye(4, dtype=np.float32))
    assert found.findings == ["97.6% of the squared norm of the gradient is `b`."]


def test_unsplit_batch_without_derivatives_names_no_example():
    found = optclip.explain(jnp.sqrt, jnp.array([1.0, 0.0]))
    assert found.nonfinite_examples == []
    assert found.findings[-1] == "NaN or inf in the gradient of the array."
    found = optclip.explain(without_second_derivative, jnp.ones(3))
    assert (found.method, found.examples, len(found.leaves)) == ("norms", [], 1)


def test_layer_of_stacked_parameters_is_found():
    params = np.ones((4, 2, 3), np.float32)
    params[2] *= 50
    found = optclip.explain(
        lambda w, x: jnp.sum(w * x, (1, 2, 3)), params, params[None]
    )
    assert "Parameters: index 2 of axis 0 of the array has 50 times" in str(found)
    assert "gradient is index 2 of axis 0 of the array." in str(found)


DONATED = jnp.ones(3)
DONATED.delete()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: jax.eval_shape(
                lambda w: optclip.explain(jnp.square, w), jnp.ones(3)
            ),
            *(TypeError, "must be concrete, outside jax.jit, got"),
        ),
        (
            lambda: optclip.explain(jnp.square, DONATED),
            *(ValueError, "Call explain before the step, or copy it"),
        ),
        (
            lambda: optclip.explain(
                lambda w, x: jnp.mean(w * x, keepdims=True), 1.0, np.ones(3)
            ),
            *(ValueError, r"the shape \(1,\) for arguments of several"),
        ),
    ],
    ids=["traced", "donated", "mean that keeps its axis"],
)
def test_unusable_arguments_raise_with_advice(call, error, words):
    with pytest.raises(error, match=words):
        call()
