"""Test what every recipe has in common, and the options of each by hand."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes, thresholds
from tests.support import covering, helpers, steps
from tests.support.steps import history

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
        tree = {"w": w, "m": helpers.as_bcoo(w), "out": w}
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
        ("zclip spam spectra stable_adamw", "strickt", r"\) has no.* mean strict=\?$"),
        ("zclip spectra", "norm_mask", "has no argument 'norm_mask'. Did you mean"),
        ("zclip adagc megatron_skip", "threshold", "Use max_norm= instead"),
        # Names in the papers' code and in optax.
        ("adagc", "lambda_rel", "Use ratio="),
        ("agc", "clipping", "Use ratio="),
        ("autoclip", "percentile", "Use q="),
        ("olmo_skip", "sigma_factor", "Use sigma="),
        ("zclip", "z_thresh", r"^zclip\(\) has no argument 'z_thresh'. Use z= instead"),
    ],
)  # fmt: skip
def test_recipe_option_set_by_method_or_unknown_is_rejected(names, option, words):
    for name in names.split():
        with pytest.raises(TypeError, match=words):
            getattr(recipes, name)(**{option: 1})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "uclip"])
def test_unknown_argument_of_recipe_lists_its_own(name):
    with pytest.raises(TypeError) as error:
        getattr(recipes, name)(**{"wxyz": 1, "vwxy": 1})
    assert "'wxyz'" in str(error.value)
    own = inspect.signature(getattr(recipes, name)).parameters.keys() - {"options"}
    assert own | {"mask"} <= {*str(error.value).translate({44: 32, 46: 32}).split()}


# By hand: options and defaults of each recipe, and leaves that it excludes.

INF = float("inf")


def once(tx, updates, params=None):
    """Return the first updates and the metrics after them, of one program."""

    def run(updates, params):
        given = updates if params is None else params
        out, state = tx.update(updates, tx.init(given), params)
        return out, optclip.metrics(state)

    return jax.device_get(helpers.quick_jit(run)(updates, params))


def over_norms(tx, norms):
    """Return the updates and metrics of each step, the gradient one number."""
    return history(tx, np.float32(norms), value=np.ones(len(norms), np.float32))[:2]


# Around no optimizer, a recipe uses Adam.
AROUND_NOTHING = [
    recipes.olmo_skip(), recipes.axlearn_skip(), recipes.megatron_skip(max_norm=4.0),
    recipes.spam(b2=0.5), recipes.stable_spam(), recipes.spectra(max_value=INF),
]  # fmt: skip
quick_spam = functools.partial(recipes.spam, optax.identity(), theta=4.0, b2=0.0)


@pytest.mark.parametrize(
    ("tx", "norms", "expected", "rtol"),
    [
        *((tx, [3.0], [1.0], 1e-4) for tx in AROUND_NOTHING),
        # By default, elements are clipped to 1.
        (recipes.uclip(), [2.5, 0.0, 0.0], [1.0, 1.0, 0.5], 0),
        (recipes.megatron_skip(optax.identity(), 8.0), [8.0, 8.1], [8.0, 0.0], 0),
        # The least window warms up for two norms, which have a deviation.
        (recipes.olmo_skip(optax.identity(), 2.0, 2), [1, 3, 9, 3], [1, 3, 0, 3], 0),
        (quick_spam(grace=0), [1.0, 100.0], [1.0, 2.0], 1e-6),
        (quick_spam(grace=2), [1.0, 100.0], [1.0, 100.0], 1e-6),
        # An eps is added to the norm: 1e-6, or as told.
        (recipes.olmo_ratio(2.0, 0.5), [1e-5, 8e-5], [1e-5, 8e-5 * 2 / 8.1], 1e-5),
        (recipes.olmo_ratio(2.0, 0.5, eps=0.0), [1e-5, 8e-5], [1e-5, 2e-5], 1e-5),
        # Without a ceiling, the warm-up clips nothing.
        (recipes.adagc(1.5, warmup=1, max_norm=None), [8, 80], [8, 12], 1e-6),
        (recipes.zclip(max_norm=None), [8, 80], [8, 80], 0),
        (optclip.clip_by_norm(thresholds.ema(max_norm=None)), [8, 80], [8, 80], 0),
        (optclip.clip_by_norm(thresholds.zscore(max_norm=None)), [8], [8], 0),
    ],
)
def test_recipe_matches_hand_computed_values(tx, norms, expected, rtol):
    updates, _ = over_norms(tx, norms)
    np.testing.assert_allclose(updates, expected, rtol=rtol)


def test_stable_spam_resets_adam_and_its_counts():
    *_, state = history(recipes.stable_spam(every=2), np.ones((2, 1), np.float32))
    assert optax.tree.get(state, "count") == 1


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (recipes.stable_spam, {"x_max", "x_norm"}),
        (functools.partial(recipes.spectra, max_gradient=1.0), {"x", "x_gradient"}),
    ],
)
def test_recipe_with_two_records_gives_each_a_name(make, names):
    metrics = optclip.metrics(make(name="x").init(np.ones((2, 2), np.float32)))
    assert {key.partition("/")[0] for key in metrics} == names


def test_clippy_divides_leaf_by_largest_excess():
    """Steps of 0.6, 1.1 and 0.1 are allowed: half of |w| plus 0.1."""
    tx = recipes.clippy(0.5, 0.1)
    params = {"w": np.float32([1.0, -2.0, 0.0]), "n": np.arange(2)}
    updates = {"w": np.float32([1.2, 1.1, 0.3]), "n": np.arange(2)}
    clipped, metrics = once(tx, updates, params)
    np.testing.assert_allclose(clipped["w"], updates["w"] / 3, rtol=1e-6)
    np.testing.assert_array_equal(clipped["n"], updates["n"])
    # The largest step, and the one that is allowed.
    np.testing.assert_allclose(metrics["clip/norm"], 1.2, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip/threshold"], 0.4, rtol=1e-6)


def test_clippy_without_absolute_part_stops_leaf_at_zero_parameter():
    """An update of 0 there is no step too far. A leaf without an update is unclipped."""
    w = np.float32([0.0, 1.0])
    updates = {"kept": np.float32([0.0, 0.5]), "stopped": w + 1, "frozen": None}
    clipped, _ = once(recipes.clippy(1.0, 0.0), updates, dict.fromkeys(updates, w))
    np.testing.assert_allclose(clipped["kept"], [0.0, 0.5], atol=1e-30)
    np.testing.assert_allclose(clipped["stopped"], [0.0, 0.0], atol=1e-30)
    assert clipped["frozen"] is None


def test_acclip_derivative_is_of_its_formula():
    """The threshold is half of the gradient, plus the memory."""
    tx = recipes.acclip(b1=0.0, b2=0.5)
    _, state = tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))
    second = jax.grad(lambda gradient: tx.update(gradient[None], state)[0][0])
    np.testing.assert_allclose(second(jnp.float32(2.0)), 0.5, rtol=1e-5)


def test_sclip_derivative_at_zero_is_slope_of_curve():
    tx = recipes.sclip(np.float64(2.0), 16.0)
    with jax.numpy_dtype_promotion("strict"):
        assert jax.grad(lambda x: tx.update(x, tx.init(x))[0])(jnp.float32(0.0)) == 0.5


def test_acclip_without_eps_shows_infinite_moment():
    rows = np.float32([[1.0, 1.0], [np.inf, 1.0], [1.0, 1.0]])
    out, *_ = history(recipes.acclip(eps=0.0), rows)
    np.testing.assert_array_equal(np.isnan(out[-1]), [True, False])


def test_clippy_missing_parameter_is_named():
    tx, updates = recipes.clippy(), {"w": np.ones(2), "b": np.ones(2)}
    with pytest.raises(ValueError, match="`params` must be a tree with the leaf 'b'"):
        tx.update(updates, tx.init(updates), {"w": np.ones(2)})


def test_recipe_of_dense_leaves_rejects_sparse_leaf():
    dense, tx = {"w": np.ones((2, 2), np.float32)}, recipes.clippy()
    matrix = {"w": helpers.as_bcoo(dense["w"])}
    for updates, params in ((matrix, dense), (dense, matrix)):
        with pytest.raises(TypeError, match="'w' must be dense, got a BCOO.*clippy"):
            tx.update(updates, tx.init(dense), params)
    with pytest.raises(TypeError, match="'w' must be dense, got a BCOO.*todense"):
        recipes.uclip().init(matrix)


@pytest.mark.parametrize("make", [recipes.acclip, recipes.stable_adamw])
def test_optimizer_recipe_leaves_whole_numbers_unchanged(make):
    """In the state too, where optax would make floats of them."""
    tree = {"w": np.float32([3.0, 4.0]), "n": np.arange(3)}
    tx, state = make(), make().init(tree)
    out, after = helpers.quick_jit(tx.update)(tree, state, tree)
    np.testing.assert_array_equal(out["n"], tree["n"])
    helpers.assert_same_types(after, state)
    assert helpers.differs(out["w"], tree["w"])


@pytest.mark.parametrize(
    "tx", [recipes.stable_adamw(), recipes.sclip(jnp.float32(2.0), jnp.float32(4.0))]
)
def test_recipe_without_parameters_keeps_dtype(tx):
    """Also if arrays of another dtype are given for numbers."""
    shape = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    out, _ = jax.eval_shape(lambda x: tx.update(x, tx.init(x)), shape)
    assert out == shape


def test_stable_adamw_of_float64_is_accurate_in_float64():
    """The first step has an RMS of 1, so the update is Adam's."""
    with jax.enable_x64(True):
        tx, grads = recipes.stable_adamw(b2=0.95, eps=0.0), np.float64([1.0, -2.0, 0.3])
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(updates, np.sign(grads), rtol=1e-14)


