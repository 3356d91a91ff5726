"""What `optax.tree_map_params` takes for parameters in a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support.registry import ENTRIES

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": [jnp.ones(3)]}


def of_params(tx):
    """The leaves of a state that are like the parameters, and the others."""
    state = tx.init(PARAMS)
    marked = optax.tree_map_params(
        tx, lambda x: True, state, transform_non_params=lambda x: False
    )
    like, others = [], []
    # A prefix of the state: one mark may stand for all that is kept by path.
    jax.tree.map(
        lambda is_like, part: (like if is_like else others).extend(
            np.shape(x) for x in jax.tree.leaves(part)
        ),
        marked,
        state,
    )
    return like, others


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_no_number_of_a_norm_is_taken_for_a_parameter(entry):
    like, _ = of_params(entry.make(record=True))
    assert set(like) <= {(4, 3), (3,)}


@pytest.mark.parametrize(
    "rule", [thresholds.ema(), thresholds.quantile(0.5, 4), thresholds.zscore()]
)
@pytest.mark.parametrize("over", ["leaf", optclip.units()], ids=["leaf", "units"])
def test_what_a_rule_learns_of_norms_is_like_no_parameter(rule, over):
    like, others = of_params(optclip.clip_by(rule, over=over, record="leaves"))
    assert not like
    assert len(others) > 10


def test_what_a_rule_learns_of_elements_is_like_the_parameters():
    """As large as they are, it is to be sharded as they are."""
    like, _ = of_params(optclip.clip_by(thresholds.second_moment(), over="element"))
    assert sorted(like) == [(3,), (4, 3)]


def test_the_norms_of_leaves_of_a_global_clip_are_like_no_parameter():
    like, others = of_params(optclip.clip_by_global_norm(1.0, record="leaves"))
    assert not like
    assert others == [()] * 8


class Counted:
    """A user's rule whose memory is a tuple, as the parameters may be."""

    def init(self, norm):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, norm)

    def update(self, seen, memory):
        return seen.norm, (memory[0] + 1, seen.norm)


def test_a_memory_is_not_taken_for_norms_where_it_is_as_long():
    tx, params = optclip.clip_by_norm(Counted()), (jnp.ones(3), jnp.ones(2))
    _, state = tx.update(params, tx.init(params))
    specs = optax.tree_map_params(
        tx, lambda x: "like", state, transform_non_params=lambda x: "other"
    )
    assert set(jax.tree.leaves(specs)) == {"other"}
    ((count, norms),) = state.clip_memory[0]
    assert count == 1
    assert sorted(norms.by_path) == ["0", "1"]
