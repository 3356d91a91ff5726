"""QK-Clip on a mesh: logits are reduced over what the weights are not split over."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from optclip import Heads
from optclip.functional import clip_attention_logits, max_attention_logit

LAYERS = {"a": Heads("query", "key")}


def drawn():
    rng = np.random.default_rng(0)
    shapes = [(8, 6, 4, 3), (8, 6, 4, 3), (5, 4, 3), (5, 4, 3)]
    return [jnp.asarray(9 * rng.standard_normal(s), jnp.float32) for s in shapes]


def step(query, key, params):
    s = {"a": max_attention_logit(query, key, mask="causal")}
    return clip_attention_logits(params, s, 100.0, LAYERS)


@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_eight_devices_clip_as_one(how):
    query, key, *weights = drawn()
    params = dict(zip(("query", "key"), weights, strict=True))
    want, coefficients = step(query, key, params)
    assert np.sum(np.asarray(coefficients["a"]) < 1) > 0
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    batch, heads = P("data", None, "model"), P(None, "model")
    specs = batch, batch, {"query": heads, "key": heads}
    if how == "jit":
        place = jax.tree.map(
            functools.partial(NamedSharding, mesh), specs,
            is_leaf=lambda x: isinstance(x, P),
        )  # fmt: skip
        got, found = jax.jit(step, in_shardings=place)(query, key, params)
    else:
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=specs,
            out_specs=({"query": heads, "key": heads}, {"a": P("model")}),
        )  # fmt: skip
        got, found = jax.jit(mapped)(query, key, params)
    np.testing.assert_allclose(found["a"], coefficients["a"], rtol=1e-6)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-6)


def test_where_types_say_nothing_the_largest_over_an_axis_is_asked_for():
    query, key, *weights = drawn()
    params = dict(zip(("query", "key"), weights, strict=True))
    want, _ = step(query, key, params)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    tx = optclip.clip_attention_logits(100.0, LAYERS)

    def train(query, key, params):
        s = {"a": max_attention_logit(query, key, mask="causal", axis_name="data")}
        zero = jax.tree.map(jnp.zeros_like, params)
        updates, _ = tx.update(zero, tx.init(params), params, max_logits=s)
        return jax.tree.map(jnp.add, params, updates)

    mapped = jax.shard_map(
        train, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    got = jax.jit(mapped)(query, key, params)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-6)