def test_aggc_groups_by_module_without_its_number():
    tree = {
        "blocks": [{"attn": {"kernel": 1.0}}],
        "blocks_12": {"mlp_1": {"bias": 2.0}},
        "layers": [{"kernel": 4.0}],
        "dense3": {"kernel": 8.0},
        "12x": {"kernel": 16.0},
        "embedding": 3.0,
        "0": [{"kernel": 4.0}],
        "_1": {"kernel": 12.0},
    }
    _, metrics = once(recipes.aggc(), tree)
    norms = {
        "attn": 1.0, "mlp": 2.0, "layers": 4.0, "dense": 8.0, "12x": 16.0, "all": 13.0,
    }  # fmt: skip
    assert {k: metrics[f"clip/norm/{k}"] for k in norms} == pytest.approx(norms)


# The docstring of agc has these for attention kernels, and for embeddings.
OUTPUTS = lambda path, shape: 0 if len(shape) == 3 else None  # noqa: E731
WORDS = lambda path, shape: -1 if "embed" in path else None  # noqa: E731


@pytest.mark.parametrize(
    ("axis", "over"),
    [
        (None, {"attention": (0, 1), "embed": 0, "row": 0}),
        (OUTPUTS, {"attention": 0}),
        (WORDS, {"embed": -1, "row": 0, "attention": (0, 1)}),
    ],
)
def test_agc_axis_option_sets_axes_of_norms(axis, over):
    rng = np.random.default_rng(0)
    shapes = {"embed": (6, 4), "attention": (5, 2, 3), "row": (1, 64)}
    params, grads = (
        {key: np.float32(rng.normal(size=shape)) for key, shape in shapes.items()}
        for _ in range(2)
    )
    trees = once(recipes.agc(1e-3, axis=axis), grads, params)[0], params
    for key, axes in over.items():
        norms = [np.sqrt(np.sum(np.float64(x[key]) ** 2, axes)) for x in trees]
        np.testing.assert_allclose(norms[0] / norms[1], 1e-3, rtol=1e-5)


