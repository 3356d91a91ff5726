"""Test `Heads`, and `find_heads` by the names of many libraries."""

import collections

import jax
import numpy as np
import pytest

from optclip import Heads, find_heads
from optclip.functional import clip_attention_logits
from tests.support import helpers

ONE = np.ones((3, 2, 4), np.float32)
KERNEL = {"kernel": ONE}
BIASED = KERNEL | {"bias": np.ones((2, 4), np.float32)}


def attention(module, names=("query", "key", "value")):
    return dict.fromkeys(names, module)


# The path of a parameter that Flax NNX boxes ends with `/value` too.
Boxed = collections.namedtuple("Boxed", "value")
EQUINOX = {"weight": np.ones((8, 3), np.float32), "bias": np.ones(8, np.float32)}
HAIKU = {"w": np.ones((3, 8), np.float32), "b": np.ones(8, np.float32)}
MAXTEXT = {"kernel": np.ones((3, 5, 2, 4), np.float32)}
PROJECTIONS = ("query_proj", "key_proj", "value_proj")
NAMES = {"query": "query", "key": "key"}
LINEN = {"MultiHeadDotProductAttention_0": attention(BIASED)}
# The tree, the arguments of `find_heads`, and the paths of each layer, where {} stands
# for the name of the projection.
LIBRARIES = {
    "nnx": (
        {"blocks": {0: {"attn": attention({"kernel": Boxed(ONE)})}}},
        NAMES,
        {"blocks/0/attn": ("blocks/0/attn/{}/kernel",)},
    ),
    "linen": (
        {"params": {"block_0": LINEN, "block_1": LINEN}},
        {"query": "*/query/kernel", "key": "*/key/kernel"},
        {
            f"params/block_{i}/MultiHeadDotProductAttention_0": (
                f"params/block_{i}/MultiHeadDotProductAttention_0/{{}}/kernel",
            )
            for i in range(2)
        },
    ),
    "equinox": (
        {"layers": [{"attn": attention(EQUINOX, PROJECTIONS)}] * 2},
        {"query": "query_proj", "key": "key_proj", "axis": 0, "head_dim": 4},
        {
            f"layers/{i}/attn": (
                f"layers/{i}/attn/{{}}/bias",
                f"layers/{i}/attn/{{}}/weight",
            )
            for i in range(2)
        },
    ),
    "haiku": (
        {f"net/attn/{k}": HAIKU for k in ("query", "key", "value")},
        NAMES | {"axis": -1, "head_dim": 4},
        {"net/attn": ("net/attn/{}/b", "net/attn/{}/w")},
    ),
    "maxtext": (
        {"decoder": {"attn": attention(MAXTEXT), "norm": {"scale": np.ones(3)}}},
        NAMES | {"stacked": 1},
        {"decoder/attn": ("decoder/attn/{}/kernel",)},
    ),
    "a leaf each": (
        [{"wq": ONE, "wk": ONE, "wv": ONE}, {"wq": ONE, "wk": ONE}],
        {"query": "wq", "key": "wk"},
        {"0": ("0/{}",), "1": ("1/{}",)},
    ),
    "at the root": (attention(KERNEL), NAMES, {"attention": ("{}/kernel",)}),
    "two in a block": (
        {"self": attention(BIASED), "cross": attention(BIASED)},
        NAMES,
        {
            "cross": ("cross/{}/bias", "cross/{}/kernel"),
            "self": ("self/{}/bias", "self/{}/kernel"),
        },
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_find_heads_finds_layers_that_are_clipped(library):
    tree, options, layers = LIBRARIES[library]
    query, key = (options[k].removeprefix("*/").removesuffix("/kernel") for k in NAMES)
    layout = {k: v for k, v in options.items() if k not in NAMES}
    found = find_heads(jax.eval_shape(lambda: tree), **options)
    assert list(found) == list(layers)
    for name, paths in layers.items():
        sides = [tuple(path.format(side) for path in paths) for side in (query, key)]
        assert found[name] == Heads(*sides, **layout)
    shape = (5, 2) if library == "maxtext" else (2,)
    logits = {name: np.full(shape, 400.0, np.float32) for name in layers}
    clip = helpers.quick_jit(
        lambda tree: clip_attention_logits(tree, logits, 100.0, found)[0]
    )
    named = {path for h in found.values() for path in (*h.query, *h.key)}
    for path, x in jax.tree.leaves_with_path(clip(tree)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_named = name.removesuffix("/value") in named
        np.testing.assert_array_equal(x, np.full(np.shape(x), 0.5 if is_named else 1))


BLOCKS = {f"block_{i}": {"attn": attention(KERNEL)} for i in range(3)}


SEVERAL = r"one kernel .* got \['.*', '.*'\] under 'att"


@pytest.mark.parametrize(
    ("tree", "query", "key", "match"),
    [
        (BLOCKS, "q", "key", r"`query` must be the name .* got 'q' .*\['block_0/att"),
        (BLOCKS, "query", "*/keys/*", r"`key` must be .* got '\*/keys/\*'"),
        (BLOCKS, "Query", "key", "`query` must be"),
        (BLOCKS, "*/query/w*", "key", "`query` must be"),
        (BLOCKS, "block_[02]/attn/query/*", "key", "/key/kernel' with no query under"),
        (BLOCKS, "query", "block_1/*/key/*", "/query/kernel' with no key under ''"),
        # Several kernels in a layer.
        (dict.fromkeys(("q0", "k0", "q1", "k1"), ONE), "q?", "k?", SEVERAL),
        ({"qs": {"0": ONE, "1": ONE}, "ks": {"0": ONE}}, "qs", "ks", SEVERAL),
        ({"q": ONE, "a": {"k": ONE}, "b": {"k": ONE}}, "q", "k", SEVERAL),
        # The error lists ten paths.
        *(
            ({f"leaf_{i:02}": ONE for i in range(n)}, "q", "k", f"'leaf_09'{end}")
            for n, end in (
                (13, r"\] and 3 more"),
                (11, r"\] and 1 more"),
                (10, r"\]\.$"),
            )
        ),
    ],
)
def test_find_heads_unmatched_or_ambiguous_paths_raise(tree, query, key, match):
    with pytest.raises(ValueError, match=match):
        find_heads(tree, query=query, key=key)
