"""Every recipe, called without arguments, in every place people put a transformation."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optclip
from optclip import recipes
from optclip.recipes import _by_part
from tests.support import covering, helpers

PARAMS = {
    "dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3) - 2.5, "bias": jnp.ones(3)},
    "dense_1": {"kernel": 0.1 * jnp.ones((2, 3))},
}
NAMES = sorted(recipes.__all__)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe as it is without arguments; of what kind, if not one clip by a rule."""

    id: str
    kind: str = "rule"

    @property
    def traits(self):
        return (self.kind,)

    def make(self, **arguments):
        return getattr(recipes, self.id)(**arguments)


KINDS = {
    "auto_s": "plain", "sclip": "plain", "uclip": "carry", "clippy": "of steps",
    "acclip": "behind moments", "stable_adamw": "behind moments",
    "spam": "optimizer", "stable_spam": "optimizer", "spectra": "optimizer",
    "olmo_skip": "skip", "axlearn_skip": "skip", "megatron_skip": "skip",
    "agc": "of parameters", "adagc": "of leaves", "olmo_ratio": "of leaves",
    "aggc": "of leaves",
}  # fmt: skip
RECIPES = [Recipe(name, KINDS.get(name, "rule")) for name in NAMES]
# What a recipe that is one expression of the same parts has nothing to add to.
ONE_OF_EACH = RECIPES if covering.full else list({r.kind: r for r in RECIPES}.values())


def gradients(step):
    scale = 1.0 + 0.5 * jnp.sin(jnp.asarray(step, jnp.float32))
    return jax.tree.map(lambda p: scale * jnp.cos(p + 1.0), PARAMS)


GRADIENTS = [gradients(step) for step in range(3)]


def updated(tx, grads, state, params=PARAMS):
    """With all that any recipe asks for."""
    return tx.update(grads, state, params, value=jnp.float32(1.0))


@functools.cache
def compiled(recipe):
    """The transformation, and its update, compiled once for all tests."""
    tx = recipe.make()
    return tx, helpers.quick_jit(functools.partial(updated, tx))


def steps_of(recipe):
    """The updates of three steps, and the state after them."""
    tx, update = compiled(recipe)
    state, found = tx.init(PARAMS), []
    for grads in GRADIENTS:
        out, state = update(grads, state)
        found.append(out)
    return found, state


def assert_close(found, expected, rtol=1e-5):
    chex.assert_trees_all_close(found, expected, rtol=rtol, atol=1e-7)


of_each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
of_each_kind = pytest.mark.parametrize(
    "recipe", ONE_OF_EACH, ids=lambda recipe: recipe.id
)


def test_the_table_names_them_all():
    rows = [line.split("`")[1] for line in recipes.__doc__.splitlines() if line[:1] == "`"]  # fmt: skip
    assert sorted(rows) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_and_whence(name):
    doc = inspect.getdoc(getattr(recipes, name))
    assert doc.count("Source: ") == 1
    assert "Example:" in doc
    assert "Returns:" in doc


def eagerly(tx):
    step = helpers.strict(tx) if tx.init(PARAMS) == () else tx
    state, found = tx.init(PARAMS), []
    for grads in GRADIENTS:
        # As a checkpoint gives it, a state is NumPy arrays.
        out, state = updated(step, grads, jax.device_get(state))
        found.append(out)
    return found


def in_a_scan(tx):
    def step(state, grads):
        out, state = updated(tx, grads, state)
        return state, out

    rows = jax.tree.map(lambda *row: jnp.stack(row), *GRADIENTS)
    scan = helpers.quick_jit(lambda rows: jax.lax.scan(step, tx.init(PARAMS), rows)[1])
    found = scan(rows)
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(3)]


@pytest.mark.covering(recipe=RECIPES, how=[in_a_scan, eagerly])
def test_as_step_by_step(recipe, how):
    expected, _ = steps_of(recipe)
    assert_close(how(recipe.make()), expected)


