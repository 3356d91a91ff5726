"""Test parameters clipped after an optimizer's step, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers, oracles

RNG = functools.partial(np.random.default_rng, 7)
KEEP_NORM = optclip.clip_by(
    thresholds.initial_norm(), over="leaf", response="normalize", name="weights"
)
COLUMNS = optclip.axes(0)
TWO = np.ones((2, 2), np.float32)


def stepped(tx, params, grads, state=None):
    """Return the parameters and the state after one step."""
    state = tx.init(params) if state is None else state
    updates, state = helpers.quick_jit(tx.update)(grads, state, params)
    return optax.apply_updates(params, updates), state


def by_column(norm_to):
    """Map the norm of each column, as Keras's constraints do without their epsilon."""

    def oracle(x):
        norm = np.linalg.norm(x, axis=0, keepdims=True)
        return x * np.where(norm > 0, norm_to(norm) / np.where(norm > 0, norm, 1), 1)

    return oracle


def towards_band(norm, high):
    """MinMaxNorm with min_value=1 and rate=0.3."""
    size = jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)
    return 0.7 + 0.3 * jnp.clip(size, 1.0, high) / size


CONSTRAINTS = {
    "MaxNorm": (
        optclip.clip_by(2.0, over=COLUMNS),
        by_column(lambda n: np.minimum(n, 2)),
    ),
    "UnitNorm": (
        optclip.clip_by(1.0, over=COLUMNS, response="normalize"),
        by_column(np.ones_like),
    ),
    "MinMaxNorm": (
        optclip.clip_by(2.0, over=COLUMNS, response=optclip.responses.band(0.5)),
        by_column(lambda n: np.clip(n, 1, 2)),
    ),
    "MinMaxNorm(rate=0.3)": (
        optclip.clip_by(2.0, over=COLUMNS, response=towards_band),
        by_column(lambda n: 0.7 * n + 0.3 * np.clip(n, 1, 2)),
    ),
    "NonNeg": (
        optclip.clip_by_value(lower=0.0, upper=np.inf),
        lambda x: np.maximum(x, 0),
    ),
    "WGAN": (optclip.clip_by_value(0.5), lambda x: np.clip(x, -0.5, 0.5)),
    "spectral cap": (
        optclip.clip_by_singular_value(1.5),
        lambda x: oracles.by_singular_value(x, 1.5),
    ),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_new_parameters_meet_constraint(name):
    """Column norms are from 0.5 to 4, one is 0; `tests/integration` compares Keras."""
    clip, oracle = CONSTRAINTS[name]
    params, grads = RNG().normal(size=(2, 6, 5)).astype(np.float32)
    params *= np.float32([0.2, 0.4, 1, 2, 0])
    grads *= np.float32([0.1, 0.1, 0.1, 0.1, 0])
    tx = optclip.constrain(optax.sgd(0.1), clip)
    new, state = stepped(tx, params, grads)
    plain = np.float64(params) - 0.1 * np.float64(grads)
    assert not np.allclose(plain, oracle(plain), rtol=1e-3)
    np.testing.assert_allclose(new, oracle(plain), rtol=1e-6, atol=2e-6)
    # A step without a gradient changes only what the first one had to round.
    same, _ = stepped(tx, new, np.zeros_like(grads), state)
    if name not in ("MinMaxNorm(rate=0.3)", "spectral cap"):
        np.testing.assert_allclose(same, new, rtol=2.5e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_unchanged_parameters_get_update_of_inner_bit_for_bit(dtype):
    params, grads = (jnp.asarray(x, dtype) for x in RNG().normal(size=(2, 64)))
    inner = optax.sgd(0.1, momentum=0.9)
    # Updates in float32 would break the `cond`.
    tx = optclip.constrain(inner, optclip.clip_by_value(1.0))
    tx = optax.apply_if_finite(tx, 3)
    expected, _ = helpers.quick_jit(inner.update)(grads, inner.init(params), params)
    updates, _ = helpers.quick_jit(tx.update)(grads, tx.init(params), params)
    assert updates.dtype == expected.dtype
    plain = np.float64(params) + np.float64(expected)
    clipped, is_inside = np.clip(plain, -1, 1), np.abs(plain) <= 1
    assert 0 < is_inside.sum() < 64
    helpers.assert_identical(updates[is_inside], expected[is_inside])
    new = np.float64(optax.apply_updates(params, updates))
    eps = float(jnp.finfo(dtype).eps)
    larger = np.maximum(np.abs(np.float64(params)), np.abs(clipped))
    assert np.all(np.abs(new - clipped) <= eps * larger)


def test_rounding_error_heals_in_next_step():
    tx = optclip.constrain(optax.sgd(0.1), optclip.clip_by_value(0.01))
    params, state, errors = 3 * RNG().normal(size=64).astype(np.float32), None, []
    for _ in range(3):
        params, state = stepped(tx, params, np.zeros(64, np.float32), state)
        excess = np.abs(np.float64(params)) - np.float32(0.01)
        errors.append(np.max(excess))
    assert 0 < errors[0] <= 9 * np.finfo("float32").eps
    assert errors[-1] <= 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_parameters_get_update_of_inner_and_teach_nothing(bad):
    rule = thresholds.quantile(0.5, window=4)
    tx = optclip.constrain(optax.sgd(1.0), optclip.clip_by_norm(rule))
    params = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    grads = {"a": np.float32([bad, 1, 1]), "b": np.float32([-9, -9])}
    _, before = stepped(tx, params, jax.tree.map(np.zeros_like, params))
    updates, after = helpers.quick_jit(tx.update)(grads, before, params)
    helpers.assert_identical(updates["a"], -grads["a"])
    assert np.all(updates["b"] < 9)
    old, new = (
        jax.tree.leaves(state.constrain_clip.clip_memory)[0]
        for state in (before, after)
    )
    assert (old != new).any(axis=1).tolist() == [False, True]


@pytest.mark.parametrize(
    "clip",
    [
        optclip.clip_by_norm(1.0, nonfinite="zero"),
        optclip.clip_by(1.0, response="drop"),
        optclip.clip_by(1.0, response=optclip.responses.detached("drop")),
        optax.chain(optclip.clip_by_norm(1.0, nonfinite="zero"), optax.identity()),
        optax.masked(optclip.clip_by_norm(1.0, nonfinite="zero"), True),
        optax.partition({"w": optclip.clip_by_norm(1.0, nonfinite="zero")}, "w"),
        optax.inject_hyperparams(optclip.clip_by_norm)(1.0, nonfinite="zero"),
        optclip.skip(optax.identity()),
        optax.apply_if_finite(optax.clip(1.0), 3),
        optax.MultiSteps(optax.clip(1.0), 2).gradient_transformation(),
    ],
)
def test_clip_that_zeroes_is_rejected(clip):
    tx = optclip.constrain(optax.sgd(1.0), clip)
    with pytest.raises(ValueError, match=r"`clip` must not (have .* to 0|be inside)"):
        tx.init(np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("params", "updates", "error", "words"),
    [
        (None, TWO, ValueError, "params` must be .*constrain clips, got None"),
        (TWO, helpers.as_bcoo(TWO), TypeError, "must be dense, got a BCOO"),
    ],
)
def test_call_without_parameters_or_with_sparse_gradient_is_rejected(
    params, updates, error, words
):
    tx = optclip.constrain(optax.identity(), optclip.clip_by_norm(1.0))
    with pytest.raises(error, match=words):
        tx.update(updates, tx.init(TWO), params)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 2e-4)])
