"""The arrays and keys of rules' memories do not grow with the number of leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization, traverse_util

import optclip
from optclip import _thresholds, thresholds
from tests.support import helpers
from tests.support.helpers import quick_jit
from tests.support.registry import ENTRIES

NUM_LAYERS = 10
LAYER = {"kernel": jnp.ones((2, 3)), "norm": {"scale": jnp.ones(3)}}
PARAMS = {"embed": jnp.ones((4, 2)), "layers": [LAYER] * NUM_LAYERS}
NUM_LEAVES = 2 * NUM_LAYERS + 1


class Recorded:
    """Read norms by label, as a user's rule."""

    def init(self, norm):
        return norm

    def update(self, seen, memory):
        by_label = {**seen.norm, "embed": jnp.maximum(seen.norm["embed"], 1)}
        return by_label, seen.norm


RULES = {
    "ema": thresholds.ema(),
    "zscore": thresholds.zscore(),
    "quantile": thresholds.quantile(0.5, 8),
    "mean_plus_std": thresholds.mean_plus_std(window=8),
    "mean_over_rms": thresholds.mean_over_rms(),
    "previous_norm": thresholds.previous_norm(),
    "ema_of_max": _thresholds.ema_of_max(),
    "moment": thresholds.moment(),
    "of_gradients": thresholds.of_gradients(thresholds.ema()),
    "user": Recorded(),
}


def keys_of(tree):
    """Return each key on the way to an array."""
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    keys = [getattr(key, "key", None) for path in paths for key in path]
    return {key for key in keys if isinstance(key, str)}


@pytest.mark.parametrize("name", RULES)
def test_state_of_rule_over_leaves_has_one_array_per_quantity(name):
    tx = optclip.clip_by_norm(RULES[name])
    state = jax.eval_shape(tx.init, PARAMS)
    _, after = jax.eval_shape(
        lambda *args: tx.update(*args, gradients=args[0]), PARAMS, state
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    shapes = {x.shape for x in jax.tree.leaves(state.clip_memory)}
    assert shapes <= {(NUM_LEAVES,), (NUM_LEAVES, 8), ()}
    assert len(jax.tree.leaves(state)) <= 20


@pytest.mark.parametrize("over", ["leaf", optclip.units()], ids=["leaf", "units"])
def test_keys_of_memory_contain_no_parameter_name(over):
    tx = optclip.clip_by(thresholds.quantile(0.5, 8), over=over)
    keys = keys_of(jax.eval_shape(tx.init, PARAMS).clip_memory)
    assert not keys & keys_of(PARAMS)
    assert any(key.startswith(f"{NUM_LEAVES}_") for key in keys)
    positions = {key for key in keys if key.isdigit()}
    assert positions == (set() if over == "leaf" else set(map(str, range(NUM_LEAVES))))


@pytest.mark.parametrize("rule", ["ema", "quantile", "user"])
def test_state_of_renamed_leaf_raises(rule):
    tx = optclip.clip_by_norm(RULES[rule], record=False)
    state = tx.init(PARAMS)
    renamed = {**PARAMS, "embed": PARAMS["layers"], "layers": PARAMS["embed"]}
    with pytest.raises(ValueError, match=f"'{NUM_LEAVES}_.*renamed.*one structure"):
        tx.update(renamed, state)


def test_state_survives_keys_joined_by_slashes():
    """As T5X and Flax's traverse_util save it; "%2F" in a name is kept too."""
    tx = optax.chain(
        optclip.clip_by_global_norm(9.0, record="leaves", name="all/of it"),
        optclip.clip_by_group_norm(2.0, groups=optclip.by_path(str), name="a%2Fb"),
        optclip.clip_by_norm(thresholds.ema(), record="leaves"),
        optclip.skip(optax.sgd(1.0), max_norm=0.5, record="leaves", name="s/k"),
    )
    _, state = quick_jit(tx.update)(PARAMS, tx.init(PARAMS))
    joined = traverse_util.flatten_dict(
        serialization.to_state_dict(state), sep="/", keep_empty_nodes=True
    )
    split = traverse_util.unflatten_dict(joined, sep="/")
    restored = serialization.from_state_dict(tx.init(PARAMS), split)
    helpers.assert_identical(restored, state)
    metrics = optclip.metrics(restored)
    np.testing.assert_allclose(
        metrics["all/of it/leaf_norm/layers/0/kernel"], np.sqrt(6), rtol=1e-6
    )
    assert metrics["a%2Fb/coefficient/layers/9/norm/scale"] == 1
    assert metrics["a%2Fb/clipped/embed"] == metrics["s/k/skipped"] == 1
    with pytest.raises(ValueError, match=r"unknown \['layers/0/kernel'"):
        tx.update({"embed": PARAMS["embed"]}, state)


RULE = thresholds.quantile(0.5, 8)


def test_fixed_threshold_keeps_the_memory_of_a_rule():
    state = optclip.clip_by_norm(RULE).init(PARAMS)
    _, after = optclip.clip_by_norm(1.0).update(PARAMS, state)
    helpers.assert_identical(after.clip_memory, state.clip_memory)


def test_key_of_memory_has_numbers_but_no_address_and_no_path():
    """So that a restore in another process finds the same key."""

    def key(params=PARAMS, **options):
        tx = optclip.clip_by(RULE, **options)
        return list(jax.eval_shape(tx.init, params).clip_memory)

    assert key(norm="rms", over="leaf") == ["Norm 2 0.5 of EachLeaf"]
    cut = optclip.singular_values(method="eigh")
    assert key(over=cut) == ["SingularValueNorms eigh of SingularValues -2 -1"]
    for axes, words in (
        (((0, 1), 2), "0+1 2"),
        ((0, (1, 2)), "0 1+2"),
        ((..., -1), "rest -1"),
    ):
        over = optclip.matrices(axes)
        assert key(jnp.ones((2, 3, 4)), over=over) == [f"Norm 2 0 of Matrices {words}"]
    assert key(over=optclip.axes((0,))) == ["Norm 2 0 of Axes 0"]
    assert key(over=optclip.layers("embed")) == ["Norm 2 0 of Layers 0 0"]
    assert key(over=optclip.units(axis=lambda *_: None)) == ["Norm 2 0 of Units"]
    assert key(over=optclip.groups("all"), norm=3.0) == ["Norm 3 0 of Groups"]


def test_rule_measures_parameters_with_more_leaves_than_updates():
    tx = optclip.clip_by_norm(thresholds.relative_to_params(0.5))
    params = {"a": jnp.ones(4), "frozen": jnp.ones(9), "b": jnp.full(4, 2.0)}
    updates = {"a": jnp.full(4, 3.0), "frozen": None, "b": jnp.full(4, 5.0)}
    clipped, _ = quick_jit(tx.update)(updates, tx.init(updates), params)
    assert clipped["frozen"] is None
    np.testing.assert_allclose(clipped["a"], np.full(4, 0.5), rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], np.full(4, 1.0), rtol=1e-6)


