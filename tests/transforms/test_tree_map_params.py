"""Which parts of a state `optax.tree_map_params` treats like parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import _thresholds, thresholds
from tests.support import helpers
from tests.support.registry import ENTRIES

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": [jnp.ones(3)]}


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
    like, _ = split(tx, jax.eval_shape(tx.init, PARAMS))
    assert set(like) <= {(4, 3), (3,)}


RULES = [thresholds.ema(), thresholds.quantile(0.5, 4), thresholds.zscore()]


OPTIONS = {
    "tree": {"over": "tree"},
    "leaf": {"over": "leaf"},
    "units": {"over": optclip.units()},
    "iteration": {
        "over": optclip.matrices(),
        "norm": optclip.norms.Spectral(method="power_iteration"),
    },
}


@pytest.mark.parametrize("rule", RULES, ids=["ema", "quantile", "zscore"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tree_map_params_of_rule_over_norms_marks_nothing(rule, name):
    tx = optclip.clip_by(rule, record="leaves", **OPTIONS[name])
    state = jax.eval_shape(tx.init, PARAMS)
    _, after = jax.eval_shape(tx.update, PARAMS, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    like, others = split(tx, state)
    assert not like
    assert len(others) > 8


def test_tree_map_params_of_rule_over_elements_marks_its_memory():
    """It is as large as the parameters and must be sharded like them."""
    tx = optclip.clip_by(_thresholds.second_moment(), over="element")
    like, _ = split(tx, jax.eval_shape(tx.init, PARAMS))
    assert sorted(like) == [(3,), (4, 3)]


class Counted:
    """Remember a tuple, which the parameters may be too."""

    def init(self, norm):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen, memory):
        return seen.norm, (memory[0] + 1, seen.norm)


def test_tree_map_params_of_history_marks_only_state_of_inner():
    tx = optclip.with_history(optax.chain(optclip.clip_by_norm(1.0), optax.adam(0.1)))
    like, others = split(tx, jax.eval_shape(tx.init, PARAMS))
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