def test_initial_norm_does_not_drift(dtype, bound):
    """Also with decay; without the constraint the norm changes by more than 1%."""
    params = jnp.asarray(RNG().normal(size=(64, 32)), dtype)
    inner = optax.adamw(1e-2, weight_decay=0.1)

    def trained(tx):
        def step(carry, i):
            p, state = carry
            grads = jnp.sin(i + jnp.arange(p.size, dtype=p.dtype).reshape(p.shape))
            updates, state = tx.update(grads.astype(p.dtype), state, p)
            return (optax.apply_updates(p, updates), state), None

        start = params, tx.init(params)
        return jax.lax.scan(step, start, jnp.arange(2_000.0))[0][0]

    txs = optclip.constrain(inner, KEEP_NORM), inner
    ends = helpers.quick_jit(lambda: [params, *map(trained, txs)])()
    first, kept, plain = (np.linalg.norm(np.float64(x)) for x in ends)
    assert abs(plain / first - 1) > 1e-2
    assert abs(kept / first - 1) < bound


def test_exchanged_arguments_raise_value_error():
    tx = optclip.constrain(optclip.clip_by_norm(1.0), optax.adam(1e-3))
    with pytest.raises(
        ValueError, match=r"Exchange them: optclip.constrain\(optimizer"
    ):
        tx.init(np.ones(2, np.float32))
    # Updates may be clipped gradients, and `clip` a function without a state.
    optclip.constrain(optclip.clip_by_norm(1.0), optax.identity()).init(np.ones(2))


def test_initial_norm_of_zero_does_not_constrain():
    """A bias, or the second factor of LoRA, is 0 at the first step."""
    tx, state = optclip.constrain(optax.sgd(1.0), KEEP_NORM), None
    new = {"b": np.zeros(2, np.float32), "w": np.float32([3, 4])}
    grads = {"b": np.float32([-1, 2]), "w": np.float32([3, -4])}
    for _ in range(2):
        new, state = stepped(tx, new, grads, state)
    np.testing.assert_array_equal(new["b"], [2, -4])
    np.testing.assert_allclose(np.linalg.norm(new["w"]), 5, rtol=1e-6)


