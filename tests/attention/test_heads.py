"""Heads: what they refuse, and how they are found by the names of many libraries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import Heads, find_heads
from optclip.functional import clip_attention_logits

ONE = np.ones((3, 2, 4), np.float32)


def module(**leaves):
    return {name: np.ones(shape, np.float32) for name, shape in leaves.items()}


def attention(names, **leaves):
    return {name: module(**leaves) for name in names}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """As Equinox has it: attributes, inputs last."""

    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MultiheadAttention:
    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear


@jax.tree_util.register_pytree_with_keys_class
class Boxed:
    """As Flax NNX boxes a parameter."""

    def __init__(self, value):
        self.value = value

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("value"), self.value)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


FLAX = ["query", "key", "value"]
KERNEL = {"kernel": (3, 2, 4), "bias": (2, 4)}


def equinox():
    def linear():
        return Linear(np.ones((8, 3), np.float32), np.ones(8, np.float32))

    return MultiheadAttention(*(linear() for _ in range(4)))


TREES = {
    "nnx": (
        {"blocks": {0: {"attn": attention(FLAX, **KERNEL)}}},
        {"query": "query", "key": "key"},
        {"blocks/0/attn": "blocks/0/attn/{}/kernel blocks/0/attn/{}/bias"},
        ("query", "key"),
    ),
    "linen": (
        {
            "params": {
                f"block_{i}": {
                    "MultiHeadDotProductAttention_0": attention(FLAX, **KERNEL)
                }
                for i in range(2)
            }
        },
        {"query": "*/query/kernel", "key": "*/key/kernel"},
        {
            f"params/block_{i}/MultiHeadDotProductAttention_0": (
                f"params/block_{i}/MultiHeadDotProductAttention_0/{{}}/kernel"
            )
            for i in range(2)
        },
        ("query", "key"),
    ),
    "equinox": (
        {"layers": [{"attn": equinox()}, {"attn": equinox()}]},
        {"query": "query_proj", "key": "key_proj", "axis": 0, "head_dim": 4},
        {
            f"layers/{i}/attn": f"layers/{i}/attn/{{}}/weight layers/{i}/attn/{{}}/bias"
            for i in range(2)
        },
        ("query_proj", "key_proj"),
    ),
    "haiku": (
        {f"transformer/attn/{k}": module(w=(3, 8), b=(8,)) for k in FLAX},
        {"query": "query", "key": "key", "axis": -1, "head_dim": 4},
        {"transformer/attn": "transformer/attn/{}/b transformer/attn/{}/w"},
        ("query", "key"),
    ),
    "maxtext": (
        {
            "decoder": {
                "layers": {"self_attention": attention(FLAX, kernel=(3, 5, 2, 4))},
                "decoder_norm": module(scale=(3,)),
            }
        },
        {"query": "query", "key": "key", "stacked": 1},
        {"decoder/layers/self_attention": "decoder/layers/self_attention/{}/kernel"},
        ("query", "key"),
    ),
    "a leaf each": (
        [{"wq": ONE, "wk": ONE, "wv": ONE}, {"wq": ONE, "wk": ONE}],
        {"query": "wq", "key": "wk"},
        {"0": "0/{}", "1": "1/{}"},
        ("wq", "wk"),
    ),
    "at the root": (
        attention(FLAX, kernel=(3, 2, 4)),
        {"query": "query", "key": "key"},
        {"attention": "{}/kernel"},
        ("query", "key"),
    ),
    "two in a block": (
        {"self": attention(FLAX, **KERNEL), "cross": attention(FLAX, **KERNEL)},
        {"query": "query", "key": "key"},
        {
            "cross": "cross/{}/bias cross/{}/kernel",
            "self": "self/{}/bias self/{}/kernel",
        },
        ("query", "key"),
    ),
    "some of them": (
        {f"block_{i}": {"attn": attention(FLAX, kernel=(3, 2, 4))} for i in range(3)},
        {"query": "block_[02]/attn/query/*", "key": "block_?/attn/key/kernel"},
        None,
        (),
    ),
}


def found_in(tree, options):
    return {
        name: (sorted(heads.query), sorted(heads.key), heads)
        for name, heads in find_heads(tree, **options).items()
    }


@pytest.mark.parametrize("library", [k for k, v in TREES.items() if v[2]])
def test_they_are_found_by_the_names_of_libraries(library):
    tree, options, layers, (query, key) = TREES[library]
    found = found_in(tree, options)
    assert list(found) == list(layers)
    for name, paths in layers.items():
        own, others, heads = found[name]
        assert own == sorted(paths.format(query, query).split())
        assert others == sorted(paths.format(key, key).split())
        rest = {k: v for k, v in options.items() if k not in ("query", "key")}
        assert heads == Heads(heads.query, heads.key, **rest)


@pytest.mark.parametrize("library", [k for k, v in TREES.items() if v[2]])
def test_what_is_found_is_clipped(library):
    tree, options, layers, (query, key) = TREES[library]
    found = find_heads(tree, **options)
    shape = (5, 2) if library == "maxtext" else (2,)
    logits = {name: np.full(shape, 400.0, np.float32) for name in layers}
    out, _ = clip_attention_logits(tree, logits, 100.0, found)
    for path, x in jax.tree.leaves_with_path(out):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_named = any(name in h.query or name in h.key for h in found.values())
        np.testing.assert_array_equal(x, np.full(np.shape(x), 0.5 if is_named else 1))
    named = [path for h in found.values() for path in (*h.query, *h.key)]
    assert all(any(word in path for word in (query, key)) for path in named)


def test_parameters_in_boxes_have_the_names_of_bare_ones():
    tree = {"attn": {"query": {"kernel": Boxed(ONE)}, "key": {"kernel": Boxed(ONE)}}}
    bare = {"attn": {"query": {"kernel": ONE}, "key": {"kernel": ONE}}}
    found = find_heads(tree, query="query", key="key")
    assert found == find_heads(bare, query="query", key="key")
    logits = {"attn": jnp.full(2, 400.0)}
    for params in (tree, bare):
        out, _ = clip_attention_logits(params, logits, 100.0, found)
        np.testing.assert_array_equal(jax.tree.leaves(out)[0], ONE / 2)


def test_shapes_are_enough():
    tree = jax.eval_shape(lambda: {"attn": {"query": ONE, "key": ONE}})
    assert find_heads(tree, query="query", key="key") == {
        "attn": Heads(("attn/query",), ("attn/key",))
    }


@pytest.mark.parametrize(
    ("patterns", "match"),
    [
        (
            ("q", "key"),
            r"`query` must be the name .* got 'q' .* paths are \['block_0/at",
        ),
        (("query", "*/keys/*"), r"`key` must be .* got '\*/keys/\*'"),
        (("Query", "key"), "`query` must be"),
        (("*/query/w*", "key"), "`query` must be"),
        (
            ("block_[02]/attn/query/*", "key"),
            "'block_1/attn/key/kernel' with no query under 'block_1/attn'|no query under",
        ),
        (
            ("query", "block_1/*/key/*"),
            "'block_0/attn/query/kernel' with no key under ''",
        ),
    ],
)
def test_queries_without_keys_are_refused(patterns, match):
    tree, *_ = TREES["some of them"]
    with pytest.raises(ValueError, match=match):
        find_heads(tree, query=patterns[0], key=patterns[1])


@pytest.mark.parametrize(
    ("tree", "query", "key"),
    [
        (dict.fromkeys(("q0", "k0", "q1", "k1"), ONE), "q?", "k?"),
        ({"queries": {"0": ONE, "1": ONE}, "keys": {"0": ONE}}, "queries", "keys"),
        ({"q": ONE, "a": {"k": ONE}, "b": {"k": ONE}}, "q", "k"),
    ],
)
def test_several_layers_are_not_taken_for_one(tree, query, key):
    with pytest.raises(
        ValueError, match=r"one kernel .* got \['.*', '.*'\] under 'att"
    ):
        find_heads(tree, query=query, key=key)


def test_many_paths_are_cut_short():
    tree = {f"leaf_{i:02}": np.ones(2) for i in range(13)}
    with pytest.raises(ValueError, match=r"'leaf_09'\] and 3 more"):
        find_heads(tree, query="q", key="k")
    del tree["leaf_11"], tree["leaf_12"]
    with pytest.raises(ValueError, match=r"'leaf_09'\] and 1 more"):
        find_heads(tree, query="q", key="k")
    del tree["leaf_10"]
    with pytest.raises(ValueError, match=r"'leaf_09'\]\.$"):
        find_heads(tree, query="q", key="k")


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"query": 3}, TypeError, "`query` must be a path"),
        ({"key": ("a", 3)}, TypeError, "`key` must be a path"),
        ({"key": ["a"]}, TypeError, r"`key` must be .* got \['a'\] \(list\)"),
        ({"query": ""}, ValueError, "`query` must be a path"),
        ({"query": ()}, ValueError, "`query` must be a path"),
        ({"key": ("a", "")}, ValueError, "`key` must be a path"),
        ({"axis": None}, TypeError, "`axis` must be an int"),
        ({"axis": 1.0}, TypeError, "`axis` must be an int"),
        ({"axis": True}, TypeError, "`axis` must be an int"),
        ({"stacked": "x"}, TypeError, "`stacked` must be an int"),
        ({"stacked": False}, TypeError, "`stacked` must be an int"),
        ({"rope": -1}, ValueError, "`rope` must be an int from 0"),
        ({"rope": None}, TypeError, "`rope` must be an int from 0"),
        ({"head_dim": 0}, ValueError, "`head_dim` must be an int from 1"),
        ({"head_dim": 2.0}, TypeError, "`head_dim` must be an int from 1"),
        ({"head_dim": 4, "rope": 4}, ValueError, "`rope` must be less .* 4, got 4"),
    ],
)
def test_heads_that_cannot_be_are_refused(wrong, error, match):
    with pytest.raises(error, match=match):
        Heads(**({"query": "q", "key": "k"} | wrong))
    if not {"query", "key"} & set(wrong):
        with pytest.raises(error, match=match):
            find_heads({"q": ONE, "k": ONE}, query="q", key="k", **wrong)


def test_they_can_be_compared_and_kept():
    one = Heads("q", ("k", "b"), axis=0, head_dim=4, rope=3, stacked=-1)
    assert one == dataclasses.replace(one)
    assert len({one, dataclasses.replace(one), dataclasses.replace(one, rope=2)}) == 2
    assert one.query_paths == ("q",)
    assert one.key_paths == ("k", "b")
    assert optclip.Heads.__module__ == "optclip"
    assert Heads("q", "k") == Heads(
        "q", "k", axis=-2, rope=0, head_dim=None, stacked=None
    )
