"""A fixed clip with `record=False` takes the place of one of optax in a running job."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import responses, thresholds
from optclip.typing import ClipState
from tests.support import helpers

LABELS = {"dense": "body", "out": "head"}
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
    "array": (optclip.clip_by_norm, {"max_norm": jnp.ones(())}),
}
# What counts steps, or learns.
KEEPS = {
    "schedule": {"max_norm": lambda step: 1.0 + step},
    "rule": {"max_norm": thresholds.quantile(0.5, window=4)},
    "schedule in a tree": {"max_norm": {"dense": 1.0, "out": lambda step: 1.0}},
    "response with a schedule": {
        "max_norm": 1.0,
        "response": responses.band(lambda step: 0.5 + 0.0 * step),
    },
}


def fixed(name):
    make, arguments = FIXED[name]
    return make(**arguments, record=False)


@pytest.mark.parametrize("name", FIXED)
def test_its_state_is_that_of_optaxs_own_clips(name):
    tree = helpers.gradients()
    tx = fixed(name)
    state = tx.init(tree)
    assert state == optax.EmptyState()
    found, after = helpers.quick_jit(tx.update)(tree, state)
    assert after == optax.EmptyState()
    make, arguments = FIXED[name]
    recording = make(**arguments)
    expected, _ = helpers.quick_jit(recording.update)(tree, recording.init(tree))
    assert helpers.differs(found, tree)
    helpers.assert_identical(found, expected)


@pytest.mark.parametrize("name", KEEPS)
def test_what_depends_on_the_step_keeps_a_state(name):
    tree = helpers.gradients()
    tx = optclip.clip_by_norm(**KEEPS[name], record=False)
    state = tx.init(tree)
    assert isinstance(state, ClipState)
    assert state.clip_record == {}
    assert tx.update(tree, state)[1].clip_step == 1


def test_a_running_job_goes_on_with_either_clip():
    """The state of a step with one of the two is that of a step with the other."""
    params = helpers.gradients(1)
    theirs, ours = (
        optax.chain(clip, optax.adamw(1e-2))
        for clip in (
            optax.clip_by_global_norm(1.0),
            optclip.clip_by_global_norm(1.0, record=False),
        )
    )

    def run(*order):
        state, found = order[0].init(params), []
        for seed, tx in enumerate(order):
            grads = helpers.gradients(seed, scale=10.0**seed)
            updates, state = helpers.quick_jit(tx.update)(grads, state, params)
            found.append(updates)
        return found, state

    alone = run(theirs, theirs, theirs)
    exchanged = run(theirs, ours, theirs)
    assert jax.tree.structure(exchanged) == jax.tree.structure(alone)
    for found, expected in zip(
        jax.tree.leaves(exchanged), jax.tree.leaves(alone), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_the_state_of_a_clip_that_records_is_refused(run):
    tree = helpers.gradients()
    state = optclip.clip_by_global_norm(1.0).init(tree)
    with pytest.raises(
        TypeError,
        match=r"`state` must be EmptyState\(\), got ClipState.* or set record=True",
    ):
        run(fixed("global").update)(tree, state)


def test_its_metrics_say_how_to_have_some():
    tx = optax.chain(fixed("global"), optax.adam(1e-3))
    with pytest.raises(ValueError, match="record=False .*give the clip record=True"):
        optclip.metrics(tx.init(helpers.gradients()))


def test_what_its_updates_do_not_fit_is_refused_from_init_on():
    tx = optclip.clip_by_norm({"a": 1.0}, record=False)
    with pytest.raises(ValueError, match="`max_norm`"):
        tx.init({"b": jnp.ones(2)})
