"""Scale attention heads after each step, as the last transformation of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaves, _placement, _validate
from .._arrays._numerics import applied, update_to
from .._arrays._types import Held, LeafLike, PyTree
from .._clip import scale
from .._thresholds import Named
from .._transforms import (
    Engine,
    check_record,
    is_placeholder,
    rules_of,
    with_optional_state,
)
from .._typing import ClipState, Record, ThresholdTree
from . import _attention_layers, _qk_scaling
from ._heads import Heads


def clip_attention_logits(
    max_logit: ThresholdTree,
    layers: Mapping[str, Heads],
    *,
    record: Record = True,
    name: str = "attention",
) -> optax.GradientTransformationExtraArgs:
    """Scale query and key heads whose logits exceed `max_logit` (QK-Clip).

    A query head with largest logit S has the coefficient
    `gamma = min(1, max_logit / S)`. In the new parameters, a key head is multiplied by
    `k = min(gamma ** 0.5)` over its query heads, and each of these by `gamma / k`.

    Omit layers that normalize queries or keys (QK-norm) after the projection: scaling
    their weights does not change their logits.

    Place it last in the chain, because a later learning rate would rescale its updates.
    In bfloat16 these updates are rounded: a head clipped from 10,000 to 100 is off by
    2%. `optax.MultiSteps` passes only the logits of the last microbatch; pass the
    maximum since the last step. `optclip.functional.clip_attention_logits` explains the
    use inside `jax.shard_map`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> params = {"query": jnp.ones((3, 2, 4)), "key": jnp.ones((3, 2, 4))}
      >>> layers = optclip.find_heads(params, query="query", key="key")
      >>> tx = optax.chain(optax.sgd(0.0), optclip.clip_attention_logits(100.0, layers))
      >>> logits = {"attention": jnp.array([50.0, 400.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, logits=logits)
      >>> print(optax.apply_updates(params, updates)["query"][0, :, 0])
      [1.  0.5]
      >>> print(optclip.metrics(state)["attention/coefficient/attention"])
      0.25

    Args:
      max_logit: Threshold: a number, array that broadcasts to the heads, optax
        schedule, `optclip.thresholds` rule, or dict of these by layer with None for
        unclipped. The paper uses 100.
      layers: Dict of `optclip.Heads` by layer name, from `optclip.find_heads`.
      record: Whether to record each step, with one entry per layer.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation whose `update` requires `params` and `logits`, a dict of
      arrays by layer with the largest logit of each query head, as
      `optclip.functional.max_attention_logit` returns.

    Raises:
      TypeError: `update` lacks `logits`.
      ValueError: `update` lacks `params`, or `layers` does not match the parameters or
        `logits`.

    Guarantees:
      Updates of unclipped heads are bit-identical unless a head of their group is
      clipped. A head is unclipped, and counts as non-finite, unless its largest logit
      is finite and positive.

    References:
      Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, arXiv:2507.20534, Alg. 1.
    """
    _attention_layers.check_layers(layers)
    check_record(record, name)
    rules = rules_of(Named("max_logit", max_logit), _qk_scaling.CLIP)
    engine = Engine(_qk_scaling.CLIP, rules, "leaves" if record else False, name)
    held = Held(layers)

    def init_fn(params: PyTree) -> ClipState:
        if is_placeholder(params):
            return engine.init(params)
        located = _attention_layers.layers_in(params, held.value)
        return engine.init({f.name: jnp.zeros(f.logits, jnp.float32) for f in located})

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        logits: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, ClipState]:
        _validate.params_given(
            params, "which clip_attention_logits scales", ", logits=..."
        )
        located = _attention_layers.layers_in(params, held.value)
        flat = _leaves.flatten(params)
        largest = _qk_scaling.logits_of(located, logits, flat.leaves)
        decision = engine.decide(largest, state, params, extra_args)
        scaled = _qk_scaling.head_coefficients(decision)
        by_layer = decision.layout.tree(scaled.entries())
        factors: dict[int, jax.Array] = {}
        for layer in located:
            factors |= _qk_scaling.factors(layer, by_layer[layer.name], flat.leaves)
        clipped = _clipped(updates, flat, factors)
        if not record:
            return clipped, engine.after(state, decision, None)
        # Unusable logits are inf, and the record shows the largest of the others.
        finite = decision.norms.map(lambda s: jnp.where(jnp.isfinite(s), s, 0))
        new = engine.recorded(decision, scaled, recorded_norms=finite)
        return clipped, engine.after(state, decision, new)

    return with_optional_state(engine, init_fn, update_fn)


def _clipped(
    updates: PyTree, params: _leaves.Flat, factors: dict[int, jax.Array]
) -> PyTree:
    """Return the updates that lead to the scaled new parameters."""
    flat = _leaves.flatten(updates)
    index = {name: i for i, name in enumerate(_leaves.names_of(flat.paths))}
    names, leaves = _leaves.names_of(params.paths), list(flat.leaves)
    for i, factor in factors.items():
        if names[i] not in index:
            raise ValueError(
                f"`updates` lacks the leaf '{names[i]}' that `layers` names, got"
                f" {sorted(index)[:5]}. Inside optax.masked, remove such layers from"
                " `layers`."
            )
        at = index[names[i]]
        leaves[at] = _placement.computed(
            _difference, leaves[at], params.leaves[i], factor
        )
    return flat.rebuild(leaves)


def _difference(update: LeafLike, param: LeafLike, factor: jax.Array) -> jax.Array:
    """Return the update that leads to `factor * (param + update)`."""
    u, p = jnp.asarray(update), jnp.asarray(param)
    wide = applied(p, u)
    # A factor of 1 returns the update itself: adding and subtracting the parameter
    # would round it.
    return jnp.where(factor == 1, u, update_to(scale(wide, factor, wide), p, u))
