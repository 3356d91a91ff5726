"""What QK-Clip adds to a step, as far as it is the same in each run."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import optclip


def traced(layers, width, others):
    """The jaxpr of an update of that many layers, beside leaves that have no heads."""
    attn = {name: jnp.ones((width, 4, 8)) for name in ("query", "key")}
    params = {f"block_{i}": attn for i in range(layers)}
    params["others"] = [jnp.ones((width, width))] * others
    found = optclip.find_heads(params, query="query", key="key")
    tx = optclip.clip_attention_logits(100.0, found)
    logits = {name: jnp.ones(4) for name in found}

    def update(updates, state, params):
        return tx.update(updates, state, params, max_logits=logits)

    return jax.make_jaxpr(update)(params, tx.init(params), params).jaxpr


@pytest.mark.parametrize("layers", [1, 3])
def test_equations_depend_on_layers_alone(layers):
    least = len(traced(layers, 8, 0).eqns)
    assert len(traced(layers, 64, 0).eqns) == least
    assert len(traced(layers, 8, 20).eqns) == least


def test_each_layer_adds_the_same_equations():
    counts = [len(traced(layers, 8, 0).eqns) for layers in (2, 3, 4, 5)]
    added = {b - a for a, b in itertools.pairwise(counts)}
    assert len(added) == 1
    assert 0 < added.pop() < 120


def test_leaves_without_heads_come_out_as_they_went_in():
    jaxpr = traced(2, 8, 5)
    leaves = jaxpr.invars[2 * 2 : 2 * 2 + 5]
    assert not {id(x) for e in jaxpr.eqns for x in e.invars} & set(map(id, leaves))
    assert set(map(id, leaves)) <= set(map(id, jaxpr.outvars))
