"""Heads found by paths, in trees named and shaped as five libraries do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import Heads
from optclip.functional import clip_attention_logits

D, H, N = 6, 4, 3
kernel, bias, flat = jnp.ones((D, H, N)), jnp.ones((H, N)), jnp.ones((D, H * N))


def linen(block):
    both = {"kernel": kernel, "bias": bias}
    return {f"block_{block}": {"attn": dict.fromkeys(("query", "key", "value"), both)}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    weight: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MultiheadAttention:
    query_proj: Linear
    key_proj: Linear


def equinox():
    linear = Linear(flat.T, jnp.ones(H * N))
    return {"layers": [MultiheadAttention(linear, linear) for _ in range(2)]}


haiku = {
    f"transformer/h{i}/attn/{name}": {"w": flat, "b": jnp.ones(H * N)}
    for i in range(2)
    for name in ("query", "key", "value")
}
stack = {"kernel": jnp.ones((D, 2, H, N))}
maxtext = {"decoder": {"layers": {"self_attention": {"query": stack, "key": stack}}}}
TREES = {
    "flax": (linen(0) | linen(1), ["block_0/attn", "block_1/attn"], {}),
    "equinox": (
        equinox(),
        ["layers/0", "layers/1"],
        {"query": "query_proj", "key": "key_proj", "axis": 0, "head_dim": N},
    ),
    "haiku": (
        haiku,
        ["transformer/h0/attn", "transformer/h1/attn"],
        {"axis": -1, "head_dim": N},
    ),
    "maxtext": (maxtext, ["decoder/layers/self_attention"], {"stacked": 1}),
}


@pytest.mark.parametrize("library", TREES)
def test_layers_are_found_and_clipped_where_libraries_keep_them(library):
    params, names, options = TREES[library]
    options = {"query": "query", "key": "key"} | options
    layers = optclip.find_heads(params, **options)
    assert list(layers) == names
    s = jnp.asarray([1.0, 400.0, 1.0, 1.0])
    s = jnp.stack([s, s]) if "stacked" in options else s
    clipped, _ = clip_attention_logits(params, dict.fromkeys(names, s), 100.0, layers)
    paths = jax.tree.leaves_with_path(clipped)
    for path, leaf in paths:
        is_ours = any(w in jax.tree_util.keystr(path) for w in ("query", "key"))
        values, counts = np.unique(leaf, return_counts=True)
        assert list(values) == ([0.5, 1.0] if is_ours else [1.0])
        assert not is_ours or counts[0] * 4 == leaf.size


def test_patterns_are_of_whole_paths_and_a_lone_layer_has_a_name():
    tree = {"enc": linen(0), "dec": linen(0)}
    layers = optclip.find_heads(
        tree, query="enc/*/query/kernel", key="enc/*/key/kernel"
    )
    own = "enc/block_0/attn"
    assert layers == {own: Heads((f"{own}/query/kernel",), (f"{own}/key/kernel",))}
    lone = optclip.find_heads({"q": kernel, "k": kernel}, query="q", key="k")
    assert lone == {"attention": Heads(("q",), ("k",))}


REFUSED = {
    "nothing": ({"query": "quary"}, ValueError, "The paths are"),
    "kind": ({"query": 3}, TypeError, "query"),
    "no key": ({"key": "*/block_1/*/key/*"}, ValueError, "with no key under"),
    "no query": ({"query": "*block_1/*/query/*"}, ValueError, "with no query under"),
    "axis": ({"axis": 0.5}, TypeError, "axis"),
    "stacked": ({"stacked": True}, TypeError, "stacked"),
    "rope": ({"rope": -1}, ValueError, "rope"),
    "head_dim": ({"head_dim": 0}, ValueError, "head_dim"),
    "all rope": ({"head_dim": 3, "rope": 3}, ValueError, "less than `head_dim`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_matches_nothing_is_refused_with_the_paths_there_are(case):
    given, error, words = REFUSED[case]
    params = {"model": linen(0) | linen(1)}
    with pytest.raises(error) as caught:
        optclip.find_heads(params, **({"query": "query", "key": "key"} | given))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error"),
    [((3, "k"), TypeError), (("q", ("k", 3)), TypeError), (("", "k"), ValueError),
     (("q", ()), ValueError)],
)  # fmt: skip
def test_heads_are_named_by_paths(given, error):
    with pytest.raises(error, match="must be a path such as"):
        Heads(*given)


def test_long_lists_of_paths_are_shortened():
    many = {f"layer_{i}": kernel for i in range(30)}
    with pytest.raises(ValueError, match="and 20 more"):
        optclip.find_heads(many, query="query", key="key")
