"""QK-Clip: the logits of each head shrink by its own coefficient, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import Heads
from optclip.functional import clip_attention_logits

D, N, T = 12, 6, 7
HOT = np.array([50.0, 400.0, 100.0, 900.0])


def rotated(x):
    """Rotary embedding of the last axis, in float64: (T, heads, even) -> the same."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] / 10 ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def logits(query, key, turn=lambda x: x):
    """(heads, T, T) of projected queries (T, H, n) and keys (T, G, n)."""
    q, k = turn(query), turn(key)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return np.einsum("thn,shn->hts", q, k) / np.sqrt(q.shape[-1])


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]


def shrunk(before, after):
    """By what each head's logits were multiplied; they kept their proportions."""
    share = np.linalg.norm(after, axis=(1, 2)) / np.linalg.norm(before, axis=(1, 2))
    np.testing.assert_allclose(
        after, share[:, None, None] * before, atol=2e-6 * np.abs(before).max()
    )
    return share


def gammas(s=HOT, c=100.0):
    return np.minimum(1, c / s)


def attention(groups, bias):
    shapes = [(D, 4, N), (D, groups, N)] + ([(4, N), (groups, N)] if bias else [])
    query, key, *biases = drawn(groups + 10 * bias, *shapes)
    params = {"query": {"kernel": query}, "key": {"kernel": key}, "out": np.ones(3)}
    if bias:
        params["query"]["bias"], params["key"]["bias"] = biases
    return jax.tree.map(jnp.asarray, params)


def projected(params, name, x):
    leaf = jax.tree.map(lambda p: np.asarray(p, np.float64), params[name])
    return np.einsum("td,dhn->thn", x, leaf["kernel"]) + leaf.get("bias", 0.0)


