"""QK-Clip: each head's logits shrink by its own coefficient, and nothing else moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip.functional import clip_attention_logits
from tests.support import attention, helpers
from tests.support.attention import KINDS, LAYOUTS, ROTARY, WIDTH, Model

# Above 100, at it, below it; of one group of GQA all three.
LARGEST = np.array([150.0, 100.0, 20.0, 400.0, 3000.0, 50.0], np.float32)


def named(x):
    return x.id


def clip(model, largest, params=None, **how):
    params = model.params() if params is None else params
    largest = largest[None] if model.layout.stacks else largest
    out, found = clip_attention_logits(
        params, {"attn": largest}, how.pop("max_logit", 100.0), model.layers(), **how
    )
    return params, out, np.asarray(found["attn"]).reshape(-1)


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_logits_shrink_by_the_coefficient_of_their_head(layout, kind, balance):
    model = Model(layout, kind)
    largest = LARGEST[: kind.heads]
    params, out, found = clip(model, largest, balance=balance)
    gamma = attention.coefficients(largest, 100.0)
    np.testing.assert_allclose(found, gamma, rtol=1e-6)
    wanted = gamma[:, None, None] * model.logits(params)
    error = np.abs(model.logits(out) - wanted).max((1, 2))
    assert np.all(error <= 1e-6 * np.abs(wanted).max((1, 2)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_the_balance_is_the_power_of_the_query(layout):
    model = Model(layout, KINDS[0])
    params, out, _ = clip(model, LARGEST[:4], balance=0.3)
    before, after = model.parts(params), model.parts(out)
    gamma = attention.coefficients(LARGEST[:4], 100.0)[:, None]
    for name, x in before["query"].items():
        np.testing.assert_allclose(after["query"][name], x * gamma**0.3, rtol=1e-6)
    for name, x in before["key"].items():
        np.testing.assert_allclose(after["key"][name], x * gamma**0.7, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=named)
def test_by_group_is_megatron(layout):
    """`megatron/core/transformer/attention.py`, in NumPy."""
    model = Model(layout, KINDS[1])
    params, out, found = clip(model, LARGEST, by_group=True, balance=0.3)
    before, after = model.parts(params), model.parts(out)
    eta = np.minimum(100 / LARGEST.astype(np.float64), 1).reshape(2, 3).min(1)
    np.testing.assert_allclose(found, np.repeat(eta, 3), rtol=1e-6)
    for name, x in before["query"].items():
        wanted = x * np.repeat(eta, 3)[:, None] ** 0.3
        np.testing.assert_allclose(after["query"][name], wanted, rtol=1e-6)
    for name, x in before["key"].items():
        wanted = x * eta[:, None] ** 0.7
        np.testing.assert_allclose(after["key"][name], wanted, rtol=1e-6)


def test_mla_is_maxtext():
    """`maxtext/utils/qk_clip_utils.py`, in NumPy: half each, the rotary part whole."""
    model = Model(LAYOUTS[0], KINDS[3])
    params, out, _ = clip(model, LARGEST[:4])
    before, after = model.parts(params), model.parts(out)
    gamma = np.minimum(100 / LARGEST[:4].astype(np.float64), 1)[:, None]
    width = WIDTH - ROTARY
    for name, x in before["query"].items():
        wanted = np.concatenate(
            [x[..., :width] * np.sqrt(gamma), x[..., width:] * gamma], -1
        )
        np.testing.assert_allclose(after["query"][name], wanted, rtol=1e-6)
    for name, x in before["key"].items():
        np.testing.assert_allclose(
            after["key"][name][..., :width], x[..., :width] * np.sqrt(gamma), rtol=1e-6
        )
        # The values behind it.
        np.testing.assert_array_equal(after["key"][name][..., width:], x[..., width:])
    np.testing.assert_array_equal(out["shared"], params["shared"])


@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_bfloat16_is_rounded_once(kind):
    model = Model(LAYOUTS[0], kind)
    largest = LARGEST[: kind.heads]
    params = model.params(jnp.bfloat16)
    _, out, _ = clip(model, largest, params)
    wide = jax.tree.map(lambda x: x.astype(np.float32), params)
    _, exact, _ = clip(model, largest, wide)
    for x, y in zip(*map(jax.tree.leaves, (out, exact)), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, jnp.asarray(y).astype(jnp.bfloat16))


BAD = [0.0, -0.0, -3.0, -np.inf, np.inf, np.nan]


@pytest.mark.parametrize("max_logit", [100.0, 0.0])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS[:1] + KINDS[3:], ids=named)
def test_logits_of_no_use_leave_weights_alone(kind, bad, max_logit, run):
    """The published code has NaN of a negative one, and zeros of -inf."""
    model = Model(LAYOUTS[0], kind)
    largest = np.array([bad, 150.0, bad, 20.0], np.float32)
    params = model.params()

    def clipped(logits):
        layers = model.layers()
        return clip_attention_logits(params, {"attn": logits}, max_logit, layers)

    out, found = run(clipped)(largest)
    np.testing.assert_array_equal(found["attn"][np.array([0, 2])], 1)
    for name, before in model.parts(params).items():
        for leaf, x in before.items():
            after = model.parts(out)[name][leaf]
            np.testing.assert_array_equal(after[..., [0, 2], :], x[..., [0, 2], :])
            assert np.all(np.isfinite(after))
            assert np.any(after[..., 1, :] != x[..., 1, :])


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_what_is_at_or_below_keeps_its_bits(layout, kind):
    model = Model(layout, kind)
    params = model.params()
    largest = np.full(kind.heads, 100.0, np.float32)
    largest[0] = 300.0
    # Subnormals, which a product with 1 would flush.
    params = jax.tree.map(lambda x: np.where(x > 1, np.float32(1e-41), x), params)
    _, out, _ = clip(model, largest, params)
    ways = kind.heads // kind.groups
    for name, kept in (("query", ways), ("key", 1)):
        for leaf, x in model.parts(params)[name].items():
            after = model.parts(out)[name][leaf]
            np.testing.assert_array_equal(after[..., kept:, :], x[..., kept:, :])
    _, out, _ = clip(model, np.full(kind.heads, 100.0, np.float32), params)
    assert not helpers.differs(out, params)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("max_logit", [0.0, 1e-30, 1e-12])
def test_tiny_coefficients_stay_in_range(max_logit, balance, by_group):
    """One head of a group at 0 is no reason for others to be infinite."""
    model = Model(LAYOUTS[0], KINDS[1])
    largest = np.array([1e20, -1.0, 1e-13, 1e20, 1e10, 1.0], np.float32)
    params, out, found = clip(
        model, largest, max_logit=max_logit, balance=balance, by_group=by_group
    )
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(out))
    before, after = model.logits(params), model.logits(out)
    wanted = found.astype(np.float64)[:, None, None] * before
    # What is smaller a float32 flushes, in weights or in the coefficient.
    np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-25)
    if not by_group:
        assert found[1] == 1
        assert found[2] == (1 if max_logit >= 1e-13 else 0)


def test_thresholds_by_layer_and_by_head():
    model = Model(LAYOUTS[0], KINDS[0])
    _, _, found = clip(model, LARGEST[:4], max_logit={"attn": 10.0})
    gamma = attention.coefficients(LARGEST[:4], 10.0)
    np.testing.assert_allclose(found, gamma, rtol=1e-6)
    by_head = np.array([1.0, np.inf, 10.0, 100.0], np.float32)
    _, _, found = clip(model, LARGEST[:4], max_logit=by_head)
    gamma = attention.coefficients(LARGEST[:4], by_head)
    np.testing.assert_allclose(found, gamma, rtol=1e-6)
    params, out, found = clip(model, LARGEST[:4], max_logit={"attn": None})
    assert not helpers.differs(out, params)
    np.testing.assert_array_equal(found, 1)


def test_a_traced_threshold_that_is_nan_leaves_weights_alone():
    model = Model(LAYOUTS[0], KINDS[0])
    params, logits = model.params(), {"attn": LARGEST[:4]}

    @jax.jit
    def traced(limit):
        return clip_attention_logits(params, logits, limit, model.layers())

    out, found = traced(np.nan)
    assert not helpers.differs(out, params)
    np.testing.assert_array_equal(found["attn"], 1)


def test_layers_of_a_stack_are_clipped_each_by_its_own():
    params = {k: np.ones((3, 2, 4, 5), np.float32) for k in ("q", "k")}
    layers = {"all": optclip.Heads("q", "k", stacked=1)}
    largest = np.array([[50.0, 100, 200, 400], [1600, 1, 1, 1]], np.float32)
    out, found = clip_attention_logits(params, {"all": largest}, 100.0, layers)
    gamma = attention.coefficients(largest, 100.0)
    np.testing.assert_allclose(found["all"], gamma)
    for x in out.values():
        wanted = np.broadcast_to(np.sqrt(gamma)[None, :, :, None], x.shape)
        np.testing.assert_allclose(x, wanted, rtol=1e-6)


@pytest.mark.parametrize(("stacked", "axis"), [(0, -1), (1, -1), (2, 1)])
def test_stacks_may_have_heads_and_features_in_one(stacked, axis):
    gamma = np.array([[1, 0.25], [0.04, 1], [1, 1]])
    whole = np.repeat(np.sqrt(gamma), 5, 1)
    x = np.moveaxis(np.ones((3, 7, 10), np.float32), 0, stacked)
    layers = {"all": optclip.Heads("q", "k", axis=axis, head_dim=5, stacked=stacked)}
    logits = {"all": 100 / gamma}
    out, _ = clip_attention_logits({"q": x, "k": x}, logits, 100.0, layers)
    for x in out.values():
        back = np.moveaxis(np.asarray(x), stacked, 0)
        wanted = np.broadcast_to(whole[:, None], back.shape)
        np.testing.assert_allclose(back, wanted, rtol=1e-6)


@pytest.mark.parametrize("stacked", [-1, 1, 2])
def test_the_stack_may_be_behind_the_heads(stacked):
    gamma = np.array([[1, 0.25], [0.04, 1], [1, 1]])
    # (heads, n) with the layers put in.
    put = [a for a in range(3) if a != stacked % 3]
    x = np.moveaxis(np.ones((3, 2, 5), np.float32), [0, 1, 2], [stacked % 3, *put])
    layers = {"all": optclip.Heads("q", "k", axis=0, stacked=stacked)}
    logits = {"all": 100 / gamma}
    out, _ = clip_attention_logits({"q": x, "k": x}, logits, 100.0, layers)
    back = np.moveaxis(np.asarray(out["q"]), [stacked % 3, *put], [0, 1, 2])
    wanted = np.broadcast_to(np.sqrt(gamma)[..., None], back.shape)
    np.testing.assert_allclose(back, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "query", "key"),
    [
        ({"axis": -1, "head_dim": 6}, (3, 12), (3, 14)),
        ({"axis": 0, "head_dim": 6}, (12, 3), (14, 3)),
        ({}, (3, 2, 6), (3, 2, 7)),
        ({"axis": 0}, (2, 6), (2, 7)),
    ],
)
def test_latent_attention_in_every_layout(options, query, key):
    """The last 2 of 6 are rotary; of the 7 entries of a key the last 3 are values."""
    layers = {"mla": optclip.Heads("q", "kv", rope=2, **options)}
    params = {"q": np.ones(query, np.float32), "kv": np.ones(key, np.float32)}
    largest = {"mla": np.array([400.0, 50.0], np.float32)}
    out, _ = clip_attention_logits(params, largest, 100.0, layers)
    axis = options.get("axis", -2)
    split = "head_dim" in options

    def first_head(x):
        x = np.moveaxis(np.asarray(x), axis, 0) if split or axis == 0 else x[0]
        x = x.reshape(2, x.shape[0] // 2, -1)[..., 0] if split else np.asarray(x)
        return x

    np.testing.assert_allclose(first_head(out["q"]), [[0.5] * 4 + [0.25] * 2, [1] * 6])
    np.testing.assert_allclose(first_head(out["kv"]), [[0.5] * 4 + [1] * 3, [1] * 7])


def test_dtypes_structure_and_weak_types_stay():
    weak = jnp.full((2, 3), 2.0) * 1
    params = {"q": jnp.ones((2, 3), jnp.float16), "k": [weak, None], "step": 3}
    layers = {"a": optclip.Heads("q", "k/0")}
    logits = {"a": [400, 50]}
    with pytest.raises(TypeError, match="`max_logits` at 'a' must be"):
        clip_attention_logits(params, logits, 100.0, layers)
    out, found = clip_attention_logits(params, {"a": np.array([400, 50])}, 100, layers)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert out["q"].dtype == jnp.float16
    assert found["a"].dtype == jnp.float32
    assert out["step"] == 3
    np.testing.assert_allclose(out["q"], [[0.5] * 3, [1] * 3])


def test_doubles_are_clipped_in_double_precision():
    with jax.enable_x64(True):
        model = Model(LAYOUTS[0], KINDS[1])
        params = model.params(np.float64)
        _, out, _ = clip(model, LARGEST.astype(np.float64), params)
        gamma = attention.coefficients(LARGEST, 100.0)[:, None, None]
        before, after = model.logits(params), model.logits(out)
        np.testing.assert_allclose(after, gamma * before, rtol=1e-11, atol=1e-12)


def test_it_traces_once_and_batches():
    model = Model(LAYOUTS[0], KINDS[1])
    traced = []

    @jax.jit
    def step(params, logits, limit):
        traced.append(None)
        return clip_attention_logits(params, logits, limit, model.layers())

    for k in range(3):
        out, _ = step(model.params(), {"attn": k * LARGEST}, 100.0 - k)
    assert len(traced) == 1
    both = np.stack([LARGEST, 2 * LARGEST])
    batched = jax.vmap(lambda s: step(model.params(), {"attn": s}, 98.0)[0])(both)
    for x, y in zip(*map(jax.tree.leaves, (batched, out)), strict=True):
        np.testing.assert_allclose(x[1], y, rtol=1e-6)


def test_derivatives_are_finite():
    model = Model(LAYOUTS[0], KINDS[1])
    largest = np.array([150.0, np.nan, -1.0, np.inf, 3000.0, 50.0], np.float32)

    def loss(params, limit):
        out, _ = clip_attention_logits(params, {"attn": largest}, limit, model.layers())
        return sum(jnp.sum(x) for x in jax.tree.leaves(out))

    for limit in (100.0, 0.0):
        found = jax.grad(loss, (0, 1))(model.params(), limit)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found))


def test_debug_nans_finds_nothing():
    model = Model(LAYOUTS[0], KINDS[0])
    with jax.debug_nans(True):
        clip(model, np.array([150.0, -np.inf, -1.0, np.inf], np.float32))


TREE = {
    "attn": {
        "q": np.ones((3, 4, 2)),
        "q2": np.ones((4, 2)),
        "k": np.ones((3, 4, 2)),
        "one": np.ones(()),
    },
    "ints": np.ones((4, 2), int),
    "flat": np.ones((3, 8)),
    "odd": np.ones((3, 3, 2)),
    "odd2": np.ones((3, 2)),
    "none": np.ones((3, 0, 2)),
    "narrow": np.ones((3, 4, 1)),
}
Q, K = "attn/q", "attn/k"


FLAT = {"axis": 1, "rope": 1, "head_dim": 2}


@pytest.mark.parametrize(
    ("heads", "match"),
    [
        ((Q, "attn/kk"), "at 'a' must name leaves .* got 'attn/kk'. Near .*'attn/k'"),
        (("zzzzzz", K), r"got 'zzzzzz'. Near it there are \['attn/k', 'attn/one'"),
        (
            (Q, Q),
            "name each leaf once, got 'attn/q' in 'a' and 'a'. .*keep them in two",
        ),
        ((Q, "ints"), "'ints' that `layers` names must be a dense array .* got int"),
        (
            (Q, "attn/one"),
            r"`axis` must be an axis of 'attn/one' of shape \(\), got -2",
        ),
        ((Q, "odd"), "must divide its query heads, got 3 in 'odd' and 4 in 'attn/q'"),
        (((Q, "attn/q2"), ("odd", "odd2")), "got 3 in 'odd' and 4 in 'attn/q'"),
        ((Q, "none"), "got 0 in 'none' and 4 in"),
        (("none", "odd"), "got 3 in 'odd' and 0 in 'none'"),
        (("none", "odd", FLAT), "got 1 in 'odd' and 0 in 'none'"),
        ((Q, "none", FLAT), "got 0 in 'none' and 2 in 'attn/q'"),
        (
            ((Q, "odd"), K),
            "one number of heads .* got 3 and 1 in 'odd', not 4 as 'attn/q'",
        ),
        ((Q, (K, "odd")), "got 3 and 1 in 'odd', not 4 as 'attn/k' and 1 as 'attn/q'"),
    ],
)
def test_leaves_that_do_not_fit_are_refused(heads, match):
    with pytest.raises(ValueError, match=match):
        clip_attention_logits(
            TREE,
            {"a": np.ones(4)},
            1.0,
            {"a": optclip.Heads(*heads[:2], **dict(*heads[2:]))},
        )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"axis": 3},
            r"`axis` must be an axis of 'attn/q' of shape \(3, 4, 2\), got 3",
        ),
        ({"axis": -4}, "`axis` must be an axis of 'attn/q'"),
        ({"stacked": 3}, "`stacked` must be an axis of 'attn/q'"),
        ({"stacked": 1}, "`stacked` must be another axis than that of heads, got 1"),
        ({"stacked": 2, "rope": 1}, "`stacked` must be another axis .* got 2"),
        (
            {"head_dim": 3},
            "axis 1 of 'attn/q' must have a multiple of 3 entries.* got 4",
        ),
        ({"rope": 2}, "'attn/q' must have at least 3 entries.* 2 of the 2 .* got 2"),
        ({"axis": -1, "rope": 1}, "'attn/q' must have at least 2 entries.* got 0"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(options, match):
    layers = {"a": optclip.Heads(Q, K, **options)}
    with pytest.raises(ValueError, match=match):
        clip_attention_logits(TREE, {"a": np.ones(4)}, 1.0, layers)


def test_a_key_narrower_than_what_is_not_rotary_is_refused():
    layers = {"a": optclip.Heads("wide", "narrow", rope=1)}
    tree = TREE | {"wide": np.ones((3, 4, 3))}
    match = "'narrow' must have at least 2 entries, since 1 of the 3 .* got 1"
    with pytest.raises(ValueError, match=match):
        clip_attention_logits(tree, {"a": np.ones(4)}, 1.0, layers)


def test_stacks_of_two_heights_are_refused():
    tree = {"q": np.ones((2, 4, 3)), "k": np.ones((5, 4, 3))}
    layers = {"a": optclip.Heads("q", "k", stacked=0)}
    match = "got 4 and 5 in 'k', not 4 as 'k' and 2 as 'q' has"
    with pytest.raises(ValueError, match=match):
        clip_attention_logits(tree, {"a": np.ones((2, 4))}, 1.0, layers)


@pytest.mark.parametrize(
    ("logits", "error", "match"),
    [
        ({}, ValueError, r"must have the names of `layers`, \['a'\], got \[\]"),
        ({"a": np.ones(4), "b": 1}, ValueError, r"got \['a', 'b'\]"),
        (
            {"a": np.ones(3)},
            ValueError,
            r"shape \(4,\) of query heads that 'attn/q' has, got \(3,\)",
        ),
        ({"a": np.ones((1, 4))}, ValueError, r"got \(1, 4\)"),
        ({"a": 1j * np.ones(4)}, TypeError, "an array of real numbers"),
        ({"a": "x"}, TypeError, r"got 'x' \(str\)"),
        (np.ones(4), TypeError, "`max_logits` must be a dict .*max_attention_logit"),
    ],
)
def test_logits_that_do_not_fit_are_refused(logits, error, match):
    layers = {"a": optclip.Heads((Q, "attn/q2"), K)}
    with pytest.raises(error, match=match):
        clip_attention_logits(TREE, logits, 1.0, layers)


def test_both_numbers_of_a_stack_are_said():
    tree = {k: np.ones((3, 2, 4, 5)) for k in "qk"}
    layers = {"a": optclip.Heads("q", "k", stacked=1)}
    with pytest.raises(ValueError, match=r"\(2, 4\) of layers and query heads"):
        clip_attention_logits(tree, {"a": np.ones(4)}, 1.0, layers)


def test_a_key_leaf_with_values_too_is_refused_unless_rope_says_so():
    tree = {"q": np.ones((3, 2, 6)), "kv": np.ones((3, 2, 9))}
    with pytest.raises(ValueError, match=r"'a' must be of one size.*rope="):
        clip_attention_logits(
            tree, {"a": np.ones(2)}, 1.0, {"a": optclip.Heads("q", "kv")}
        )
    # The axis behind that of heads counts inputs here, of which a key may have others.
    tree = {"q": np.ones((2, 3, 6)), "k": np.ones((2, 5, 6))}
    layers = {"a": optclip.Heads("q", "k", axis=0)}
    found, _ = clip_attention_logits(tree, {"a": np.full(2, 4.0)}, 1.0, layers)
    np.testing.assert_array_equal(found["k"], tree["k"] / 2)


NORMS = [
    "q_norm", "query_norm", "q_ln", "query_ln", "q_layernorm", "qk_norm", "k_norm",
    "key_norm", "key_ln", "queryNorm", "QNorm", "key_layer_norm", "q_rms_norm",
    "KeyNorm_0", "norm_q", "query_norm_1", "_query_norm", "queries_norm", "query_rms",
    "k_l2norm", "query_normalization", "attn_q_norm", "normk", "q_norm_scale",
]  # fmt: skip
OTHERS = ["norm", "kv_norm", "q_a_layernorm", "pre_norm", "LayerNorm_0", "knorms", "ln"]


@pytest.mark.parametrize("norm", NORMS)
def test_layers_with_normalized_queries_are_refused(norm):
    at = {"kernel": np.ones((3, 2, 4))}
    for attn, q in (
        ({"query": at, "key": at, norm: {"scale": np.ones(4)}}, "attn/{}/kernel"),
        ({"query": at["kernel"], "key": at["kernel"], norm: np.ones(4)}, "attn/{}"),
    ):
        layers = {"a": optclip.Heads(q.format("query"), q.format("key"))}
        with pytest.raises(ValueError, match=f"'a' .* the norm 'attn/{norm}.*Leave"):
            clip_attention_logits({"attn": attn}, {"a": np.ones(2)}, 1.0, layers)
    # At the root, and in a dict with slashes in its keys, as in Haiku.
    flat = {"query": at, "key": at, norm: {"scale": np.ones(4)}}
    layers = {"a": optclip.Heads("query/kernel", "key/kernel")}
    with pytest.raises(ValueError, match=f"the norm '{norm}/scale'"):
        clip_attention_logits(flat, {"a": np.ones(2)}, 1.0, layers)
    flat = {"net/query": at, "net/key": at, f"net/{norm}": {"scale": np.ones(4)}}
    layers = {"a": optclip.Heads("net/query/kernel", "net/key/kernel")}
    with pytest.raises(ValueError, match=f"the norm 'net/{norm}/scale'"):
        clip_attention_logits(flat, {"a": np.ones(2)}, 1.0, layers)


def test_a_norm_beside_a_deep_leaf_is_found():
    attn = {"wq": np.ones((3, 2, 4)), "wk": np.ones((3, 2, 4)), "q_norm": np.ones(4)}
    layers = {"a": optclip.Heads("net/0/attn/wq", "net/0/attn/wk")}
    with pytest.raises(ValueError, match="the norm 'net/0/attn/q_norm'"):
        clip_attention_logits({"net": [{"attn": attn}]}, {"a": np.ones(2)}, 1.0, layers)


@pytest.mark.parametrize(("path", "near"), [("attn/q", "attn/q"), ("zzz", "")])
def test_five_paths_are_said_to_be_near(path, near):
    tree = {f"attn/q{i}": np.ones((4, 2)) for i in range(7)}
    layers = {"a": optclip.Heads(path, "attn/q0")}
    with pytest.raises(ValueError, match="Near it") as caught:
        clip_attention_logits(tree, {"a": np.ones(4)}, 1.0, layers)
    assert str(caught.value).count("'attn/q") == 5 + bool(near)


@pytest.mark.parametrize("norm", OTHERS)
def test_other_norms_are_no_reason(norm):
    at = {"kernel": np.ones((3, 2, 4))}
    tree = {
        "attn": {"query": at, "key": at, norm: {"scale": np.ones(4)}},
        # Of another layer, and within other modules.
        "attn_2": {"q_norm": np.ones(4), "mlp": {"q_norm": np.ones(4)}},
        "attn_3": {"deep": {"query": {"q_norm": np.ones(4)}}},
    }
    layers = {"a": optclip.Heads("attn/query/kernel", "attn/key/kernel")}
    clip_attention_logits(tree, {"a": np.ones(2)}, 1.0, layers)


@pytest.mark.parametrize("norm", ["q_norm", "kv_norm", "q_a_layernorm", "query_norm"])
def test_latents_may_be_normalized(norm):
    at = np.ones((3, 2, 4))
    tree = {"attn": {"query": at, "key": at, norm: np.ones(4)}}
    layers = {"a": optclip.Heads("attn/query", "attn/key", rope=2)}
    clip_attention_logits(tree, {"a": np.ones(2)}, 1.0, layers)
    for bad in ("k_norm", "key_norm", "key_ln", "qk_norm", "norm_k"):
        with pytest.raises(ValueError, match="must not normalize"):
            clip_attention_logits(
                {"attn": tree["attn"] | {bad: np.ones(4)}},
                {"a": np.ones(2)}, 1.0, layers,
            )  # fmt: skip


def test_a_kind_that_is_wrong_is_refused():
    heads = optclip.Heads(Q, K)
    logits = {"a": np.ones(4)}
    for layers, error, match in (
        ([heads], TypeError, "`layers` must be a dict .*find_heads"),
        ({}, ValueError, "`layers` must be a dict"),
        ({1: heads}, TypeError, "A name in `layers` must be a string, got 1"),
        ({"a": (Q, K)}, TypeError, "`layers` at 'a' must be an optclip.Heads, got"),
    ):
        with pytest.raises(error, match=match):
            clip_attention_logits(TREE, logits, 1.0, layers)
    for how, error in (
        ({"balance": 1.5}, ValueError),
        ({"balance": "x"}, TypeError),
        ({"by_group": 1}, TypeError),
        ({"max_logit": -1.0}, ValueError),
        ({"max_logit": None}, TypeError),
        ({"max_logit": {"b": 1.0}}, ValueError),
        ({"max_logit": np.ones(3)}, ValueError),
    ):
        arguments = {"max_logit": 1.0} | how
        (name,) = how
        with pytest.raises(error, match=f"`{name}`"):
            clip_attention_logits(TREE, logits, layers={"a": heads}, **arguments)


def test_a_group_of_the_kinds_here_has_a_healthy_head():
    """Or the tests above would not tell the exact form from Megatron's."""
    kind = KINDS[1]
    grouped = LARGEST.reshape(kind.groups, -1)
    assert np.all((grouped <= 100).any(1) & (grouped > 100).any(1))
