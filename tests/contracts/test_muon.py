"""Muon takes some leaves and AdamW the others: what a spike in a matrix does to each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip

BETA, SPIKE_AT = 0.95, 3


def side(params):
    """The default partition of `optax.contrib.muon`."""
    return jax.tree.map(lambda x: "muon" if x.ndim == 2 else "adam", params)


def is_adam(params):
    return jax.tree.map(lambda name: name == "adam", side(params))


CLIPS = {
    "whole tree": optclip.clip_by_global_norm(1.0),
    "by side": optclip.clip_by_group_norm({"muon": 1.0, "adam": 1.0}, side),
    "adam alone": optclip.clip_by_global_norm(1.0, mask=is_adam),
}


def updates_of(clip, spike, steps):
    """What each step adds, with one matrix of one step so many times as large."""
    params = {"kernel": jnp.eye(6), "scale": jnp.ones(6), "bias": jnp.zeros(3)}
    tx = optax.chain(clip, optax.contrib.muon(0.02, beta=BETA))
    update, state, found = jax.jit(tx.update), tx.init(params), []
    draws = np.random.default_rng(0)
    for step in range(steps):
        grads = {name: draws.normal(size=p.shape) / 4 for name, p in params.items()}
        grads["kernel"] += np.eye(6)
        if step == SPIKE_AT:
            grads["kernel"] = spike * np.fliplr(grads["kernel"])
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
        updates, state = update(grads, state, params)
        found.append(jax.device_get(updates))
    return found


@pytest.mark.parametrize(
    ("clip", "same"), [("by side", True), ("adam alone", True), ("whole tree", False)]
)
def test_a_spike_in_a_matrix_and_the_steps_of_adamw(clip, same):
    calm, spiked = (updates_of(CLIPS[clip], size, SPIKE_AT + 3) for size in (1.0, 1e9))
    for name in ("scale", "bias"):
        equal = [
            np.array_equal(c[name], s[name]) for c, s in zip(calm, spiked, strict=True)
        ]
        assert all(equal[:SPIKE_AT])
        assert all(equal[SPIKE_AT:]) == same


@pytest.mark.parametrize(
    ("clip", "forgets"),
    [("by side", True), ("whole tree", True), ("adam alone", False)],
)
def test_a_spike_in_the_momentum_of_muon(clip, forgets):
    """The direction of the step long after, with the spike and without."""
    calm, spiked = (
        updates_of(CLIPS[clip], size, SPIKE_AT + 81)[-1]["kernel"]
        for size in (1.0, 1e9)
    )
    cosine = np.sum(calm * spiked) / np.linalg.norm(calm) / np.linalg.norm(spiked)
    assert (cosine > 0.95) == forgets, cosine
    assert forgets or cosine < 0.5, cosine


def test_the_norm_of_a_step_of_muon_says_nothing_of_the_gradient():
    steps = updates_of(CLIPS["adam alone"], 1e9, SPIKE_AT + 3)
    norms = [np.linalg.norm(step["kernel"]) for step in steps]
    assert max(norms) < 1.5 * min(norms)
