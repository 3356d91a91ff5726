"""A user's code with types: pyright reads it in CI, and it runs.

`assert_type` holds what an editor would show; a wrong type here fails the build.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax

import optclip
from optclip import functional, recipes, responses, scopes, thresholds

Params = dict[str, jax.Array]


class Train(NamedTuple):
    params: Params
    opt_state: optax.OptState


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


def loss(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def step(
    tx: optax.GradientTransformation, train: Train, x: jax.Array
) -> tuple[Train, dict[str, jax.Array]]:
    grads: Params = jax.grad(loss)(train.params, x)
    clipped, norm = functional.clip_by_global_norm(grads, 5.0, strict=True)
    assert_type(norm, jax.Array)
    updates, opt_state = tx.update(clipped, train.opt_state, train.params)
    params: Any = optax.apply_updates(train.params, updates)
    return Train(params, opt_state), optclip.metrics(opt_state)


def main() -> str:
    tx = make_optimizer(0.1)
    params = {"w": jnp.ones((4, 1)), "b": jnp.ones(1)}
    train = Train(params, tx.init(params))
    jitted: Callable[..., tuple[Train, dict[str, jax.Array]]] = jax.jit(
        step, static_argnums=0
    )
    history: list[dict[str, jax.Array]] = []
    for i in range(20):
        train, found = jitted(tx, train, jax.random.normal(jax.random.key(i), (8, 4)))
        history.append(found)
    suggestion = optclip.suggest([float(each["skip/norm"]) for each in history])
    assert_type(suggestion.max_norm, float)
    summary = optclip.summary(train.opt_state)
    assert_type(summary, str)
    return summary
