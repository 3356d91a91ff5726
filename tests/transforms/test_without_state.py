"""Fixed-threshold clipping with `record=False` replaces optax's in a running job."""

import functools

import jax
import numpy as np
import optax
import pytest

import optclip
from optclip import responses, thresholds
from optclip.typing import ClipState
from tests.support import helpers, registry
from tests.support.registry import ENTRIES, by_trait

TREE = helpers.gradients()
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


@pytest.mark.parametrize("entry", by_trait(), ids=lambda entry: entry.id)
def test_record_option_changes_no_update(entry):
    """Without a record, a fixed clip has the state of optax's."""

    @helpers.quick_jit
    def steps(tree):
        txs = [entry.make(record=record) for record in (True, False, "leaves")]
        return [tx.update(tree, tx.init(tree)) for tx in txs]

    (expected, state), (lean, lean_state), (by_leaf, _) = steps(TREE)
    assert helpers.differs(expected, TREE)
    helpers.assert_identical([lean, by_leaf], [expected] * 2)
    assert (lean_state == optax.EmptyState()) == (entry.state == "record")
    assert len(jax.tree.leaves(lean_state)) < len(jax.tree.leaves(state))


# Some trainers pass a single state for everything.
FOREIGN = [
    None,
    optax.EmptyState(),
    optax.adam(1e-3).init({"w": np.ones(2)}),
    {"step": 3},
]
FIXED = [
    functools.partial(optclip.clip_by, 1.0),
    functools.partial(optclip.clip_by_norm, {"dense": 1.0, "out": None}),
    functools.partial(optclip.clip_by_norm, np.ones(())),
    optclip.recipes.agc,
]


@pytest.mark.parametrize("make", FIXED, ids=["tree", "leaves", "array", "agc"])
def test_fixed_clip_without_state_clips_as_with_it(make):
    @helpers.quick_jit
    def clipped(tree):
        tx = make(record=True)
        outs = [tx.update(tree, tx.init(tree), tree)[0]]
        for record, states in ((True, [None]), (False, FOREIGN), ("leaves", [None])):
            for state in states:
                out, same = make(record=record).update(tree, state, tree)
                assert same is state
                outs.append(out)
        return outs

    first, *others = clipped(TREE)
    assert helpers.differs(first, TREE)
    helpers.assert_identical(others, [first] * len(others))


def test_clip_without_state_takes_none_in_place_of_gradient():
    tx, params = optclip.clip_by_norm(1.0, record="leaves"), {"a": 1.0, "b": 1.0}
    assert tx.update({"a": 4.0, "b": None}, None, params)[0] == {"a": 1.0, "b": None}


MAKERS = {e.id: e.make for e in by_trait()} | {"clippy": optclip.recipes.clippy}


@functools.cache
def states():
    """Return a state of each structure."""
    made = [
        optclip.recipes.clippy(),
        *(entry.make(record=x) for entry in ENTRIES for x in (True, False, "leaves")),
        *map(registry.of_rule, registry.RULES),
    ]
    return {jax.tree.structure(x): x for x in (tx.init(TREE) for tx in made)}


@pytest.mark.parametrize("record", [True, "leaves"])
@pytest.mark.parametrize("name", MAKERS)
def test_update_of_another_state_raises_or_records_in_place(name, record):
    tx = MAKERS[name](record=record)
    own = tx.init(TREE)
    for structure, state in states().items():
        try:
            _, after = jax.eval_shape(tx.update, TREE, state, TREE)
        except (ValueError, TypeError):
            assert structure != jax.tree.structure(own)
            continue
        assert jax.tree.structure(after) == structure
        assert after.clip_record.keys() == own.clip_record.keys()
        # A fixed threshold keeps the memory of a rule.
        assert isinstance(own.clip_memory, list) or structure == jax.tree.structure(own)


@pytest.mark.parametrize("name", STATEFUL)
def test_record_false_keeps_steps_and_memory(name):
    tx = optclip.clip_by_norm(**STATEFUL[name], record=False)
    state = tx.init(TREE)
    assert isinstance(state, ClipState)
    assert state.clip_record == {}
    assert tx.update(TREE, state)[1].clip_step == 1


def test_record_false_initializes_from_model_with_functions():
    """As optax does, such as for a model of Equinox."""
    clip = optclip.clip_by_global_norm(1.0, record=False)
    assert clip.init({"w": np.ones(2), "activation": np.tanh}) == optax.EmptyState()