@of_each
def test_one_trace_in_a_hundred_steps(recipe):
    """With a state that is donated."""
    chex.clear_trace_counter()
    tx = recipe.make()

    @functools.partial(helpers.quick_jit, donate_argnums=1)
    @chex.assert_max_traces(n=1)
    def step(grads, state):
        return updated(tx, grads, state)

    state = tx.init(PARAMS)
    for _ in range(100):
        old, (out, state) = state, step(GRADIENTS[0], state)
        assert any(x.is_deleted() for x in jax.tree.leaves(old))
    chex.assert_tree_all_finite(out)
    assert not any(jnp.any(jnp.isnan(x)) for x in jax.tree.leaves(state))


@of_each
def test_dtypes_and_structure_are_those_given(recipe):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = recipe.make()
    state = jax.eval_shape(tx.init, half)
    out, new = jax.eval_shape(functools.partial(updated, tx), half, state, half)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, half)
    # Weak types too, which would have a step traced anew.
    assert new == state


@of_each
def test_a_nan_never_stays(recipe):
    """In none of a clip's memories; what is inside of a skip is not reached."""
    bad = jax.tree.map(lambda p: p.at[0].set(jnp.nan), PARAMS)
    tx, update = compiled(recipe)
    _, state = update(GRADIENTS[0], tx.init(PARAMS))
    _, state = update(bad, state)
    is_clip = lambda s: isinstance(s, optclip.typing.ClipState)  # noqa: E731
    for clip in jax.tree.leaves(state, is_leaf=is_clip):
        if is_clip(clip):
            memory = jax.tree.leaves(clip.clip_memory)
            assert not any(jnp.any(jnp.isnan(x)) for x in memory)
    if hasattr(state, "skip_inner"):
        chex.assert_tree_all_finite(state.skip_inner)


def test_states_come_back_from_orbax(tmp_path):
    states = {recipe.id: steps_of(recipe)[1] for recipe in RECIPES}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", states)
    blank = jax.tree.map(jnp.zeros_like, states)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "states", blank)
    chex.assert_trees_all_equal_structs(restored, states)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, states)
    chex.assert_trees_all_equal(restored, states)


@of_each_kind
def test_multi_steps_and_chain(recipe):
    """The second of two steps has the update of their mean; the first has none."""
    tx, update = compiled(recipe)
    whole = optax.MultiSteps(optax.chain(tx, optax.scale(-0.1)), 2)
    step = helpers.quick_jit(functools.partial(updated, whole))
    none, state = step(GRADIENTS[0], whole.init(PARAMS))
    found, _ = step(GRADIENTS[1], state)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *GRADIENTS[:2])
    expected, _ = update(mean, tx.init(PARAMS))
    chex.assert_trees_all_equal(none, jax.tree.map(jnp.zeros_like, PARAMS))
    assert_close(found, jax.tree.map(lambda u: -0.1 * u, expected), rtol=1e-4)


# A floating hyperparameter of each, and a value that is not its default.
HYPERPARAMETERS = {
    "acclip": ("b2", 0.9), "adagc": ("max_norm", 2.0), "agc": ("ratio", 0.02),
    "aggc": ("decay", 0.5), "auto_s": ("gamma", 0.5), "autoclip": ("q", 0.25),
    "axlearn_skip": ("ratio", 1.1), "clippy": ("relative", 0.1),
    "mean_std_clip": ("k", 1.0), "megatron_skip": ("max_norm", 2.0),
    "olmo_ratio": ("ratio", 1.01), "olmo_skip": ("sigma", 2.0), "sclip": ("c", 2.0),
    "spam": ("theta", 2.0), "spectra": ("max_value", 0.5), "stable_adamw": ("weight_decay", 0.1),
    "stable_spam": ("b1", 0.5), "zclip": ("max_norm", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HYPERPARAMETERS))
