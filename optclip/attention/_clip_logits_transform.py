"""QK-Clip as the last transformation of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optclip._arrays import _leaves, _validate
from optclip._arrays._types import Leaf, Number, PyTree
from optclip._clip import scale
from optclip.attention import _attention_layers, _qk_scaling
from optclip.attention._heads import Heads
from optclip.thresholds._interface import Named
from optclip.transforms._interface import (
    Engine,
    check_record,
    is_placeholder,
    lifted,
    rules_of,
)
from optclip.typing import ClipState, Record, ThresholdTree


def clip_attention_logits(
    max_logit: ThresholdTree,
    layers: Mapping[str, Heads],
    *,
    balance: Number = 0.5,
    by_group: bool = False,
    record: Record = True,
    name: str = "attention",
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip: updates after which no attention logit was above `max_logit`.

    .. math:: \gamma_h = \min(1, max\_logit / S_h), \quad
              k_g = \min_{h \in g} \gamma_h^{1 - balance}, \quad
              W_k^g \leftarrow k_g W_k^g, \quad
              W_q^h \leftarrow \frac{\gamma_h}{k_g} W_q^h

    It goes last in the chain, for it scales parameters after the step: what it returns
    is the difference to the clipped new parameters, in the dtype of the updates. A
    learning rate behind it would multiply that difference. bfloat16 updates round it: a
    head clipped from 10,000 to 100 is then off by 2 %. `optax.MultiSteps` passes on the
    logits of the last microbatch alone: give that the maximum since the last step.

    `update` is given the largest logits, as in
    `tx.update(grads, state, params, max_logits=logits)`, a dict from the name of each
    layer to one for each query head; `optax.chain` passes it on. Inside `shard_map`
    they are reduced over the mesh axes that the query does not vary over.
    Reduce them before where types do not say that (`check_vma=False`, `pmap`), and
    where the query is split over the mesh axis of the data, but not by head.

    Args:
      max_logit: the largest logit that is let through, S being what there was: a
        number, an array that broadcasts to the heads, an optax schedule, a rule, or a
        dict of these by layer, None for unclipped. The paper has 100. Weights that 0
        clips to zero stay there.
      layers: a dict from the name of each layer to its `optclip.Heads`; see
        `optclip.find_heads`.
      balance: what the query takes of each coefficient, as a power from 0 to 1; the key
        takes the rest.
      by_group: whether all query heads that share a key head are scaled like the one
        with the largest logit (Megatron's form), and not each by its own coefficient.
      record: whether the state keeps, of each layer, the largest logit, the threshold,
        the smallest coefficient and what was clipped, for `optclip.metrics`;
        `"leaves"` is the same. False keeps nothing.
      name: what `optclip.metrics` calls this clip; its keys begin with the name.

    Returns:
      A transformation. Updates of heads that are not clipped are kept to the bit; heads
      whose largest logit is 0, negative, NaN or infinite are not clipped, and counted.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: at `init` and `update`, a leaf is not there, is named twice or does
        not have such heads; a layer normalizes its queries or keys, so that the size of
        its weights does not matter; `update` lacks the parameters or the logits.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> params = {"query": jnp.ones((3, 2, 4)), "key": jnp.ones((3, 2, 4))}
      >>> layers = optclip.find_heads(params, query="query", key="key")
      >>> tx = optax.chain(optax.sgd(0.0), optclip.clip_attention_logits(100.0, layers))
      >>> logits = {"attention": jnp.array([50.0, 400.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=logits)
      >>> print(optax.apply_updates(params, updates)["query"][0, :, 0])
      [1.  0.5]
      >>> print(optclip.metrics(state)["attention/coefficient/attention"])
      0.25

    Source: Kimi K2, arXiv 2507.20534 (2025), Algorithm 1.
    """
    _validate.fraction("balance", balance)
    _validate.flag("by_group", by_group)
    _attention_layers.check_layers(layers)
    check_record(record, name)
    rules = rules_of(Named("max_logit", max_logit), _qk_scaling.CLIP)
    engine = Engine(_qk_scaling.CLIP, rules, "leaves" if record else False, name)

    def init_fn(params: PyTree) -> ClipState:
        if is_placeholder(params):
            return engine.init(params)
        located = _attention_layers.layers_in(params, layers)
        return engine.init({f.name: jnp.zeros(f.logits, jnp.float32) for f in located})

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        max_logits: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, ClipState]:
        if params is None:
            wanted = "the parameters, which it scales"
            advice = "Give them: tx.update(updates, state, params, max_logits=...)."
            raise ValueError(_validate.must_be("params", wanted, None, advice))
        located = _attention_layers.layers_in(params, layers)
        flat = _leaves.flatten(params)
        logits = _qk_scaling.logits_of(located, max_logits, flat.leaves)
        step = engine.decide(logits, state, params, extra_args)
        scaled = _qk_scaling.head_coefficients(step.decision)
        layout = step.decision.layout
        by_layer = layout.tree(scaled.entries())
        factors: dict[int, jax.Array] = {}
        for layer in located:
            by_layer[layer.name], layer_factors = _qk_scaling.factors(
                layer, by_layer[layer.name], balance, flat.leaves, by_group=by_group
            )
            factors |= layer_factors
        clipped = _clipped(updates, flat, factors)
        if not record:
            return clipped, engine.after(state, step, None)
        # The largest of those that are of use.
        shown = step.decision.norms.map(lambda s: jnp.where(jnp.isfinite(s), s, 0))
        scaled = scaled.with_entries(layout.entries(by_layer))
        new = engine.recorded(step, scaled, shown=shown)
        return clipped, engine.after(state, step, new)

    return lifted(engine, init_fn, update_fn)


def _clipped(
    updates: PyTree, params: _leaves.Flat, factors: dict[int, jax.Array]
) -> PyTree:
    """The updates with which parameters come to be the new ones times the factors."""
    flat = _leaves.flatten(updates)
    index = {name: i for i, name in enumerate(_leaves.names_of(flat.paths))}
    names, leaves = _leaves.names_of(params.paths), list(flat.leaves)
    for i, factor in factors.items():
        if names[i] not in index:
            raise ValueError(
                f"`updates` must have the leaf '{names[i]}' that `layers` names, got"
                f" {sorted(index)[:5]}. Leave such layers out under optax.masked."
            )
        at = index[names[i]]
        leaves[at] = _difference(leaves[at], params.leaves[i], factor)
    return flat.rebuild(leaves)


def _difference(update: Leaf, param: Leaf, factor: jax.Array) -> jax.Array:
    u, p = jnp.asarray(update), jnp.asarray(param)
    wide = _leaves.widen(p) + _leaves.widen(u)
    new = scale(wide, factor, wide)
    difference = _leaves.narrow(new - _leaves.widen(p), u)
    # A factor of 1 returns the update itself: adding and subtracting the parameter
    # would round it.
    return jnp.where(factor == 1, u, difference)
