"""Running averages of norms, and whether a memory takes the new values."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from optclip._arrays import (
    _batching,
    _collectives,
    _numerics,
    _placement,
    _validate,
    _xla,
)
from optclip._arrays._numerics import select
from optclip._arrays._types import Number, PyTree


def weights(decay: Number, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights of the old average and of the new norm, in the dtype of the norm."""
    known = _validate.concrete(decay)
    # In float64 where the value is known: 1 - 0.999 loses half its digits in float32.
    taken = 1 - jnp.asarray(decay) if known is None else 1 - float(known)
    kept, taken = (jnp.asarray(x).astype(norm.dtype) for x in (decay, taken))
    return kept, taken


def debiased_weights(
    decay: Number, count: jax.Array, norm: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights of an average without bias to zero, after `count` norms.

    The same as Adam's correction, but of the average itself, which is then the mean of
    the first few norms.
    """
    known = _validate.concrete(decay)
    if known is None:
        log = jnp.log(jnp.asarray(decay).astype(norm.dtype))
    else:
        with np.errstate(divide="ignore"):
            log = jnp.asarray(np.log(np.float64(known)), norm.dtype)
    number = (count + 1).astype(norm.dtype)
    # A decay of 1 makes it the plain mean; of 0 the logarithm is -inf, which is right.
    whole = jnp.expm1(number * log)
    safe = select(whole == 0, jnp.ones_like(whole), whole)
    taken = select(whole == 0, 1 / number, jnp.expm1(log) / safe)
    # Rounded above 1 the other weight would be below 0, and its root NaN.
    taken = select(number == 1, jnp.ones_like(taken), jnp.minimum(taken, 1))
    return 1 - taken, taken


def mean(
    kept: jax.Array, taken: jax.Array, old: jax.Array, new: jax.Array
) -> jax.Array:
    """The running mean: of equal numbers that number, however weights are rounded."""
    is_slow = taken <= kept
    near, far = select(is_slow, old, new), select(is_slow, new, old)
    return near + jnp.minimum(kept, taken) * (far - near)


def root_mean_square(
    kept: jax.Array, taken: jax.Array, old: jax.Array, new: jax.Array
) -> jax.Array:
    """The root of the running mean square, whose square need not be in range."""
    old, new = jnp.abs(old), jnp.abs(new)
    peak = jnp.maximum(old, new)
    safe = select(peak > 0, peak, jnp.ones_like(peak))
    squares = (jnp.square(_numerics.ratio(x, safe)) for x in (old, new))
    return peak * _numerics.root(mean(kept, taken, *squares))


def zeros(norm: PyTree) -> tuple[PyTree, PyTree]:
    """Two trees of zeros like the norms: one tree twice could not be donated."""
    first, second = (jax.tree.map(jnp.zeros_like, norm) for _ in range(2))
    return first, second


def taken_if(finite: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """The new memory, if all norms were finite; else the old one."""
    flags = jax.tree.leaves(finite)
    if not flags or not jax.tree.leaves(new):
        return new
    is_bad = _batching.Batched(flags).map(jnp.logical_not).any()
    # The same on all devices, whose memories must not drift apart.
    largest = _collectives.spanning(lax.pmax, is_bad.astype(jnp.float32))
    # Materialized, or XLA on CPU computes all norms anew for the memory of each.
    take = (_xla.materialized(largest) if len(flags) > 1 else largest) == 0

    def taken(n: ArrayLike, o: ArrayLike) -> jax.Array:
        n, o = jnp.asarray(n), jnp.asarray(o)
        if n.dtype != o.dtype:
            n = n.astype(o.dtype)
        if n.ndim and jax.typeof(o).sharding.mesh == jax.typeof(n).sharding.mesh:
            n = _placement.placed_as(n, o)
        return select(take, n, o)

    return _batching.each(taken, new, old, as_slices=False)