def test_every_number_can_be_injected(name):
    """All that is no int is a state entry, and traced; the result is the same."""
    factory = getattr(recipes, name)
    key, value = HYPERPARAMETERS[name]
    parameters = inspect.signature(factory).parameters.values()
    statics = [p.name for p in parameters if isinstance(p.default, int)]
    tx = optax.inject_hyperparams(factory, static_args=statics)(**{key: value})
    plain = factory(**{key: value})
    tree = jax.tree.map(lambda p: jnp.abs(p) + 0.1, PARAMS)
    state = tx.init(tree)
    assert state.hyperparams[key] == pytest.approx(value)

    @helpers.quick_jit
    def steps(both):
        def step(states, grads):
            found, state = updated(tx, grads, states[0], tree)
            expected, plain_state = updated(plain, grads, states[1], tree)
            return (state, plain_state), (found, expected)

        rows = jax.tree.map(lambda *row: jnp.stack(row), *GRADIENTS)
        return jax.lax.scan(step, both, rows)[1]

    found, expected = steps((state, plain.init(tree)))
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["acclip", "spectra", "stable_adamw"])
@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_no_policy_hides_moments_that_are_nan(name, policy):
    with pytest.raises(
        ValueError, match=rf"`nonfinite` must not be '{policy}' for {name}.*skip"
    ):
        getattr(recipes, name)(nonfinite=policy)


def test_no_decay_needs_no_parameters():
    tx = recipes.stable_adamw()
    out, _ = jax.eval_shape(tx.update, PARAMS, tx.init(PARAMS))
    chex.assert_trees_all_equal_shapes_and_dtypes(out, PARAMS)


def test_an_array_for_a_number_keeps_the_dtype():
    tx = recipes.sclip(jnp.float32(2.0), jnp.float32(4.0))
    updates = jnp.ones(2, jnp.bfloat16)
    out, _ = jax.eval_shape(tx.update, updates, tx.init(updates))
    assert out.dtype == jnp.bfloat16


def test_all_but_the_one_without_a_number_are_injected():
    assert set(NAMES) - set(HYPERPARAMETERS) == {"uclip"}


def test_rules_of_norms_have_small_states():
    """Rules of norms: what they remember does not grow with the parameters."""
    large = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    for name in ("autoclip", "zclip", "adagc", "aggc", "mean_std_clip", "olmo_ratio"):
        state = jax.eval_shape(getattr(recipes, name)().init, large)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert size < 64_000, name


def test_whole_numbers_pass_clippy():
    tx = recipes.clippy()
    tree = {"w": jnp.ones(2), "n": jnp.arange(3)}
    out, _ = helpers.quick_jit(tx.update)(tree, tx.init(tree), tree)
    chex.assert_trees_all_close(out, {"w": jnp.full(2, 0.51), "n": tree["n"]})


def test_a_python_number_is_a_leaf_of_clippy():
    tx = recipes.clippy()
    out, _ = tx.update({"w": -3.0}, tx.init({"w": 4.0}), {"w": 4.0})
    np.testing.assert_allclose(out["w"], -2.01, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["acclip", "stable_adamw"])
def test_whole_numbers_pass_optimizers(recipe):
    """As they are, and in the state too: optax would make floats of them."""
    tx = vars(recipes)[recipe]()
    tree = {"w": jnp.array([3.0, 4.0]), "n": jnp.arange(3)}
    state = tx.init(tree)
    out, after = helpers.quick_jit(tx.update)(tree, state, tree)
    chex.assert_trees_all_equal(out["n"], tree["n"])
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert helpers.differs(out["w"], tree["w"])


FIXED = [
    ("adagc", "over", "tree"), ("agc", "over", "tree"),
    ("auto_s", "response", "hard"), ("sclip", "response", "hard"),
    ("clippy", "norm", "l2"), ("stable_spam", "over", "leaf"),
    ("spectra", "response", "hard"), ("spectra", "eps", 1e-6),
    ("olmo_skip", "max_value", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "value"), FIXED)
def test_what_defines_a_method_is_fixed(name, option, value):
    with pytest.raises(
        TypeError, match=f"^`{option}` must be left out, since this method is"
    ):
        getattr(recipes, name)(**{option: value})


@pytest.mark.parametrize("name", ["zclip", "spam", "olmo_skip", "stable_adamw"])
def test_options_that_are_none(name):
    for option in ("strickt", "threshold"):
        with pytest.raises(TypeError, match=f"options must be some of .*{option}=1"):
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
