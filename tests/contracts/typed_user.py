"""A user's code with types, which pyright reads in CI.

`assert_type` holds what an editor would show; a wrong type here fails the build.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import optclip
from optclip import functional, recipes, responses, scopes, thresholds

Params = dict[str, jax.Array]


class Halved:
    """Implement a rule without inheriting."""

    def init(self, norm: jax.Array) -> jax.Array:
        return jnp.zeros_like(norm)

    def update(
        self, seen: thresholds.Seen, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return 0.5 * jnp.maximum(seen.norm, memory), jnp.maximum(seen.norm, memory)


class Gentle:
    """Implement a response with different argument names."""

    def coefficient(self, n: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.minimum(1.0, c / n)


def halfway(norm: jax.Array, threshold: jax.Array) -> jax.Array:
    """Implement a response as a function."""
    return jnp.where(norm > threshold, 0.5, jnp.ones_like(norm))


def make_optimizer(rate: float) -> optax.GradientTransformation:
    rule: thresholds.Rule = Halved()
    clip = optclip.clip_by(rule, norm="rms", response=halfway, name="halved")
    assert_type(clip, optax.GradientTransformationExtraArgs)
    by_recipe = recipes.zclip(z=3.0, response=Gentle(), nonfinite="zero")
    assert_type(by_recipe, optax.GradientTransformationExtraArgs)
    scope: scopes.Scope = optclip.groups(optclip.by_path(str))
    response: responses.Response = responses.band(0.5)
    by_leaf = optclip.clip_by(1.0, over=scope, response=response, name="leaves")
    inner = optax.chain(by_recipe, clip, by_leaf, optax.sgd(rate))
    return optclip.skip(inner, max_norm=thresholds.quantile(0.9, 16), max_consecutive=3)


def step(
    tx: optax.GradientTransformation, grads: Params, state: optax.OptState
) -> tuple[optax.Updates, optax.OptState, dict[str, jax.Array]]:
    clipped, norm = functional.clip_by_global_norm(grads, 5.0, strict=True)
    assert_type(norm, jax.Array)
    updates, state = tx.update(clipped, state)
    return updates, state, optclip.metrics(state)


def read(history: list[dict[str, jax.Array]]) -> str:
    suggestion = optclip.suggest([float(each["skip/norm"]) for each in history])
    assert_type(suggestion.max_norm, float)
    summary = optclip.summary(history[-1])
    assert_type(summary, str)
    return summary
