"""Our two layers, compiled once for each shape: the threshold is traced."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional


@functools.cache
def both(name: str, **kwargs: Any) -> Callable[..., tuple[Any, Any]]:
    """`(tree, threshold) ->` what the function gives, what the transformation gives."""

    def run(tree, threshold):
        plain = getattr(functional, name)(tree, threshold, **kwargs)
        clip = getattr(optclip, name)(threshold, **kwargs)
        return plain, clip.update(tree, clip.init(tree))[0]

    return jax.jit(run)


@functools.cache
def values() -> Callable[..., tuple[Any, Any]]:
    """The same for `clip_by_value`, which has two bounds."""

    def run(tree, lower, upper):
        plain = functional.clip_by_value(tree, lower=lower, upper=upper)
        clip = optclip.clip_by_value(lower=lower, upper=upper)
        return plain, clip.update(tree, clip.init(tree))[0]

    return jax.jit(run)


@functools.cache
def function(name: str, **kwargs: Any) -> Callable[..., Any]:
    """A function of the pure layer, compiled."""
    return jax.jit(functools.partial(getattr(functional, name), **kwargs))


@functools.cache
def step(make_clip: Callable[..., Any], make_optimizer: Callable[[], Any]) -> Any:
    """`(init, step)` of a clip in a chain with an optimizer, its threshold traced.

    The state is made once for each shape: none of the optimizers' depends on more.
    """

    def chain(threshold):
        return optax.chain(make_clip(threshold), make_optimizer())

    @functools.cache
    def init(*shapes):
        return chain(1.0).init([jnp.zeros(shape) for shape in shapes])

    def one(params, state, grads, threshold):
        updates, state = chain(threshold).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return init, jax.jit(one)


def train(
    parts: tuple[Any, Any], params: list[Any], grads: list[list[Any]], threshold: float
) -> list[list[Any]]:
    """The parameters after each step."""
    init, advance = parts
    params = [jnp.asarray(p) for p in params]
    state, path = init(*(p.shape for p in params)), []
    for step_grads in grads:
        params, state = advance(params, state, step_grads, threshold)
        path.append(params)
    return path


def rows(values: Any, indices: Any, shape: tuple[int, ...]) -> BCOO:
    """The BCOO matrix of `tf.IndexedSlices(values, indices, shape)`."""
    columns = jnp.asarray(indices, jnp.int32)[:, None]
    return BCOO((jnp.asarray(values), columns), shape=shape)
