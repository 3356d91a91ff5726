"""Scale attention heads whose largest logit exceeds a threshold (QK-Clip)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .._arrays import _leaves, _placement, _validate
from .._arrays._types import Number, PyTree
from .._clip import decide, layout_of, scale
from . import _attention_layers, _qk_scaling
from ._heads import Heads


def clip_attention_logits(
    params: PyTree,
    logits: Mapping[str, jax.Array],
    max_logit: Number | Mapping[str, Number | None],
    layers: Mapping[str, Heads],
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Scale query and key heads whose logits exceed `max_logit` (QK-Clip).

    A query head with largest logit S has the coefficient
    `gamma = min(1, max_logit / S)`. A key head is multiplied by
    `k = min(gamma ** 0.5)` over its query heads, and each of these by `gamma / k`, so
    that its logits shrink by gamma. Call this function on the parameters after each
    optimizer step.

    Omit layers that normalize queries or keys (QK-norm) after the projection: scaling
    their weights does not change their logits.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> from optclip.functional import clip_attention_logits
      >>> params = {"query": jnp.ones((3, 2, 4)), "key": jnp.ones((3, 2, 4))}
      >>> layers = {"attn": optclip.Heads("query", "key")}
      >>> logits = {"attn": jnp.array([50.0, 400.0])}
      >>> params, scaled = clip_attention_logits(params, logits, 100.0, layers)
      >>> print(scaled["attn"], params["query"][0, :, 0], params["key"][0, :, 0])
      [1.   0.25] [1.  0.5] [1.  0.5]

    Args:
      params: Pytree of arrays with the leaves that `layers` names.
      logits: Largest logit of each query head since the last call: a dict of arrays by
        layer, from `max_attention_logit`.
      max_logit: Threshold: a number, an array that broadcasts to the heads, or a dict
        of these by layer with None for unclipped. The paper uses 100.
      layers: Dict of `optclip.Heads` by layer name, from `optclip.find_heads`.

    Returns:
      The parameters, and a dict by layer of the coefficient of each query head.

    Raises:
      ValueError: `layers` does not match `params` or `logits`.

    Inside `jax.shard_map`, the maximum of the logits is taken over mesh axes that they
    vary over and the query does not. Reduce them yourself if types do not specify these
    axes (`check_vma=False`, `jax.pmap`), or if the query is split over the data axis
    but not by head.

    Guarantees:
      Heads within the threshold are bit-identical unless a head of their group is
      clipped. A head is unclipped unless its largest logit is finite and positive.

    See Also:
      `optclip.clip_attention_logits`, the optax transformation.

    References:
      Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, arXiv:2507.20534, Alg. 1.
    """
    _validate.threshold_given("max_logit", max_logit)
    for value in jax.tree.leaves(max_logit):
        _validate.number("max_logit", value)
    flat = _leaves.flatten(params)
    located = _attention_layers.layers_in(params, layers)
    largest = _qk_scaling.logits_of(located, logits, flat.leaves)
    layout = layout_of(_qk_scaling.CLIP, largest)
    measured = _qk_scaling.CLIP.norm.measure(layout.blocks)
    limits = {"max_logit": layout.fill("max_logit", max_logit)}
    decision = decide(_qk_scaling.CLIP, layout, measured, limits)
    coefficients = layout.tree(_qk_scaling.head_coefficients(decision).entries())
    leaves = list(flat.leaves)
    for layer in located:
        factors = _qk_scaling.factors(layer, coefficients[layer.name], flat.leaves)
        for i, factor in factors.items():
            leaves[i] = _placement.computed(
                lambda x, factor: scale(x, factor, x), jnp.asarray(leaves[i]), factor
            )
    return flat.rebuild(leaves), coefficients
