"""Running averages of norms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _batching, _numerics, _validate
from .._arrays._numerics import select
from .._arrays._types import Number, PyTree
from ._rule import Seen


def weights(decay: Number, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weights of the old average and the new norm, in the norm's dtype."""
    concrete_decay = _validate.concrete(decay)
    # A concrete decay is subtracted in float64: 1 - 0.999 loses half its digits in
    # float32.
    if concrete_decay is None:
        new_weight = 1 - jnp.asarray(decay)
    else:
        new_weight = 1 - float(concrete_decay)
    return _numerics.as_like(decay, norm), _numerics.as_like(new_weight, norm)


def debiased_weights(
    decay: Number, count: jax.Array, norm: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the weights of a debiased average after `count` norms.

    Adam's bias correction, applied to the average itself: it starts as the mean of the
    first few norms.
    """
    concrete_decay = _validate.concrete(decay)
    if concrete_decay is None:
        log = jnp.log(jnp.asarray(decay).astype(norm.dtype))
    else:
        with np.errstate(divide="ignore"):
            log = jnp.asarray(np.log(np.float64(concrete_decay)), norm.dtype)
    number = (count + 1).astype(norm.dtype)
    # A decay of 1 gives the plain mean. The selects avoid its 0 / 0. For a decay of 0
    # the logarithm is -inf, and the weights are correct without a special case.
    whole = jnp.expm1(number * log)
    safe = select(whole == 0, jnp.ones_like(whole), whole)
    new_weight = select(whole == 0, 1 / number, jnp.expm1(log) / safe)
    # A weight rounded above 1 would make the other weight negative and its root NaN.
    new_weight = select(
        number == 1, jnp.ones_like(new_weight), jnp.minimum(new_weight, 1)
    )
    return 1 - new_weight, new_weight


def mean(
    old_weight: jax.Array, new_weight: jax.Array, old: jax.Array, new: jax.Array
) -> jax.Array:
    """Return the running mean; the mean of two equal numbers is exact."""
    # The difference is multiplied by the smaller weight. With a weight near 1 the sum
    # would cancel: a small norm after a much larger average would be rounded to 0.
    is_slow = new_weight <= old_weight
    near, far = select(is_slow, old, new), select(is_slow, new, old)
    return near + jnp.minimum(old_weight, new_weight) * (far - near)


def root_mean_square(
    old_weight: jax.Array, new_weight: jax.Array, old: jax.Array, new: jax.Array
) -> jax.Array:
    """Return the root of the running mean square, even if the square would overflow."""
    old, new = jnp.abs(old), jnp.abs(new)
    peak = jnp.maximum(old, new)
    safe = select(peak > 0, peak, jnp.ones_like(peak))
    squares = (jnp.square(_numerics.ratio(x, safe)) for x in (old, new))
    return peak * _numerics.root(mean(old_weight, new_weight, *squares))


def threshold_of(seen: Seen, new: PyTree, old: PyTree, number: PyTree) -> PyTree:
    """Return the average with the norm of this step, or the one before in `skip`.

    The latter is inf while the number of norms in it is 0.
    """
    if seen.includes_norm:
        return new
    return _batching.each(
        lambda x, n: select(n > 0, x, jnp.full_like(x, jnp.inf)), old, number
    )


def zeros(norm: PyTree) -> tuple[PyTree, PyTree]:
    """Return two trees of zeros like the norms; a tree used twice cannot be donated."""
    first, second = (jax.tree.map(jnp.zeros_like, norm) for _ in range(2))
    return first, second


def as_counts(counts: PyTree) -> PyTree:
    """Return counts as integers, which an averaged state holds as floats."""
    return jax.tree.map(_numerics.as_count, counts)


def counts(norm: PyTree) -> PyTree:
    """Return a count of 0 for each norm."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.int32), norm)
