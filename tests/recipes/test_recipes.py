"""Test what every recipe has in common, called with one argument at most."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import recipes
from tests.support import covering, helpers, steps

PARAMS = {
    "dense_0": {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3) + np.float32(0.1),
        "bias": np.ones(3, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    },
    "dense_1": {"kernel": np.full((2, 3), 0.1, np.float32)},
}
GRADIENTS = [
    jax.tree.map(lambda p, i=i: (1 + 0.5 * np.sin(i)) * np.cos(p + 1), PARAMS)
    for i in np.arange(3, dtype=np.float32)
]
NAMES = sorted(recipes.__all__)
# A floating hyperparameter of each, and a value that is not its default.
HYPERPARAMETERS = {
    "acclip": ("b2", 0.9), "adagc": ("max_norm", 2.0), "agc": ("ratio", 0.02),
    "aggc": ("decay", 0.5), "auto_s": ("gamma", 0.5), "autoclip": ("q", 0.25),
    "axlearn_skip": ("ratio", 1.1), "clippy": ("relative", 0.1),
    "mean_std_clip": ("k", 1.0), "megatron_skip": ("max_norm", 2.0),
    "olmo_ratio": ("ratio", 1.01), "olmo_skip": ("sigma", 2.0), "sclip": ("c", 2.0),
    "spam": ("theta", 2.0), "spectra": ("max_value", 0.5),
    "stable_adamw": ("weight_decay", 0.1), "stable_spam": ("b1", 0.5),
    "zclip": ("max_norm", 0.5),
}  # fmt: skip
# `agc` has no sparse form, and `clippy` and `mean_std_clip` change little at first.
BEFORE_OPTIMIZER = [
    "adagc",
    "aggc",
    "auto_s",
    "autoclip",
    "olmo_ratio",
    "sclip",
    "zclip",
]
every = pytest.mark.parametrize("name", NAMES)


def updated(tx, grads, state, params=PARAMS):
    """Update with all that any recipe asks for."""
    return tx.update(grads, state, params, value=jnp.float32(1.0))


def test_recipes_table_names_every_recipe():
    lines = recipes.__doc__.splitlines()
    assert sorted(line.split("`")[1] for line in lines if line[:1] == "`") == NAMES


@functools.cache
def over_steps(name):
    """Return the updates of each step, the last state, and the update, traced once."""
    own = [HYPERPARAMETERS[name]] if name in HYPERPARAMETERS else []
    tx = getattr(recipes, name)(**dict(own))
    chex.clear_trace_counter()

    @functools.partial(helpers.quick_jit, donate_argnums=1)
    @chex.assert_max_traces(n=1)
    def update(grads, state):
        return updated(tx, grads, state)

    state, rows = tx.init(PARAMS), []
    for grads in GRADIENTS:
        old, (out, state) = state, update(grads, state)
        rows.append(out)
    assert any(x.is_deleted() for x in jax.tree.leaves(old))
    return rows, jax.device_get(state), update


@every
def test_recipe_over_steps_donates_state_and_remembers_no_nan(name):
    """Traced once; the state inside an optimizer without `skip` may become NaN."""
    rows, state, update = over_steps(name)
    chex.assert_tree_all_finite(rows)
    assert not any(np.any(np.isnan(x)) for x in jax.tree.leaves(state))
    bad = jax.tree.map(lambda p: np.where(p == np.max(p, initial=0), np.nan, p), PARAMS)
    # A worker may have cleared JAX's caches since, after tests of another module.
    chex.clear_trace_counter()
    _, state = update(bad, state)
    is_clip = lambda s: isinstance(s, optclip.typing.ClipState)  # noqa: E731
    clips = [s for s in jax.tree.leaves(state, is_leaf=is_clip) if is_clip(s)]
    memories = jax.tree.leaves([clip.clip_memory for clip in clips])
    assert not any(np.any(np.isnan(x)) for x in memories)
    if hasattr(state, "skip_inner"):
        chex.assert_tree_all_finite(state.skip_inner)


@every
def test_recipe_in_multi_steps_and_chain_keeps_types(name):
    """Weak types too, which would have a step traced again."""
    half = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), PARAMS)
    multi = optax.MultiSteps(
        optax.chain(getattr(recipes, name)(), optax.scale(-0.1)), 2
    )
    tx = multi.gradient_transformation()
    state = jax.eval_shape(tx.init, half)
    found = jax.eval_shape(functools.partial(updated, tx), half, state, half)
    assert found == (half, state)


@pytest.mark.parametrize("name", BEFORE_OPTIMIZER)
def test_recipe_changes_no_masked_leaf_and_no_whole_number(name):
    def gradients(size):
        w = np.full((2, 2), size, np.float32)
        tree = {"w": w, "m": BCOO.fromdense(w), "out": w}
        return tree | {"n": np.arange(2, dtype=np.int32), "none": None}

    tx = getattr(recipes, name)(mask=optclip.by_path(lambda path: path in ("w", "m")))
    update = helpers.quick_jit(functools.partial(updated, tx))
    state = tx.init(gradients(1.0))
    for size in (9.0, 90.0):
        grads = gradients(size)
        out, state = update(grads, state, gradients(1.0))
    assert helpers.differs(out["w"], grads["w"])
    np.testing.assert_allclose(out["m"].todense(), out["w"], rtol=1e-6)
    for key in ("n", "none", "out"):
        helpers.assert_identical(out[key], grads[key])


def test_recipe_outside_jit_takes_numpy_state():
    """A checkpoint may restore the state as NumPy arrays."""
    _, state, update = over_steps("olmo_skip")
    chex.clear_trace_counter()
    expected, _ = update(GRADIENTS[0], state)
    out, _ = updated(recipes.olmo_skip(sigma=2.0), GRADIENTS[0], state)
    chex.assert_trees_all_close(out, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "uclip"])
def test_injected_hyperparameter_gives_same_updates(name):
    """Each argument that is not an int is a state entry, and traced in a scan."""
    factory = getattr(recipes, name)
    key, value = HYPERPARAMETERS[name]
    parameters = inspect.signature(factory).parameters.values()
    statics = [p.name for p in parameters if isinstance(p.default, int)]
    injected = optax.inject_hyperparams(factory, static_args=statics)(**{key: value})
    assert key in jax.eval_shape(injected.init, PARAMS).hyperparams

    def stack(rows):
        return jax.tree.map(lambda *row: np.stack(row), *rows)

    rows, params, value = stack(GRADIENTS), stack([PARAMS] * 3), np.ones(3, np.float32)
    run = steps.scanned(injected)
    # Tracing finds an argument that must be concrete; a third is compared.
    if not covering.full and NAMES.index(name) % 3:
        jax.eval_shape(run, (rows, params, {"value": value}))
        return
    out, _ = jax.device_get(run((rows, params, {"value": value})))
    chex.assert_trees_all_close(out, stack(over_steps(name)[0]), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("names", "option", "words"),
    [
        ("adagc agc stable_spam", "over", "^`over` must be omitted, since this method"),
        ("auto_s sclip spectra", "response", "^`response` must be omitted, since this"),
        ("clippy", "norm", "^`norm` must be omitted, since this method sets it"),
        ("spectra", "eps", "^`eps` must be omitted, since this method sets it"),
        ("olmo_skip", "max_loss", "^`max_loss` must be omitted, since this method"),
        ("zclip spam olmo_skip stable_adamw", "strickt", "Unknown option strickt=1. "),
        ("zclip spectra", "norm_mask", "Unknown option norm_mask=1. .*'mask'"),
        ("zclip spam olmo_skip stable_adamw", "threshold", "Unknown option threshold=1. "),
    ],
)  # fmt: skip
def test_recipe_option_set_by_method_or_unknown_is_rejected(names, option, words):
    for name in names.split():
        with pytest.raises(TypeError, match=words):
            getattr(recipes, name)(**{option: 1})
