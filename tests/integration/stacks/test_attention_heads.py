"""Find and clip attention heads of Flax, Equinox and Haiku layers."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optclip
from tests.integration.stacks import page

HEADS, WIDTH, MODEL = 4, 3, 12
X = np.random.default_rng(0).normal(size=(7, MODEL)).astype(np.float32)
# Clips one head to a quarter and one to a half.
LARGEST = jnp.array([50.0, 400.0, 100.0, 200.0])
GAMMA = np.array([1, 0.25, 1, 0.5])


def flax_nnx():
    model = nnx.MultiHeadAttention(HEADS, MODEL, decode=False, rngs=nnx.Rngs(0))
    params = nnx.state({"attn": model}, nnx.Param)
    return params, {"query": "query", "key": "key"}, _flax_projections


def flax_linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(HEADS, name="attn")(x)

    params = Model().init(jax.random.key(0), X)["params"]
    return params, {"query": "query", "key": "key"}, _flax_projections


def _flax_projections(params):
    def project(p):
        return jnp.einsum("td,dhn->thn", X, p["kernel"]) + p["bias"]

    attn = nnx.as_pure(params)["attn"]
    return project(attn["query"]), project(attn["key"])


def equinox():
    kwargs = {"use_query_bias": True, "key": jax.random.key(0)}
    params = {"attn": eqx.nn.MultiheadAttention(HEADS, MODEL, **kwargs)}
    names = {"query": "query_proj", "key": "key_proj", "axis": 0, "head_dim": WIDTH}

    def projections(params):
        attn = params["attn"]
        projected = (jax.vmap(p)(X) for p in (attn.query_proj, attn.key_proj))
        return [x.reshape(-1, HEADS, WIDTH) for x in projected]

    return eqx.filter(params, eqx.is_array), names, projections


def haiku():
    def forward(x):
        make = hk.initializers.VarianceScaling()
        return hk.MultiHeadAttention(HEADS, WIDTH, w_init=make, name="attn")(x, x, x)

    params = hk.transform(forward).init(jax.random.key(0), X)
    names = {"query": "query", "key": "key", "axis": -1, "head_dim": WIDTH}

    def projections(params):
        projected = (params[f"attn/{k}"] for k in ("query", "key"))
        projected = [X @ p["w"] + p["b"] for p in projected]
        return [x.reshape(-1, HEADS, WIDTH) for x in projected]

    return params, names, projections


@pytest.mark.parametrize("library", [flax_nnx, flax_linen, equinox, haiku])
def test_clip_attention_logits_scales_logits_of_each_head(library):
    params, names, projections = library()
    layers = optclip.find_heads(params, **names)
    assert list(layers) == ["attn"]

    def logits(params):
        query, key = (np.float64(x) for x in projections(params))
        return np.einsum("thn,shn->hts", query, key)

    largest = {"attn": LARGEST}
    clip = optclip.functional.clip_attention_logits
    clipped, found = clip(params, largest, 100.0, layers)
    np.testing.assert_array_equal(found["attn"], GAMMA)
    wanted = GAMMA[:, None, None] * logits(params)
    np.testing.assert_allclose(logits(clipped), wanted, rtol=1e-5, atol=1e-6)


def test_page_clips_largest_logit_of_nnx_attention():
    # Steps change the model in place.
    names = page.run("QK-Clip with `nnx.MultiHeadAttention`")
    assert names["losses"][-1] < names["losses"][0] / 2
    x, attn = names["x"], names["model"].attn
    # `attn.query` and `attn.key` return the heads of each position.
    query, key = (np.float64(project(x)) for project in (attn.query, attn.key))
    logits = np.einsum("bthn,bshn->bhts", query, key) / np.sqrt(query.shape[-1])
    largest = logits[..., np.tri(logits.shape[-1], dtype=bool)].max()
    assert largest > 10
    _, logged = names["step"](
        names["model"], names["optimizer"], names["x"], names["y"]
    )
    np.testing.assert_allclose(logged["attention/norm/attn"], largest, rtol=1e-5)
    np.testing.assert_allclose(
        logged["attention/coefficient/attn"], 10 / largest, rtol=1e-5
    )