@pytest.mark.parametrize("turn", [lambda x: x, rotated], ids=["plain", "rope"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_logits_of_each_head_shrink_by_its_own_coefficient(groups, bias, turn):
    params = attention(groups, bias)
    layers = optclip.find_heads(params, query="query", key="key")
    x = np.random.default_rng(0).standard_normal((T, D))
    before = logits(*(projected(params, n, x) for n in ("query", "key")), turn)
    clipped, found = jax.jit(lambda p, s: clip_attention_logits(p, s, 100.0, layers))(
        params, {"attention": jnp.asarray(HOT, jnp.float32)}
    )
    after = logits(*(projected(clipped, n, x) for n in ("query", "key")), turn)
    np.testing.assert_allclose(shrunk(before, after), gammas(), rtol=1e-6)
    np.testing.assert_allclose(found["attention"], gammas(), rtol=1e-6)
    np.testing.assert_array_equal(clipped["out"], params["out"])


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_balance_says_what_query_and_key_take(balance):
    params = attention(4, bias=False)
    layers = {"a": Heads("query/kernel", "key/kernel")}
    clipped, _ = clip_attention_logits(
        params, {"a": jnp.asarray(HOT)}, 100.0, layers, balance=balance
    )
    for name, power in (("query", balance), ("key", 1 - balance)):
        share = clipped[name]["kernel"] / params[name]["kernel"]
        np.testing.assert_allclose(share[0, :, 0], gammas() ** power, rtol=1e-6)


def test_by_group_is_the_formula_of_megatron():
    """Megatron: eta the smallest of a group, queries eta^a, keys eta^(1 - a)."""
    params = attention(2, bias=True)
    layers = optclip.find_heads(params, query="query", key="key")
    clipped, found = clip_attention_logits(
        params, {"attention": jnp.asarray(HOT)}, 100.0, layers, balance=0.4,
        by_group=True,
    )  # fmt: skip
    eta = gammas().reshape(2, 2).min(1)
    for kind in ("kernel", "bias"):
        query = clipped["query"][kind] / params["query"][kind]
        key = clipped["key"][kind] / params["key"][kind]
        wide = np.repeat(eta, 2)[:, None] ** 0.4
        np.testing.assert_allclose(query, np.broadcast_to(wide, query.shape), rtol=1e-6)
        wide = eta[:, None] ** 0.6
        np.testing.assert_allclose(key, np.broadcast_to(wide, key.shape), rtol=1e-6)
    np.testing.assert_allclose(found["attention"], np.repeat(eta, 2), rtol=1e-6)


def test_mla_scales_what_is_rotary_by_the_query_and_leaves_values_alone():
    """MaxText: q_nope gamma^a, q_rope gamma, k_nope gamma^(1 - a), values untouched."""
    nope, rope, values = 4, 2, 3
    query, key, shared = drawn(3, (D, 4, nope + rope), (D, 4, nope + values), (D, rope))
    params = {
        "wq_b": {"kernel": jnp.asarray(query)},
        "wkv_b": {"kernel": jnp.asarray(key)},
    }
    layers = {"mla": Heads("wq_b/kernel", "wkv_b/kernel", rope=rope)}
    clipped, _ = clip_attention_logits(
        params, {"mla": jnp.asarray(HOT)}, 100.0, layers, balance=0.3
    )
    x = np.random.default_rng(0).standard_normal((T, D))

    def of(params):
        q = np.einsum("td,dhn->thn", x, np.asarray(params["wq_b"]["kernel"], float))
        k = np.einsum("td,dhn->thn", x, np.asarray(params["wkv_b"]["kernel"], float))
        k_rope = np.repeat(rotated((x @ shared)[:, None]), 4, axis=1)
        q = np.concatenate([q[..., :nope], rotated(q[..., nope:])], -1)
        return logits(q, np.concatenate([k[..., :nope], k_rope], -1))

    np.testing.assert_allclose(shrunk(of(params), of(clipped)), gammas(), rtol=1e-6)
    share = clipped["wq_b"]["kernel"][0] / query[0]
    np.testing.assert_allclose(share[:, 0], gammas() ** 0.3, rtol=1e-6)
    np.testing.assert_allclose(share[:, -1], gammas(), rtol=1e-6)
    moved = clipped["wkv_b"]["kernel"]
    np.testing.assert_array_equal(moved[..., nope:], key[..., nope:])
    np.testing.assert_allclose(
        moved[0, :, 0] / key[0, :, 0], gammas() ** 0.7, rtol=1e-6
    )


@pytest.mark.parametrize("layout", ["haiku", "equinox", "stacked", "stacked flat mla"])
def test_other_layouts_are_the_same_clip(layout):
    rope = 2 if "mla" in layout else 0
    kernel, other = drawn(4, (3, D, 4, N), (3, D, 4 if rope else 2, N))
    s = np.stack([HOT, HOT[::-1], np.full(4, 3.0)]).astype(np.float32)
    plain = {"q": jnp.asarray(kernel), "k": jnp.asarray(other)}
    want, _ = clip_attention_logits(
        plain, {"a": jnp.asarray(s)}, 100.0,
        {"a": Heads("q", "k", stacked=0, rope=rope)},
    )  # fmt: skip

    def placed(x):
        flat = x.reshape(*x.shape[:2], -1)
        if layout == "haiku":
            return {str(i): flat[i] for i in range(3)}
        if layout == "equinox":
            return {str(i): flat[i].T for i in range(3)}
        return jnp.moveaxis(flat if "flat" in layout else x, 0, 1)

    params = {name: placed(x) for name, x in plain.items()}
    if layout in ("haiku", "equinox"):
        axis = -1 if layout == "haiku" else 0
        layers = {
            f"a{i}": Heads(f"q/{i}", f"k/{i}", axis=axis, head_dim=N) for i in range(3)
        }
        given = {f"a{i}": jnp.asarray(s[i]) for i in range(3)}
    else:
        flat = {"axis": -1, "head_dim": N} if "flat" in layout else {}
        layers = {"a": Heads("q", "k", stacked=1, rope=rope, **flat)}
        given = {"a": jnp.asarray(s)}
    got, _ = clip_attention_logits(params, given, 100.0, layers)
    for name, x in want.items():
        expected = placed(x)
        jax.tree.map(np.testing.assert_array_equal, got[name], expected)
        assert not np.array_equal(x, plain[name])


@pytest.mark.parametrize("bad", [0.0, -3.0, -np.inf, np.nan, np.inf])
def test_a_logit_that_says_nothing_leaves_its_weights_to_the_bit(bad):
    params = attention(4, bias=True)
    layers = optclip.find_heads(params, query="query", key="key")
    s = jnp.asarray([bad, 400.0, 100.0, bad], jnp.float32)
    clipped, found = clip_attention_logits(params, {"attention": s}, 100.0, layers)
    np.testing.assert_array_equal(found["attention"], [1, 0.25, 1, 1])
    for name in ("query", "key"):
        for kind in ("kernel", "bias"):
            got, was = clipped[name][kind], params[name][kind]
            np.testing.assert_array_equal(
                got[..., [0, 2, 3], :], was[..., [0, 2, 3], :]
            )
            assert not np.array_equal(got[..., 1, :], was[..., 1, :])


def test_narrow_weights_are_multiplied_in_float32_and_rounded_once():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), attention(2, bias=True))
    layers = optclip.find_heads(params, query="query", key="key")
    clipped, _ = clip_attention_logits(
        params, {"attention": jnp.asarray(HOT)}, 100.0, layers
    )
    kappa = np.sqrt(gammas().reshape(2, 2).min(1))
    for name, factor in (("query", gammas() / np.repeat(kappa, 2)), ("key", kappa)):
        for kind, x in params[name].items():
            exact = np.asarray(x, np.float64) * factor[:, None]
            got = np.asarray(clipped[name][kind], np.float64)
            assert clipped[name][kind].dtype == jnp.bfloat16
            assert np.all(np.abs(got - exact) <= 2.0**-8 * np.abs(exact))


