"""Every recipe, called without arguments, in every place people put a transformation."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optclip
from optclip import recipes
from optclip.recipes import _by_part
from tests import helpers

PARAMS = {
    "dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3) - 2.5, "bias": jnp.ones(3)},
    "dense_1": {"kernel": 0.1 * jnp.ones((3, 2)), "bias": jnp.zeros(2)},
}
NAMES = sorted(recipes.__all__)


def gradients(step):
    scale = 1.0 + 0.5 * jnp.sin(jnp.asarray(step, jnp.float32))
    return jax.tree.map(lambda p: scale * jnp.cos(p + 1.0), PARAMS)


def updated(tx, grads, state, params=PARAMS):
    """With all that any recipe asks for."""
    return tx.update(grads, state, params, value=jnp.float32(1.0))


@pytest.fixture(params=NAMES)
def tx(request):
    return getattr(recipes, request.param)()


def assert_close(a, b, rtol=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b
    )


def assert_same_types(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_the_table_names_them_all():
    rows = [line.split("`")[1] for line in recipes.__doc__.splitlines() if line[:1] == "`"]  # fmt: skip
    assert sorted(rows) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_and_whence(name):
    doc = inspect.getdoc(getattr(recipes, name))
    assert doc.count("Source: ") == 1
    assert "Example:" in doc
    assert "Returns:" in doc


def test_eager_and_jit_and_scan_agree(tx):
    step = helpers.strict(tx) if tx.init(PARAMS) == () else tx
    state = scanned = compiled = tx.init(PARAMS)
    update = jax.jit(lambda g, s: updated(step, g, s))
    rows = []
    for i in range(3):
        out, state = updated(step, gradients(i), state)
        same, compiled = update(gradients(i), compiled)
        assert_close(out, same)
        rows.append(out)

    def body(state, i):
        out, state = updated(tx, gradients(i), state)
        return state, out

    final, found = jax.lax.scan(body, scanned, jnp.arange(3))
    assert_same_types(final, tx.init(PARAMS))
    assert_close(found, jax.tree.map(lambda *r: jnp.stack(r), *rows))


def test_one_trace_in_a_hundred_steps(tx):
    traces = []

    @jax.jit
    def update(grads, state):
        traces.append(0)
        return updated(tx, grads, state)

    state = tx.init(PARAMS)
    grads = gradients(0)
    for _ in range(100):
        _, state = update(grads, state)
    assert len(traces) == 1
    assert not any(np.any(np.isnan(x)) for x in jax.tree.leaves(state))


def test_dtypes_and_structure(tx):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    state = tx.init(half)
    out, new = updated(tx, half, state, half)
    assert_same_types(out, half)
    assert_same_types(new, state)


def test_a_nan_never_stays(tx):
    """In none of a clip's memories; what is inside of a skip is not reached."""
    bad = jax.tree.map(lambda p: p.at[0].set(jnp.nan), PARAMS)
    state = tx.init(PARAMS)
    _, state = updated(tx, gradients(0), state)
    _, state = updated(tx, bad, state)
    is_clip = lambda s: isinstance(s, optclip.ClipState)  # noqa: E731
    for clip in jax.tree.leaves(state, is_leaf=is_clip):
        if is_clip(clip):
            memory = jax.tree.leaves(clip.clip_memory)
            assert not any(np.any(np.isnan(x)) for x in memory)
    if hasattr(state, "skip_inner"):
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.skip_inner))


def test_donation_and_orbax(tx, tmp_path):
    _, state = updated(tx, gradients(0), tx.init(PARAMS))
    path = tmp_path / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, jax.tree.map(jnp.zeros_like, state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    expected, _ = updated(tx, gradients(1), state)
    found, _ = updated(tx, gradients(1), jax.device_get(state))
    assert_close(found, expected)
    donate = jax.jit(lambda g, s: updated(tx, g, s), donate_argnums=1)
    found, _ = donate(gradients(1), restored)
    assert_close(found, expected)


def test_multi_steps_and_chain(tx):
    whole = optax.MultiSteps(optax.chain(tx, optax.scale(-0.1)), 2)
    state = whole.init(PARAMS)
    for i in range(2):
        out, state = whole.update(gradients(i), state, PARAMS, value=jnp.float32(1.0))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, gradients(0), gradients(1))
    expected, _ = updated(tx, mean, tx.init(PARAMS))
    assert_close(out, jax.tree.map(lambda u: -0.1 * u, expected), rtol=1e-4)


