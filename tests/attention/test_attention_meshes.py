"""QK-Clip on 8 devices is QK-Clip on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip.functional import clip_attention_logits, max_attention_logit
from tests.support import helpers

HEADS, GROUPS, MODEL, WIDTH = 8, 4, 16, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "query": RNG.normal(size=(MODEL, HEADS, WIDTH)).astype(np.float32),
    "key": RNG.normal(size=(MODEL, GROUPS, WIDTH)).astype(np.float32),
}
LAYERS = {"attn": optclip.Heads("query", "key")}
# What each of the four shards of the data saw; NaN and negative ones among it.
SEEN = np.geomspace(10, 1000, 4 * HEADS).astype(np.float32).reshape(4, HEADS)
SEEN[1, 3], SEEN[:, 5] = np.nan, -1.0
LARGEST = {"attn": np.max(SEEN, 0)}
TX = optclip.clip_attention_logits(100.0, LAYERS)

PLACES = {
    "by head": {"query": P(None, "model"), "key": P(None, "model")},
    "by feature": {"query": P("model"), "key": P("data")},
    "whole": {"query": P(), "key": P()},
}


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def step(params, logits):
    updates = jax.tree.map(lambda x: -0.1 * x, params)
    out, state = TX.update(updates, TX.init(params), params, max_logits=logits)
    clipped, found = clip_attention_logits(params, logits, 100.0, LAYERS)
    return out, clipped, found, optclip.metrics(state)


def same(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def alone():
    return jax.jit(step)(PARAMS, LARGEST)


def test_something_is_clipped(alone):
    assert helpers.differs(alone[1], PARAMS)
    np.testing.assert_array_equal(alone[2]["attn"][np.array([3, 5])], 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_under_jit(place, kind, alone):
    there = mesh(kind)
    params = {
        k: jax.device_put(x, NamedSharding(there, PLACES[place][k]))
        for k, x in PARAMS.items()
    }
    logits = jax.device_put(LARGEST, NamedSharding(there, P()))
    with jax.set_mesh(there):
        found = jax.jit(step)(params, logits)
    same(found, alone)
    for k, x in found[1].items():
        assert x.sharding.is_equivalent_to(params[k].sharding, x.ndim)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_heads_and_logits_may_be_split_together(kind, alone):
    there = mesh(kind)
    spec = NamedSharding(there, P(None, "model"))
    params = {k: jax.device_put(x, spec) for k, x in PARAMS.items()}
    logits = jax.device_put(LARGEST, NamedSharding(there, P("model")))
    with jax.set_mesh(there):
        same(jax.jit(step)(params, logits), alone)


@pytest.mark.parametrize("place", ["by head", "whole"])
def test_what_a_shard_of_the_data_saw_is_reduced(place, alone):
    """By the types: over `data`, and over `model` unless heads are split over it."""
    specs = PLACES[place]
    heads = "model" if place == "by head" else None

    def local(params, seen):
        if not heads:
            # As if each device had seen something else.
            seen = seen - 1e3 * lax.axis_index("model")
        out, clipped, found, metrics = step(params, {"attn": seen[0]})
        return out, clipped, found, metrics

    mapped = jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(specs, P("data", heads)),
        out_specs=(specs, specs, {"attn": P(heads)}, P()),
    )
    same(jax.jit(mapped)(PARAMS, SEEN), alone)


@pytest.mark.parametrize("by_group", [False, True])
def test_query_heads_may_be_split_over_one_whole_key_head(by_group):
    """As tensor parallel layers have it: the key must be scaled alike everywhere."""
    params = PARAMS | {"key": PARAMS["key"][:, :1]}

    def clip(params, largest):
        logits = {"attn": largest}
        return clip_attention_logits(params, logits, 100.0, LAYERS, by_group=by_group)

    specs = {"query": P(None, "model"), "key": P()}
    mapped = jax.shard_map(
        clip,
        mesh=mesh(),
        in_specs=(specs, P("model")),
        out_specs=(specs, {"attn": P("model")}),
    )
    same(jax.jit(mapped)(params, LARGEST["attn"]), clip(params, LARGEST["attn"]))
    with pytest.raises(
        ValueError, match=r"must be split over .*\('model',\).*got 4 on"
    ):
        jax.jit(mapped)(PARAMS, LARGEST["attn"])


def test_layers_are_reduced_in_one_collective():
    params = {f"layer_{i}": PARAMS for i in range(6)}
    layers = optclip.find_heads(params, query="query", key="key")

    def clip(params, seen):
        logits = dict.fromkeys(layers, seen[0])
        return clip_attention_logits(params, logits, 100.0, layers)[0]

    mapped = jax.shard_map(clip, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    program = jax.jit(mapped).lower(params, SEEN).compile().as_text()
    assert program.count(" all-reduce(") == 1


def test_where_types_say_nothing_logits_are_reduced_before(alone):
    def local(params, seen):
        return step(params, {"attn": lax.pmax(jnp.nan_to_num(seen[0], nan=-1), "data")})

    mapped = jax.shard_map(
        local, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    found = jax.jit(mapped)(PARAMS, np.where(np.isnan(LARGEST["attn"]), np.nan, SEEN))
    same(found[1], alone[1])


def test_a_rule_learns_where_types_say_nothing():
    tx = optclip.clip_attention_logits(
        optclip.thresholds.previous_norm(max_norm=100.0), LAYERS
    )

    def local(params, largest):
        state = tx.init(params)
        return tx.update(params, state, params, max_logits={"attn": largest})[0]

    for check in (True, False):
        mapped = jax.shard_map(
            local, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=check
        )
        found = jax.jit(mapped)(PARAMS, LARGEST["attn"])
        same(found, local(PARAMS, LARGEST["attn"]))


@pytest.mark.parametrize("mask", [None, "causal"])
def test_the_largest_over_the_axes_that_are_named(mask):
    query = RNG.normal(size=(8, 5, HEADS, WIDTH)).astype(np.float32)
    key = RNG.normal(size=(8, 5, GROUPS, WIDTH)).astype(np.float32)
    query[3, 4, 1] = np.nan
    query[:, :, 2], key[7, :, 1] = -1.0, 1.0
    specs = P("data", None, "model")

    def local(q, k):
        return max_attention_logit(q, k, mask=mask, axis_name="data", block_size=2)

    mapped = jax.shard_map(
        local, mesh=mesh(), in_specs=(specs, specs), out_specs=P("model")
    )
    found = jax.jit(mapped)(query, key)
    same(found, max_attention_logit(query, key, mask=mask))
    np.testing.assert_array_equal(np.isnan(found), np.arange(HEADS) == 1)
    own = jax.shard_map(
        lambda q, k: max_attention_logit(q, k, mask=mask)[None],
        mesh=mesh(),
        in_specs=(specs, specs),
        out_specs=P("data", "model"),
    )
    by_shard = jax.jit(own)(query, key)
    for i, x in enumerate(by_shard):
        rows = slice(2 * i, 2 * i + 2)
        same(x, max_attention_logit(query[rows], key[rows], mask=mask))


def test_the_largest_under_jit_on_a_mesh():
    query = RNG.normal(size=(8, 6, HEADS, WIDTH)).astype(np.float32)
    key = RNG.normal(size=(8, 6, GROUPS, WIDTH)).astype(np.float32)
    spec = NamedSharding(mesh(), P("data", None, "model"))
    found = jax.jit(max_attention_logit)(*jax.device_put((query, key), spec))
    same(found, max_attention_logit(query, key))
