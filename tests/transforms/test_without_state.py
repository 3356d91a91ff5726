"""Fixed-threshold clipping with `record=False` replaces optax's in a running job."""

import jax
import numpy as np
import optax
import pytest

import optclip
from optclip import responses, thresholds
from optclip.typing import ClipState
from tests.support import helpers

LABELS = {"dense": "body", "out": "head"}
TREE = helpers.gradients()
FIXED = {
    "clip_by": (optclip.clip_by, {"threshold": 1.0}),
    "value": (optclip.clip_by_value, {"limit": 1.0}),
    "bounds": (optclip.clip_by_value, {"lower": -1.0, "upper": 2.0}),
    "norm": (optclip.clip_by_norm, {"max_norm": 1.0}),
    "slices": (optclip.clip_by_norm, {"max_norm": 1.0, "axis": 0}),
    "average": (optclip.clip_by_average_norm, {"max_norm": 0.1}),
    "rms": (optclip.clip_by_rms, {"max_rms": 1.0}),
    "group": (optclip.clip_by_group_norm, {"max_norm": 1.0, "groups": LABELS}),
    "global": (optclip.clip_by_global_norm, {"max_norm": 1.0}),
    "spectral": (optclip.clip_by_spectral_norm, {"max_norm": 1.0}),
    "singular": (optclip.clip_by_singular_value, {"max_value": 1.0}),
    "smooth": (optclip.clip_by_global_norm, {"max_norm": 1.0, "response": "smooth"}),
    "tree": (optclip.clip_by_norm, {"max_norm": {"dense": 1.0, "out": None}}),
    "array": (optclip.clip_by_norm, {"max_norm": np.ones(())}),
    "agc": (optclip.recipes.agc, {}),
}
# These count steps or learn.
STATEFUL = {
    "schedule": {"max_norm": lambda step: 1.0 + step},
    "rule": {"max_norm": thresholds.quantile(0.5, window=4)},
    "schedule in a tree": {"max_norm": {"dense": 1.0, "out": lambda step: 1.0}},
    "response with a schedule": {
        "max_norm": 1.0,
        "response": responses.band(lambda step: 0.5 + 0.0 * step),
    },
}


@pytest.mark.parametrize("name", FIXED)
def test_record_false_of_fixed_clip_keeps_the_state_of_optax(name):
    make, arguments = FIXED[name]
    tx = make(**arguments, record=False)
    _, state = jax.eval_shape(tx.update, TREE, tx.init(TREE), TREE)
    assert tx.init(TREE) == state == optax.EmptyState()


ABSENT = [None, optax.EmptyState()]
# Some trainers pass a single state for everything.
FOREIGN = [*ABSENT, optax.adam(1e-3).init({"w": np.ones(2)}), {"step": 3}]
STATES = {False: FOREIGN, True: ABSENT, "leaves": ABSENT}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_clip_without_state_clips_as_with_it(name):
    make, arguments = FIXED[name]

    @helpers.quick_jit
    def clipped(tree):
        outs = []
        for record, states in STATES.items():
            tx = make(**arguments, record=record)
            outs.append(tx.update(tree, tx.init(tree), tree)[0])
            for state in states:
                out, same = tx.update(tree, state, tree)
                assert same is state
                outs.append(out)
        return outs

    first, *others = clipped(TREE)
    assert helpers.differs(first, TREE)
    for other in others:
        helpers.assert_identical(other, first)


@pytest.mark.parametrize("name", STATEFUL)
def test_record_false_keeps_steps_and_memory(name):
    tx = optclip.clip_by_norm(**STATEFUL[name], record=False)
    state = tx.init(TREE)
    assert isinstance(state, ClipState)
    assert state.clip_record == {}
    assert tx.update(TREE, state)[1].clip_step == 1


CLIP = optclip.clip_by_global_norm(1.0, record=False)
REJECTED = [
    (
        lambda: optclip.clip_by_global_norm(1.0).update(TREE, {"step": 3}),
        TypeError,
        r"must be the ClipState .*, got .*functional.clip_by_global_norm.* record=False",
    ),
    (
        lambda: optclip.clip_by_norm(thresholds.ema()).update(TREE, None),
        TypeError,
        r"must be a ClipState, got None .*order is tx\.update\(updates, state, params",
    ),
    (
        lambda: optclip.metrics(optax.chain(CLIP, optax.adam(1e-3)).init(TREE)),
        ValueError,
        "record=False .*build the transformation with record=True",
    ),
    (
        lambda: optclip.clip_by_norm({"a": 1.0}, record=False).init({"b": np.ones(2)}),
        ValueError,
        "`max_norm`",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REJECTED)
def test_record_false_where_it_does_not_fit_raises(call, error, words, run):
    with pytest.raises(error, match=words):
        run(call)()
