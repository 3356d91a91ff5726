"""Test QK-Clip on 8 devices against its formula in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip.functional import clip_attention_logits, max_attention_logit
from tests.support import attention, helpers
from tests.support.attention import Kind, Layout, Model
from tests.support.mapped import mesh_of as mesh

HEADS, GROUPS, WIDTH = 8, 4, 4
MODEL = Model(Layout("bare", "dhn", biased=False), Kind("mesh", HEADS, GROUPS))
PARAMS, LAYERS = MODEL.params(), MODEL.layers()
# The largest logits of four shards of the data, with NaN and negative ones.
SEEN = np.geomspace(10, 1000, 4 * HEADS).astype(np.float32).reshape(4, HEADS)
SEEN[1, 3], SEEN[:, 5] = np.nan, -1.0
LARGEST = np.max(SEEN, 0)
GAMMA = attention.coefficients(LARGEST[None], 100.0)
TX = optclip.clip_attention_logits(100.0, LAYERS)

PLACES = {
    "by head": {"query": P(None, "model"), "key": P(None, "model"), "shared": P()},
    "by feature": {"query": P("model"), "key": P("data"), "shared": P()},
    "whole": {"query": P(), "key": P(), "shared": P()},
}


def mapped(function, in_specs, out_specs, **options):
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return helpers.quick_jit(jax.shard_map(function, mesh=mesh(), **specs, **options))


def step(params, largest):
    """Clip as a pure function, and as a transformation after a step of -0.1."""
    logits = {"attn": largest}
    clipped, found = clip_attention_logits(params, logits, 100.0, LAYERS)
    updates = jax.tree.map(lambda x: -0.1 * x, params)
    updates, state = TX.update(updates, TX.init(params), params, logits=logits)
    new = jax.tree.map(jnp.add, params, updates)
    return clipped, found["attn"], new, optclip.metrics(state)


def assert_stepped(clipped, found, new, metrics):
    """Compare coefficients, weights and recomputed logits with the formula."""
    np.testing.assert_allclose(found, GAMMA[0], rtol=1e-6)
    least = metrics["attention/coefficient/attn"]
    np.testing.assert_allclose(least, GAMMA.min(), rtol=1e-6)
    assert metrics["attention/norm/attn"] == np.nanmax(LARGEST)
    MODEL.assert_clipped(PARAMS, clipped, GAMMA)
    moved = jax.tree.map(lambda x: np.float32(0.9) * x, PARAMS)
    moved["shared"] = np.asarray(new["shared"])
    MODEL.assert_clipped(moved, new, GAMMA, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "kind", "logits"),
    [
        ("by head", AxisType.Auto, P("model")),
        ("by head", AxisType.Explicit, P("model")),
        ("by feature", AxisType.Explicit, P()),
    ],
    ids=str,
)
def test_clip_under_jit_equals_formula_and_keeps_shardings(place, kind, logits):
    specs = (PLACES[place], logits)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh(kind), spec), specs)
    params, largest = jax.device_put((PARAMS, LARGEST), shardings)
    with jax.set_mesh(mesh(kind)):
        found = jax.jit(step)(params, largest)
    assert_stepped(*found)
    for x, y in zip(*map(jax.tree.leaves, (found[0], params)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize("place", ["by head", "whole"])
def test_clip_under_shard_map_reduces_logits_over_axes_of_the_data(place):
    """Types specify the axes: `data`, and `model` unless heads are sharded over it."""
    specs = PLACES[place]
    heads = "model" if place == "by head" else None

    def local(params, seen):
        # Devices have different logits unless heads are sharded.
        seen = seen if heads else seen - 1e3 * lax.axis_index("model")
        return step(params, seen[0])

    out_specs = (specs, P(heads), specs, P())
    assert_stepped(*mapped(local, (specs, P("data", heads)), out_specs)(PARAMS, SEEN))


def test_clip_query_heads_split_over_one_whole_key_head_scale_it_alike():
    """As in tensor-parallel layers."""
    one = Model(MODEL.layout, Kind("one key head", HEADS, 1))

    def clip(params, largest):
        logits = {"attn": largest}
        return clip_attention_logits(params, logits, 100.0, LAYERS)

    specs = {"query": P(None, "model"), "key": P(), "shared": P()}
    split = mapped(clip, (specs, P("model")), (specs, {"attn": P("model")}))
    out, found = split(one.params(), LARGEST)
    np.testing.assert_allclose(found["attn"], GAMMA[0], rtol=1e-6)
    one.assert_clipped(one.params(), out, GAMMA)
    with pytest.raises(ValueError, match=r"split over .*\('model',\).*got 4 on"):
        split(PARAMS, LARGEST)


def test_clip_reduces_logits_of_all_layers_in_one_collective():
    params = {f"layer_{i}": PARAMS for i in range(3)}
    layers = optclip.find_heads(params, query="query", key="key")

    def clip(params, seen):
        logits = dict.fromkeys(layers, seen[0])
        return clip_attention_logits(params, logits, 100.0, layers)[0]

    split = jax.shard_map(clip, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    program = helpers.optimized_jit(split).lower(params, SEEN).compile().as_text()
    assert program.count(" all-reduce(") == 1


def test_clip_without_typed_axes_accepts_reduced_logits():
    def local(params, seen):
        return step(params, lax.pmax(seen[0], "data"))

    seen = np.where(np.isnan(LARGEST), np.nan, SEEN)
    split = mapped(local, (P(), P("data")), P(), check_vma=False)
    assert_stepped(*split(PARAMS, seen))


def test_rule_learns_under_shard_map():
    rule = optclip.thresholds.previous_norm(max_norm=100.0)
    tx = optclip.clip_attention_logits(rule, LAYERS)

    def local(params, largest):
        state, zeros = tx.init(params), jax.tree.map(jnp.zeros_like, params)
        for scale in (1, 2):
            logits = {"attn": scale * largest}
            updates, state = tx.update(zeros, state, params, logits=logits)
        return jax.tree.map(jnp.add, params, updates)

    usable = np.where(GAMMA[0] < 1, LARGEST, np.float32(50))
    new = mapped(local, P(), P())(PARAMS, usable)
    # The second step clips by the logits of the first, which were half as large.
    MODEL.assert_clipped(PARAMS, new, GAMMA, atol=1e-6)


QUERY = np.random.default_rng(0).normal(size=(8, 5, HEADS, WIDTH)).astype(np.float32)
KEY = np.random.default_rng(1).normal(size=(8, 5, GROUPS, WIDTH)).astype(np.float32)
QUERY[3, 4, 1] = np.nan
QUERY[:, :, 2], KEY[7, :, 1] = -1.0, 1.0


def largest_of(query, key, mask):
    """Compute the largest scaled logit of each head in float64."""
    attended = np.tril(np.ones((5, 5), bool)) if mask else True
    return attention.largest_logits(query, key, attended) / np.sqrt(WIDTH)


def test_max_logit_under_shard_map_reduces_over_named_axes_only():
    masks = None, "causal"

    def local(query, key):
        find = functools.partial(max_attention_logit, query, key, block_size=2)
        named = [find(mask=mask, axis_name="data") for mask in masks]
        return named, [find(mask=mask)[None] for mask in masks]

    spec = P("data", None, "model")
    out_specs = (P("model"), P("data", "model"))
    found = mapped(local, (spec, spec), out_specs)(QUERY, KEY)
    for mask, of_all, by_shard in zip(masks, *found, strict=True):
        wanted = largest_of(QUERY, KEY, mask)
        assert list(np.flatnonzero(np.isnan(wanted))) == [1]
        np.testing.assert_allclose(of_all, wanted, rtol=1e-6)
        pairs = zip(np.split(QUERY, 4), np.split(KEY, 4), strict=True)
        wanted = [largest_of(*pair, mask) for pair in pairs]
        np.testing.assert_allclose(by_shard, wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_max_logit_under_jit_on_a_mesh_equals_numpy(kind):
    place = NamedSharding(mesh(kind), P("data", None, "model"))
    with jax.set_mesh(mesh(kind)):
        found = jax.jit(max_attention_logit)(*jax.device_put((QUERY, KEY), place))
    np.testing.assert_allclose(found, largest_of(QUERY, KEY, None), rtol=1e-6)