EMBED = {"transposed": lambda path: path == "embed"}
SHAPES = {
    "wide": (2, 8), "tall": (8, 2), "batch": (7, 2, 18), "row": (1, 4), "empty": (0, 5),
    "vector": (3,), "scalar": (), "embed": (8, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        (EMBED, {"wide": 2.0, "batch": 3.0, "row": 2.0, "embed": 2.0}),
        ({"matrix_axes": (0, -1)}, {"wide": 2.0, "batch": (18 / 7) ** 0.5, "row": 2.0}),
        ({"matrix_axes": (1, 0)}, {"tall": 2.0, "batch": (7 / 2) ** 0.5, "embed": 2.0}),
    ],
)
def test_spectra_scales_by_root_of_outputs_over_inputs(options, factors):
    least = 2 if "matrix_axes" in options else 0
    shapes = {key: shape for key, shape in SHAPES.items() if len(shape) >= least}
    tree = {key: np.full(shape, 0.5, np.float32) for key, shape in shapes.items()}
    tree["whole numbers"] = np.arange(16).reshape(2, 8)
    out, _ = once(recipes.spectra(optax.identity(), INF, **options), tree)
    for key, x in tree.items():
        np.testing.assert_allclose(out[key], factors.get(key, 1.0) * x, rtol=1e-6)


def test_spectra_cap_times_learning_rate_is_constant_in_warm_up():
    """With a rate of 0 it is as large as the authors' least rate of 1e-10 makes it."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.5, 4, 10)
    tx = recipes.spectra(optax.identity(), 2.0, learning_rate=rate, warmup=4)
    _, metrics = over_norms(tx, np.ones((8, 1)))
    limits = np.array([0.5e10, 4.0, 2.0, 4 / 3, 1, 1, 1, 1]) * 2.0
    np.testing.assert_allclose(metrics["clip/threshold"], limits, rtol=1e-5)