def test_trees_of_rules_over_leaves_learn_as_one_rule():
    """Each rule receives its part of the norms, in its own order."""
    rules = {"embed": thresholds.ema(warmup=0), "layers": thresholds.ema(warmup=0)}
    grads = jax.tree.map(lambda x: jnp.full_like(x, 8), PARAMS)
    clipped = []
    for rule in (rules, thresholds.ema(warmup=0)):
        tx = optclip.clip_by_norm(rule)
        _, state = quick_jit(tx.update)(PARAMS, tx.init(PARAMS))
        clipped.append(quick_jit(tx.update)(grads, state)[0])
    for one, other in zip(*map(jax.tree.leaves, clipped), strict=True):
        assert np.all(one < 8)
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_memory_over_elements_of_numbers_is_like_the_parameters():
    """Each parameter is one number here, as is the norm of a leaf."""
    params = {"scale": jnp.float32(8), "shift": jnp.float32(8)}
    tx = optclip.clip_by_value(thresholds.moment(decay=0.5))
    clipped, state = tx.update(params, tx.init(params))
    ((memory,),) = helpers.memories(state)
    assert jax.tree.structure(memory) == jax.tree.structure(params)
    assert clipped == {"scale": 4, "shift": 4}


# Which parts of a state `optax.tree_map_params` treats like parameters.

TREE = {"kernel": jnp.ones((4, 3)), "bias": [jnp.ones(3)]}


def split(tx, state):
    """Return the shapes of the leaves that are like parameters, and of the others."""
    marked = optax.tree_map_params(
        tx, lambda x: True, state, transform_non_params=lambda x: False
    )
    like, others = [], []
    # A prefix of the state: one mark may stand for a whole memory per norm.
    jax.tree.map(
        lambda is_like, part: (like if is_like else others).extend(
            np.shape(x) for x in jax.tree.leaves(part)
        ),
        marked,
        state,
    )
    return like, others


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_tree_map_params_of_record_marks_only_trees_like_parameters(entry):
    tx = entry.make(record=True)
    like, _ = split(tx, jax.eval_shape(tx.init, TREE))
    assert set(like) <= {(4, 3), (3,)}


OF_NORMS = [thresholds.ema(), thresholds.quantile(0.5, 4), thresholds.zscore()]


OPTIONS = {
    "tree": {"over": "tree"},
    "leaf": {"over": "leaf"},
    "units": {"over": optclip.units()},
    "iteration": {
        "over": optclip.matrices(),
        "norm": optclip.norms.Spectral(method="power_iteration"),
    },
}


@pytest.mark.parametrize("rule", OF_NORMS, ids=["ema", "quantile", "zscore"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tree_map_params_of_rule_over_norms_marks_nothing(rule, name):
    tx = optclip.clip_by(rule, record="leaves", **OPTIONS[name])
    state = jax.eval_shape(tx.init, TREE)
    _, after = jax.eval_shape(tx.update, TREE, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    like, others = split(tx, state)
    assert not like
    assert len(others) > 8


def test_tree_map_params_of_rule_over_elements_marks_its_memory():
    """It is as large as the parameters and must be sharded like them."""
    tx = optclip.clip_by(_thresholds.second_moment(), over="element")
    like, _ = split(tx, jax.eval_shape(tx.init, TREE))
    assert sorted(like) == [(3,), (4, 3)]


class Counted:
    """Remember a tuple, which the parameters may be too."""

    def init(self, norm):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen, memory):
        return seen.norm, (memory[0] + 1, seen.norm)


def test_tree_map_params_of_history_marks_only_state_of_inner():
    tx = optclip.with_history(optax.chain(optclip.clip_by_norm(1.0), optax.adam(0.1)))
    like, others = split(tx, jax.eval_shape(tx.init, TREE))
    assert sorted(like) == 2 * [(3,)] + 2 * [(4, 3)]
    assert (1000, 10) in others


def test_tree_map_params_of_memory_as_long_as_parameters_marks_nothing():
    tx, params = optclip.clip_by_norm(Counted()), (jnp.ones(3), jnp.ones(2))
    _, state = tx.update(params, tx.init(params))
    assert not split(tx, state)[0]
    ((count, norms),) = helpers.memories(state)[0]
    assert count == 1
    (array,) = norms.by_digest.values()
    assert array.shape == (2,)