def test_complex_parameters_are_rounded_to_their_dtype():
    tx = optclip.constrain(optax.identity(), optclip.clip_by_norm(1.0))
    with jax.enable_x64(True):
        params = jnp.array([3 + 4j], jnp.complex64)
        updates, _ = tx.update(jnp.array([1j]), tx.init(params), params)
        assert updates.dtype == jnp.complex128
        np.testing.assert_allclose(abs(params + updates), 1, rtol=1e-6)


def test_states_of_constrain_are_found_by_their_parameters():
    tx = optclip.constrain(
        optax.adam(0.1), optclip.clip_by_norm(thresholds.initial_norm())
    )
    state = tx.init({"w": np.ones(2, np.float32)})
    doubled = optax.tree_map_params(tx, lambda x: 2 * x + 1, state)
    np.testing.assert_array_equal(optax.tree.get(doubled, "mu")["w"], [1, 1])
    helpers.assert_identical(doubled.constrain_clip, state.constrain_clip)


# New parameters are rounded once to their dtype, over its whole range.

FORMATS = [*oracles.NARROW, "float32"]
TO_UNIT_NORM = optclip.constrain(
    optax.identity(), optclip.clip_by(1.0, response="normalize")
)


def assert_leads_to(wanted, updates, params):
    """Compare updates with those that lead to the rounded `wanted` parameters."""
    for dtype, p in params.items():
        exact = oracles.rounded(wanted[dtype], dtype) - helpers.as_float64(p)
        exact = oracles.rounded(exact, updates[dtype].dtype)
        np.testing.assert_array_equal(helpers.as_float64(updates[dtype]), exact, dtype)


@pytest.fixture(params=["same", "float32", "float64"])
def dtypes(request):
    """Return the dtype of the updates of the parameters of each dtype."""
    with jax.enable_x64(request.param == "float64"):
        yield {
            x: x if request.param == "same" else request.param
            for x in FORMATS
            if x != "float32" or request.param == "float64"
        }


def test_constrained_parameters_are_rounded_once(dtypes):
    """They start on the other side of zero, and exceed a bound per element."""
    wide = "float64" if "float64" in dtypes.values() else "float32"
    bounds = {x: oracles.between(x, wide) for x in dtypes}
    starts = {x: -oracles.rounded(b, x) for x, b in bounds.items()}
    # Twice a number of at most 1 is exact in all formats.
    starts = {
        x: np.where((abs(p) >= oracles.LEAST) & (abs(p) <= 1), p, 0).astype(x)
        for x, p in starts.items()
    }
    far = {
        x: (np.sign(bounds[x]) * float(jnp.finfo(u).max)).astype(u)
        for x, u in dtypes.items()
    }
    clip = optclip.clip_by_value(
        lower=jax.tree.map(lambda b: np.minimum(b, 0), bounds),
        upper=jax.tree.map(lambda b: np.maximum(b, 0), bounds),
    )
    tx = optclip.constrain(optax.identity(), clip)
    updates, _ = helpers.optimized_jit(tx.update)(far, tx.init(starts), starts)
    assert_leads_to(bounds, updates, starts)


def test_scaled_attention_heads_are_rounded_once(dtypes):
    """Largest logits 16 times the threshold scale queries and keys by a quarter."""
    numbers = {x: oracles.numbers_of(x) for x in dtypes}
    heads = {x: n[None, n >= 4 * oracles.LEAST].astype(x) for x, n in numbers.items()}
    params, names = {"query": heads, "key": heads}, ("query", "key")
    layers = {
        x: optclip.Heads(*(f"{name}/{x}" for name in names), axis=0) for x in dtypes
    }
    tx = optclip.clip_attention_logits(100.0, layers)
    zeros = {x: np.zeros(p.shape, dtypes[x]) for x, p in heads.items()}
    logits = dict.fromkeys(dtypes, np.float32([1600]))
    updates, _ = helpers.optimized_jit(tx.update)(
        dict.fromkeys(names, zeros), tx.init(params), params, logits=logits
    )
    wanted = {x: helpers.as_float64(p) / 4 for x, p in heads.items()}
    for name in names:
        assert_leads_to(wanted, updates[name], heads)


def test_rounding_has_the_derivative_of_unrounded_parameters():
    def updates(u, params):
        return TO_UNIT_NORM.update(u, TO_UNIT_NORM.init(params), params)[0]

    params = np.array([3e-5, 2, -3], np.float16)
    exact = params.astype(np.float32)
    jacobians = [
        helpers.quick_jit(jax.jacobian(updates))(np.float32([1e-5, 1, 1]), p)
        for p in (params, exact)
    ]
    np.testing.assert_array_equal(*jacobians)
    assert np.all(np.diagonal(jacobians[0]) != 0)