def test_thresholds_may_differ_by_layer_and_head_and_be_traced():
    kernel, other = drawn(5, (D, 4, N), (D, 4, N))
    params = {n: {"q": jnp.asarray(kernel), "k": jnp.asarray(other)} for n in "abc"}
    layers = {n: Heads(f"{n}/q", f"{n}/k") for n in "abc"}
    s = {n: jnp.asarray(HOT) for n in "abc"}

    @jax.jit
    def run(c):
        limits = {"a": c, "b": jnp.asarray([10.0, 1e3, 1e3, 90.0]), "c": None}
        return clip_attention_logits(params, s, limits, layers)[1]

    found = run(200.0)
    np.testing.assert_allclose(found["a"], gammas(c=200.0), rtol=1e-6)
    np.testing.assert_allclose(found["b"], [0.2, 1, 1, 0.1], rtol=1e-6)
    np.testing.assert_array_equal(found["c"], np.ones(4))


def test_whole_numbers_are_logits_too():
    params = attention(4, bias=False)
    layers = optclip.find_heads(params, query="query", key="key")
    s = {"attention": jnp.asarray(HOT, jnp.int32)}
    found = clip_attention_logits(params, s, 100.0, layers)[1]["attention"]
    np.testing.assert_allclose(found, gammas(), rtol=1e-6)


def test_a_threshold_of_zero_leaves_no_logit_and_no_nan():
    params = attention(2, bias=False)
    layers = optclip.find_heads(params, query="query", key="key")
    clipped, found = clip_attention_logits(
        params, {"attention": jnp.asarray(HOT)}, 0.0, layers
    )
    np.testing.assert_array_equal(found["attention"], np.zeros(4))
    np.testing.assert_array_equal(clipped["query"]["kernel"], np.zeros((D, 4, N)))
    assert np.all(np.isfinite(clipped["key"]["kernel"]))


