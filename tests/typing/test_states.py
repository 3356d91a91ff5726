"""States and records outlive a move of the file that they are written in."""

import pickle

import jax.numpy as jnp
import pytest

import optclip

PUBLIC = {name: getattr(optclip.typing, name) for name in optclip.typing.__all__}
STATES = {name: found for name, found in PUBLIC.items() if hasattr(found, "_fields")}


def test_all_states_are_looked_at():
    assert STATES.keys() > {name for name in PUBLIC if name.endswith("State")}


@pytest.mark.parametrize("name", STATES)
def test_a_pickle_names_no_private_module(name):
    state = STATES[name](*(jnp.ones(()) for _ in STATES[name]._fields))
    kept = pickle.dumps(state)
    assert b"optclip.typing" in kept
    assert b"optclip.typing._" not in kept
    assert pickle.loads(kept) == state
