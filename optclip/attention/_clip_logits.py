"""QK-Clip as a pure function: attention heads whose largest logit is too large."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _validate
from optclip._arrays._types import Number, PyTree
from optclip._clip import decide, fixed, layout_of, scale
from optclip.attention import _attention_layers, _qk_scaling
from optclip.attention._heads import Heads


def clip_attention_logits(
    params: PyTree,
    max_logits: Mapping[str, jax.Array],
    max_logit: Number | Mapping[str, Number | None],
    layers: Mapping[str, Heads],
    *,
    balance: Number = 0.5,
    by_group: bool = False,
) -> tuple[PyTree, dict[str, jax.Array]]:
    r"""QK-Clip: scale query and key heads whose logits exceed `max_logit`.

    .. math:: \gamma_h = \min(1, max\_logit / S_h), \quad
              k_g = \min_{h \in g} \gamma_h^{1 - balance}, \quad
              W_k^g \leftarrow k_g W_k^g, \quad
              W_q^h \leftarrow \frac{\gamma_h}{k_g} W_q^h

    The logits of each head shrink by exactly its own coefficient. With one key head for
    each query head the query takes gamma to the power of `balance` and the key the
    rest. Call it on the parameters after each optimizer step.

    Args:
      params: any pytree of arrays that has the leaves which `layers` names.
      max_logits: a dict from the name of each layer to its largest scaled logits, S,
        one for each query head, as `max_attention_logit` returns them: over the batch,
        all positions, and all steps since the last clip, by `jnp.maximum`.
      max_logit: the largest logit that is let through: a number, an array that
        broadcasts to the heads, or a dict of these by layer, None for unclipped. The
        paper has 100.
      layers: a dict from the name of each layer to its `optclip.Heads`; see
        `optclip.find_heads`.
      balance: what the query takes of each coefficient, as a power from 0 to 1; the key
        takes the rest.
      by_group: whether all query heads that share a key head are scaled like the one
        with the largest logit (Megatron's form), and not each by its own coefficient.

    Returns:
      The parameters, and a dict of what the logits of each query head were multiplied
      by.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: a leaf is not there, is named twice or does not have such heads;
        names or numbers of heads differ; a layer normalizes its queries or keys, so
        that the size of its weights does not matter; or a number is out of range.

    ======================== ========================================================
    largest logit of a head  its weights
    ======================== ========================================================
    at most `max_logit`      the same bits, unless another head of its group is clipped
    0, negative, -inf        the same: they say nothing of the size of weights
    NaN or inf               the same: it is not known how much is too much
    ======================== ========================================================

    Inside `shard_map`, logits that vary over mesh axes which the query does not vary
    over are first reduced over these by their maximum. Reduce them before where types
    do not say that (`check_vma=False`, `pmap`), and where the query is split over the
    mesh axis of the data, but not by head.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> from optclip.functional import clip_attention_logits
      >>> params = {"query": jnp.ones((3, 2, 4)), "key": jnp.ones((3, 2, 4))}
      >>> layers = {"attn": optclip.Heads("query", "key")}
      >>> logits = {"attn": jnp.array([50.0, 400.0])}
      >>> params, scaled = clip_attention_logits(params, logits, 100.0, layers)
      >>> print(scaled["attn"], params["query"][0, :, 0], params["key"][0, :, 0])
      [1.   0.25] [1.  0.5] [1.  0.5]

    Source: Kimi K2, arXiv 2507.20534 (2025), Algorithm 1.
    """
    _validate.fraction("balance", balance)
    _validate.flag("by_group", by_group)
    _validate.not_none("max_logit", max_logit)
    for value in jax.tree.leaves(max_logit):
        _validate.number("max_logit", value)
    flat = _leaves.flatten(params)
    located = _attention_layers.layers_in(params, layers)
    logits = _qk_scaling.logits_of(located, max_logits, flat.leaves)
    layout = layout_of(_qk_scaling.CLIP, logits)
    decision = decide(_qk_scaling.CLIP, layout, fixed("max_logit", max_logit))
    scaled = layout.tree(_qk_scaling.head_coefficients(decision).entries())
    leaves, coefficients = list(flat.leaves), {}
    for layer in located:
        coefficients[layer.name], by_leaf = _qk_scaling.factors(
            layer, scaled[layer.name], balance, flat.leaves, by_group=by_group
        )
        for i, factor in by_leaf.items():
            x = jnp.asarray(leaves[i])
            leaves[i] = scale(x, factor, x)
    return flat.rebuild(leaves), coefficients
