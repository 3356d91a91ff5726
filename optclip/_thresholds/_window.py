"""The memory of the last norms, and its update."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _placement, _validate
from .._arrays._types import PyTree
from . import _running


class Window(NamedTuple):
    """A ring buffer of the last norms: per norm an array with the window as last axis.

    Per norm, `next` is the index of the next one, and `num_known` the number of stored
    ones, since a norm that is zero or not finite is not stored.
    """

    norms: PyTree
    next: PyTree
    num_known: PyTree


def empty(norm: PyTree, length: int) -> Window:
    """Return an empty window for `length` norms."""

    def ring(x: jax.Array) -> jax.Array:
        # The broadcast keeps the placement of slices on Explicit axes.
        return jnp.broadcast_to(jnp.zeros_like(x)[..., None], (*x.shape, length))

    # Each counter has its own array, since an array used twice cannot be donated.
    return Window(
        jax.tree.map(ring, norm), _running.counts(norm), _running.counts(norm)
    )


def with_integers(window: Window) -> Window:
    """Return the window with counts as integers, which a state may hold as floats."""
    return window._replace(
        next=_running.as_counts(window.next),
        num_known=_running.as_counts(window.num_known),
    )


def with_norms(window: Window, norm: PyTree, length: int) -> Window:
    """Return the window after one more step, whose norms replace the oldest.

    Raises:
      ValueError: The window has another length.
    """
    lengths = {jnp.shape(ring)[-1] for ring in jax.tree.leaves(window.norms)}
    if lengths - {length}:
        advice = "Pass the window that made the state, or create a new state with init."
        wanted = f"{lengths.pop()}, the number of norms in the state"
        raise ValueError(_validate.must_be("window", wanted, length, advice))

    def with_last(ring: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        # A restored checkpoint may have NumPy arrays.
        ring = jnp.asarray(ring)
        # Each norm has its own index, so the entry is selected, not indexed. Its dtype
        # may be wider, as in a step under x64.
        here = places(ring) == along(index, ring)
        return jnp.where(here, along(x.astype(ring.dtype), ring), ring)

    return Window(
        jax.tree.map(with_last, window.norms, norm, window.next),
        jax.tree.map(lambda index: (index + 1) % length, window.next),
        jax.tree.map(lambda n: jnp.minimum(n + 1, length), window.num_known),
    )


def is_known(ring: jax.Array, count: jax.Array) -> jax.Array:
    """Return which entries hold a norm; `count` is one per norm."""
    return places(ring) < along(count, ring)


def places(ring: jax.Array) -> jax.Array:
    """Return the index along the window, in the shape of the ring."""
    index = lax.broadcasted_iota(jnp.int32, ring.shape, ring.ndim - 1)
    return _placement.placed_as(index, ring)


def along(number: jax.Array, ring: jax.Array) -> jax.Array:
    """Broadcast one number per norm along the window."""
    broadcast = jnp.broadcast_to(jnp.expand_dims(number, -1), ring.shape)
    return _placement.placed_as(broadcast, ring)
