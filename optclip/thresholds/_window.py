"""The memory of the last norms, and how one more is added."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _placement, _validate
from optclip._arrays._types import PyTree


class Window(NamedTuple):
    """The last norms, a ring: for each norm an array with the window as last axis.

    `next` is the index that the next norm goes to, `num_known` how many there are.
    """

    norms: PyTree
    next: jax.Array
    num_known: jax.Array


def empty(norm: PyTree, length: int) -> Window:
    """A window of `length` norms, none of them known yet."""

    def ring(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x, shape=(*x.shape, length))

    # Two zeros, not one twice, which could not be donated.
    return Window(jax.tree.map(ring, norm), *jnp.zeros((2,), jnp.int32))


def with_norms(window: Window, norm: PyTree, length: int) -> Window:
    """The window after one more step, whose norms replace the oldest.

    Raises:
      ValueError: the window is of another length.
    """
    lengths = {jnp.shape(ring)[-1] for ring in jax.tree.leaves(window.norms)}
    if lengths - {length}:
        advice = "Give the window of the run that made the state, or call init anew."
        wanted = f"{lengths.pop()}, the number of norms in the state"
        raise ValueError(_validate.must_be("window", wanted, length, advice))

    def with_last(ring: jax.Array, x: jax.Array) -> jax.Array:
        # A restored checkpoint may have NumPy arrays.
        ring = jnp.asarray(ring)
        return ring.at[..., window.next].set(_placement.placed_as(x, ring[..., 0]))

    norms = jax.tree.map(with_last, window.norms, norm)
    return Window(
        norms,
        (window.next + 1) % length,
        jnp.minimum(window.num_known + 1, length),
    )


def is_known(ring: jax.Array, count: jax.Array) -> jax.Array:
    """Return which places have a norm; `count` is a scalar or one for each norm."""
    return places(ring) < along(count, ring)


def places(ring: jax.Array) -> jax.Array:
    """Return the index along the window, in the shape of the ring."""
    return lax.broadcasted_iota(jnp.int32, ring.shape, ring.ndim - 1)


def along(number: jax.Array, ring: jax.Array) -> jax.Array:
    """Return a scalar, or one number for each norm, at all places of its window."""
    return jnp.broadcast_to(jnp.expand_dims(number, -1), ring.shape)
