"""Record clipping in the backward pass as the cotangent of a probe."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _collectives, _validate
from .._arrays._batching import Batched
from .._typing import CotangentRecord


def cotangent_probe(steps: int | None = None) -> CotangentRecord:
    """Create a record of zeros whose gradient reports how `clip_cotangent` clipped.

    Pass it to the loss as an argument, and there to `clip_cotangent` as `probe`. The
    gradient with respect to it is the record.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> def loss(w, probe):
      ...     h = w * jnp.array([[3.0, 4.0], [0.3, 0.4]])
      ...     h, probe = optclip.clip_cotangent(h, 1.0, probe=probe)
      ...     return jnp.sum(h**2) / 2
      >>> grad = jax.grad(loss, argnums=(0, 1))
      >>> grads, record = grad(1.0, optclip.cotangent_probe())
      >>> print(grads)
      5.25
      >>> for key, value in optclip.metrics(record).items():
      ...     print(key, value)
      cotangent/largest_norm 5.0
      cotangent/mean_coefficient 0.6
      cotangent/clipped 1
      cotangent/fraction 0.5
      cotangent/nonfinite 0

    Args:
      steps: Length of a `jax.lax.scan` that takes the probe in its `xs`, for one record
        per step. Default: None, one record for all calls that take the probe.

    Returns:
      A `CotangentRecord` of float32 zeros, of shape `()` or `(steps,)`.
    """
    shape = () if steps is None else (_validate.length("steps", steps),)
    return CotangentRecord(
        *(jnp.zeros(shape, jnp.float32) for _ in CotangentRecord._fields)
    )


def record_of(norms: Batched, coefficients: Batched) -> CotangentRecord:
    """Return the record of one call over all its blocks, constant to derivatives."""
    pairs = zip(norms.entries(), coefficients.entries(), strict=True)
    records = [_record(*pair) for pair in pairs]
    return jax.lax.stop_gradient(functools.reduce(joined, records))


def _record(norm: jax.Array, coefficient: jax.Array) -> CotangentRecord:
    coefficient = jnp.broadcast_to(coefficient, norm.shape)
    finite = jnp.isfinite(norm)
    # Compute the ones from the norms, so that under `vmap` each example is counted.
    there = (finite | ~finite).astype(jnp.float32)
    is_live = finite & (norm > 0) & (coefficient == coefficient)
    # A norm that is 0 or not finite, or a NaN coefficient, counts as unclipped.
    k = jnp.where(is_live, coefficient, jnp.ones_like(coefficient))

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(values.astype(jnp.float32))

    finite_norms = jnp.where(finite, norm, jnp.zeros_like(norm))
    return CotangentRecord(
        cotangent_norm=jnp.max(finite_norms, initial=0).astype(jnp.float32),
        cotangent_norms=total(there),
        cotangent_clipped=total(k != 1),
        cotangent_nonfinite=total(~finite),
        cotangent_coefficients=total(k),
        cotangent_chains=jnp.max(there, initial=0),
    )


# Fields combined by their maximum; the others are counts and sums.
_LARGEST = ("cotangent_norm", "cotangent_chains")


def joined(one: CotangentRecord, other: CotangentRecord) -> CotangentRecord:
    """Combine the records of two calls that one probe passes through in turn."""
    pairs = zip(CotangentRecord._fields, one, other, strict=True)
    return CotangentRecord(
        *(jnp.maximum(a, b) if f in _LARGEST else a + b for f, a, b in pairs)
    )


def on_all(record: CotangentRecord, probe: CotangentRecord) -> CotangentRecord:
    """Combine the records of all devices that share one probe."""
    totals = []
    for field, value, entry in zip(record._fields, record, probe, strict=True):
        across = _axis_names.apart(value, entry)
        collective = lax.pmax if field in _LARGEST else lax.psum
        totals.append(_collectives.reduced_over(collective, value, across))
    return CotangentRecord(*totals)
