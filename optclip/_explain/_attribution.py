"""Compute the gradient of the mean loss, and what each loss contributes to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves
from .._arrays._types import PyTree
from .._per_example import norms
from ._step import Step

Method = Literal["derivative", "norms"]

# JAX raises these when a `custom_vjp` or a kernel lacks forward mode. Reverse mode has
# run before, so the loss itself is sound.
_UNSUPPORTED = (TypeError, ValueError, NotImplementedError, AssertionError)


def gradient(step: Step) -> tuple[np.ndarray, list[jax.Array]]:
    """Return the losses, and the gradient of their mean in float32 or wider."""
    number = int(np.prod(step.shape))

    @jax.jit
    def of_part(
        leaves: list[jax.Array], args: tuple[PyTree, ...]
    ) -> tuple[list[jax.Array], jax.Array]:
        def total(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            losses = step.of(leaves, args)
            return jnp.sum(_leaves.widen(losses)), losses

        grads, losses = jax.grad(total, has_aux=True)(leaves)
        return [_leaves.widen(g) / number for g in grads], losses

    parts = step.microbatches()
    grads, values = of_part(step.leaves, next(parts))
    losses = [np.asarray(values, np.float64)]
    for args in parts:
        part, values = of_part(step.leaves, args)
        grads = list(map(jnp.add, grads, part))
        losses.append(np.asarray(values, np.float64))
    return _joined(losses, step), grads


def contributions(
    step: Step, grads: list[jax.Array]
) -> tuple[np.ndarray | None, Method]:
    """Return the fraction of the gradient that each loss contributes, and the method.

    The derivative of a loss along the gradient g is <g_i, g>, and these sum to |g|^2
    times the number of losses. The fractions are negative for losses that oppose it.
    Without derivatives, they are those of the squared gradient norms of the examples.
    The buffers of the gradient are reused.
    """
    direction = _scaled(grads)
    for along in (_forward, _transposed):
        found = _fractions(step, jax.jit(functools.partial(along, step)), direction)
        if found is not None:
            return found, "derivative"
    if not step.can_be_split():
        return None, "norms"
    squares = example_norms(step) ** 2
    total = np.sum(squares)
    return (squares / total if 0 < total < np.inf else None), "norms"


def example_norms(step: Step) -> np.ndarray:
    """Return the gradient norm of the mean loss of each example."""

    def loss(leaves: list[jax.Array], *example: PyTree) -> jax.Array:
        batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), example)
        return jnp.mean(_leaves.widen(step.of(leaves, batch)))

    places = tuple(range(1, len(step.args) + 1))
    # One at a time: a gradient per example would multiply the memory.
    measure = norms(loss, batch_argnums=places, microbatch_size=1)
    return np.asarray(jax.jit(measure)(step.leaves, *step.args)[1], np.float64)


def _fractions(
    step: Step, along: Callable[..., jax.Array], direction: list[jax.Array]
) -> np.ndarray | None:
    """Return the fractions of the derivatives, or None where JAX has none."""
    try:
        parts = [
            np.asarray(along(direction, args), np.float64)
            for args in step.microbatches()
        ]
    except _UNSUPPORTED:
        return None
    derivatives = _joined(parts, step)
    total = np.sum(derivatives)
    # In narrow dtypes the direction is rounded, so |g|^2 is not the exact sum.
    return derivatives / total if 0 < total < np.inf else None


def _forward(
    step: Step, direction: list[jax.Array], args: tuple[PyTree, ...]
) -> jax.Array:
    primals = step.leaves
    tangents = [x.astype(p.dtype) for x, p in zip(direction, primals, strict=True)]
    return jax.jvp(lambda leaves: step.of(leaves, args), (primals,), (tangents,))[1]


def _transposed(
    step: Step, direction: list[jax.Array], args: tuple[PyTree, ...]
) -> jax.Array:
    """Return the same by reverse mode alone, as the transpose of the backward pass."""
    losses, pull = jax.vjp(lambda leaves: step.of(leaves, args), step.leaves)

    def product(weights: jax.Array) -> jax.Array:
        (grads,) = pull(weights)
        products = map(jnp.multiply, map(_leaves.widen, grads), direction)
        return sum((jnp.sum(jnp.real(x)) for x in products), jnp.zeros(()))

    return jax.grad(product)(jnp.zeros_like(losses))


# Donated, since the gradient itself is not needed any more.
@functools.partial(jax.jit, donate_argnums=0)
def _scaled(grads: list[jax.Array]) -> list[jax.Array]:
    """Return the direction of the gradient; its largest element is 1.

    Otherwise derivatives of huge or tiny gradients would leave the range of float32.
    """
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(g), initial=0.0) for g in grads]
    )
    scale = jnp.where(largest > 0, largest, 1)
    # The steepest direction of a complex leaf is the conjugate of JAX's gradient.
    return [jnp.conj(g / scale) for g in grads]


def _joined(parts: list[Any], step: Step) -> np.ndarray:
    return np.concatenate(parts).reshape(step.shape)


def nonfinite_examples(step: Step, places: list[tuple[int, ...]]) -> list[int]:
    """Return the examples whose loss, at these places, or gradient is not finite.

    A batch that cannot be split has gradients of the whole batch only, so that these
    examples are found by their losses.
    """
    examples = {place[0] for place in places}
    if step.can_be_split():
        examples |= {*np.flatnonzero(~np.isfinite(example_norms(step))).tolist()}
    return sorted(examples)