# A floating hyperparameter of each, and a value that is not its default.
HYPERPARAMETERS = {
    "acclip": ("b2", 0.9), "adagc": ("max_norm", 2.0), "agc": ("ratio", 0.02),
    "aggc": ("decay", 0.5), "auto_s": ("gamma", 0.5), "autoclip": ("q", 0.25),
    "axlearn_skip": ("ratio", 1.1), "clippy": ("relative", 0.1),
    "mean_std_clip": ("k", 1.0), "megatron_skip": ("when", 2.0),
    "olmo_ratio": ("ratio", 1.01), "olmo_skip": ("sigma", 2.0), "sclip": ("c", 2.0),
    "spam": ("theta", 2.0), "stable_adamw": ("weight_decay", 0.1),
    "stable_spam": ("b1", 0.5), "zclip": ("max_norm", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HYPERPARAMETERS))
def test_under_inject_hyperparams(name):
    """The floating hyperparameter is a state entry, the result the same."""
    factory = getattr(recipes, name)
    key, value = HYPERPARAMETERS[name]
    tree = jax.tree.map(lambda p: jnp.abs(p) + 0.1, PARAMS)

    def make(x):
        return factory(**{key: x})

    injected = optax.inject_hyperparams(make)(x=value)
    plain = make(value)
    state, expected_state = injected.init(tree), plain.init(tree)
    assert state.hyperparams == {"x": pytest.approx(value)}
    for i in range(3):
        out, state = updated(injected, gradients(i), state, tree)
        expected, expected_state = updated(plain, gradients(i), expected_state, tree)
        assert_close(out, expected, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(HYPERPARAMETERS))
def test_inject_hyperparams_of_the_recipe_itself(name):
    factory = getattr(recipes, name)
    key, value = HYPERPARAMETERS[name]
    parameters = inspect.signature(factory).parameters.values()
    statics = [p.name for p in parameters if isinstance(p.default, int)]
    tx = optax.inject_hyperparams(factory, static_args=statics)(**{key: value})
    state = tx.init(PARAMS)
    assert state.hyperparams[key] == pytest.approx(value)
    out, _ = updated(tx, gradients(0), state)
    expected, _ = updated(
        factory(**{key: value}), gradients(0), tx.init(PARAMS).inner_state
    )
    assert_close(out, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["acclip", "stable_adamw"])
@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_no_policy_hides_moments_that_are_nan(name, policy):
    with pytest.raises(
        ValueError, match=rf"nonfinite='{policy}' is not for {name}.*skip"
    ):
        getattr(recipes, name)(nonfinite=policy)


def test_no_decay_needs_no_parameters():
    tx = recipes.stable_adamw()
    out, _ = tx.update(PARAMS, tx.init(PARAMS))
    assert_same_types(out, PARAMS)


def test_an_array_for_a_number_keeps_the_dtype():
    tx = recipes.sclip(jnp.float32(2.0), jnp.float32(4.0))
    updates = jnp.ones(2, jnp.bfloat16)
    assert tx.update(updates, tx.init(updates))[0].dtype == jnp.bfloat16


def test_all_but_the_one_without_a_number_are_injected():
    assert set(NAMES) - set(HYPERPARAMETERS) == {"uclip"}


def test_small_states():
    """Rules of norms: what they remember does not grow with the parameters."""
    large = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    for name in ("autoclip", "zclip", "adagc", "aggc", "mean_std_clip", "olmo_ratio"):
        state = jax.eval_shape(getattr(recipes, name)().init, large)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert size < 64_000, name


def test_whole_numbers_pass_clippy():
    tx = recipes.clippy()
    tree = {"w": jnp.ones(2), "n": jnp.arange(3)}
    out, _ = tx.update(tree, tx.init(tree), tree)
    np.testing.assert_array_equal(out["n"], tree["n"])
    np.testing.assert_allclose(out["w"], 0.51, rtol=1e-6)


FIXED = [
    ("adagc", "over", optclip.TREE), ("agc", "over", optclip.TREE),
    ("auto_s", "response", "hard"), ("sclip", "response", "hard"),
    ("clippy", "norm", optclip.norms.L2), ("stable_spam", "over", optclip.LEAF),
    ("olmo_skip", "value_when", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "value"), FIXED)
def test_what_defines_a_method_is_fixed(name, option, value):
    with pytest.raises(TypeError, match=f"^{option}=.* not accepted: this method is"):
        getattr(recipes, name)(**{option: value})


@pytest.mark.parametrize("name", ["zclip", "spam", "olmo_skip", "stable_adamw"])
def test_options_that_are_none(name):
    for option in ("strickt", "threshold"):
        with pytest.raises(TypeError, match=f"^{option}=1 is not known. Give some of"):
            getattr(recipes, name)(**{option: 1})


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("params/blocks/0/attn/kernel", "attn"),
        ("params/blocks_12/mlp_1/bias", "mlp"),
        ("layers/3/kernel", "layers"),
        ("dense3/kernel", "dense"),
        ("embedding", "all"),
        ("0/1/kernel", "all"),
        ("12x/kernel", "12x"),
        ("_1/kernel", "all"),
    ],
)
def test_modules_of_aggc_have_no_numbers(path, module):
    assert _by_part._module(path) == module