REFUSED = {
    "not a dict": ({"layers": []}, TypeError, "must be a dict from the name"),
    "no layers": ({"layers": {}}, ValueError, "must be a dict from the name"),
    "name": ({"layers": {1: Heads("q", "k")}}, TypeError, "must be a string"),
    "no heads": ({"layers": {"a": ("q", "k")}}, TypeError, "must be an optclip.Heads"),
    "path": ({"layers": {"a": Heads("qq", "k")}}, ValueError, "Near it there are"),
    "twice": ({"layers": {"a": Heads("q", "q")}}, ValueError, "name each leaf once"),
    "int": ({"layers": {"a": Heads("i", "k")}}, ValueError, "floating-point dtype"),
    "axis": ({"layers": {"a": Heads("q", "k", axis=5)}}, ValueError, "must be an axis"),
    "stack": (
        {"layers": {"a": Heads("q", "k", stacked=1)}}, ValueError, "another axis",
    ),
    "flat": (
        {"layers": {"a": Heads("q", "k", axis=0, head_dim=5)}}, ValueError, "times 5",
    ),
    "heads": (
        {"layers": {"a": Heads(("q", "five"), "k")}}, ValueError, "one number of heads",
    ),
    "groups": ({"layers": {"a": Heads("q", "five")}}, ValueError, "must divide"),
    "rope": ({"layers": {"a": Heads("q", "k", rope=6)}}, ValueError, "at least 7"),
    "narrow": (
        {"layers": {"a": Heads("q", "narrow", rope=1)}}, ValueError, "at least 5",
    ),
    "logits": ({"max_logits": [1.0]}, TypeError, "largest logit of each head"),
    "other name": ({"max_logits": {"b": HOT}}, ValueError, "must have the names"),
    "words": ({"max_logits": {"a": "hot"}}, TypeError, "array of real numbers"),
    "few": ({"max_logits": {"a": HOT[:2]}}, ValueError, "must have the shape (4,)"),
    "threshold": ({"max_logit": -1.0}, ValueError, "max_logit"),
    "none": ({"max_logit": None}, TypeError, "max_logit"),
    "balance": ({"balance": 2.0}, ValueError, "balance"),
    "by_group": ({"by_group": "yes"}, TypeError, "by_group"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_what_to_do(case):
    given, error, words = REFUSED[case]
    leaves = {"q": (D, 4, N), "k": (D, 4, N), "five": (D, 5, N), "narrow": (D, 4, 2)}
    params = {name: jnp.ones(shape) for name, shape in leaves.items()}
    params["i"] = jnp.ones((D, 4, N), int)
    call = {
        "max_logits": {"a": jnp.asarray(HOT)}, "max_logit": 100.0,
        "layers": {"a": Heads("q", "k")},
    }  # fmt: skip
    with pytest.raises(error) as caught:
        clip_attention_logits(params, **(call | given))
    assert words in str(caught.value)


def test_stacked_layers_say_how_many_logits_there_are():
    params = {"q": jnp.ones((3, D, 4, N)), "k": jnp.ones((3, D, 4, N))}
    layers = {"a": Heads("q", "k", stacked=0)}
    with pytest.raises(ValueError, match=r"\(3, 4\) of layers and query heads"):
        clip_attention_logits(params, {"a": jnp.ones(4)}, 100.0, layers)


@pytest.mark.parametrize(
    "norm", ["q_norm", "queryNorm", "query_ln", "key_layernorm", "qk_norm", "norm_k"]
)
@pytest.mark.parametrize("deep", [False, True])
def test_a_layer_that_normalizes_queries_or_keys_is_refused_by_name(norm, deep):
    leaf = {"kernel": jnp.ones((D, 4, N))} if deep else jnp.ones((D, 4, N))
    attn = {"query": leaf, "key": leaf, norm: {"scale": jnp.ones(N)}}
    tail = "/kernel" if deep else ""
    layers = {"a": Heads(f"attn/query{tail}", f"attn/key{tail}")}
    with pytest.raises(ValueError, match=f"attn/{norm}/scale"):
        clip_attention_logits({"attn": attn}, {"a": jnp.asarray(HOT)}, 100.0, layers)


def test_norms_elsewhere_or_of_a_latent_are_no_reason_to_refuse():
    attn = {"wq_b": jnp.ones((D, 4, N)), "wkv_b": jnp.ones((D, 4, N))}
    attn |= {"q_norm": jnp.ones(3), "kv_norm": jnp.ones(3)}
    params = {"attn": attn, "mlp": {"k_norm": jnp.ones(3)}}
    layers = {"a": Heads("attn/wq_b", "attn/wkv_b", rope=2)}
    s = {"a": jnp.asarray(HOT)}
    clip_attention_logits(params, s, 100.0, layers)
    attn["key_norm"] = jnp.ones(3)
    with pytest.raises(ValueError, match="attn/key_norm"):
        clip_attention_logits(params, s, 100.0, layers)


def test_derivatives_are_those_of_a_constant_factor():
    params = attention(2, bias=False)
    layers = optclip.find_heads(params, query="query", key="key")

    def total(p):
        clipped, _ = clip_attention_logits(
            p, {"attention": jnp.asarray(HOT)}, 100.0, layers
        )
        return jnp.sum(clipped["query"]["kernel"])

    kappa = np.repeat(np.sqrt(gammas().reshape(2, 2).min(1)), 2)
    got = jax.grad(total)(params)["query"]["kernel"][0, :, 0]
    np.testing.assert_allclose(got, gammas() / kappa, rtol=1e-6)
