"""States and records stay readable after their file has moved."""

import pickle

import numpy as np
import pytest

import optclip

PUBLIC = {name: getattr(optclip.typing, name) for name in optclip.typing.__all__}
STATES = {name: x for name, x in PUBLIC.items() if hasattr(x, "_fields")}


def test_states_are_named_tuples():
    assert STATES.keys() > {name for name in PUBLIC if name.endswith("State")}


@pytest.mark.parametrize("name", STATES)
def test_state_pickle_names_no_private_module(name):
    state = STATES[name](*(np.float32(1) for _ in STATES[name]._fields))
    pickled = pickle.dumps(state)
    assert b"optclip.typing" in pickled
    assert b"optclip._typing" not in pickled
    assert pickle.loads(pickled) == state
