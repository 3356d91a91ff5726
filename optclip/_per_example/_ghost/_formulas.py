"""Compute gradient norms from the inputs of a site and the cotangents of its outputs.

A dense layer has `A` of T positions and k inputs, and `D` of T positions and p outputs.
Its gradient is `A^T D`, whose squared norm also equals `<A A^T, D D^T>`. Numbers are
first scaled near 1 by powers of two; `Scaled` stores the exponent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import _leaves

# Number of gradient elements held together when gradients are computed in chunks.
CHUNK = 2**20

# Positions cancel if the square is below this fraction of the sum of their squares. The
# products of positions then lose as many digits.
CANCELLED = 2.0**-4

# Exponent of a zero gradient, below all others.
NOTHING = -5000


class Scaled(NamedTuple):
    """Represent squared norms as `square * 4**exponent`."""

    square: jax.Array
    exponent: jax.Array

    @classmethod
    def of(cls, square: jax.Array, exponent: jax.Array) -> Scaled:
        # A square of 0 gets the smallest exponent, so that it never sets a sum's unit.
        return cls(square, jnp.where(square == 0, NOTHING, exponent))

    def at(self, exponent: jax.Array) -> jax.Array:
        """Return the square in units of `4**exponent`."""
        by = self.exponent - exponent
        return shifted(shifted(self.square, by), by)

    def summed(self) -> Scaled:
        """Return the sum over the last axis."""
        most = jnp.max(self.exponent, axis=-1)
        return Scaled.of(jnp.sum(self.at(most[..., None]), -1), most)


def shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return `x * 2**exponent`, in two steps that stay in range.

    `x` must be float32 or float64.
    """
    bits, bias = _layout(x.dtype)
    exponent = jnp.clip(exponent, 2 - 2 * bias, 2 * bias - 2)
    for step in (exponent // 2, exponent - exponent // 2):
        # The bits of a power of two consist of its exponent.
        pattern = (step + bias).astype(f"uint{8 * x.dtype.itemsize}") << bits
        x = x * lax.bitcast_convert_type(pattern, x.dtype)
    return x


def _layout(dtype: Any) -> tuple[int, int]:
    """Return the number of mantissa bits, and the exponent bits of 1."""
    info = jnp.finfo(dtype)
    return info.nmant, info.maxexp - 1


def exponent_of(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Return the exponent of the largest element, with axes kept.

    It is 0 for zeros, and if an element is non-finite.
    """
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0)
    # Stop the gradient: the norm does not depend on the exponent, and
    # `bitcast_convert_type` has no derivative.
    largest = lax.stop_gradient(_leaves.widen(largest))
    bits, bias = _layout(largest.dtype)
    pattern = lax.bitcast_convert_type(largest, f"uint{8 * largest.dtype.itemsize}")
    exponent = (pattern >> bits).astype(jnp.int32) - bias
    # The bits of zero, inf and NaN do not contain an exponent.
    return jnp.where((largest > 0) & (largest < jnp.inf), exponent, 0)


def of_gradient(gradient: jax.Array) -> Scaled:
    """Return the squared norm of one array."""
    flat = _leaves.widen(gradient).reshape(-1)
    exponent = exponent_of(flat, (0,))
    return Scaled.of(jnp.sum(lax.square(shifted(flat, -exponent))), exponent[0])


def mapped(function: Any, size: int, *trees: Any) -> Any:
    """Map a function over slices, as many together as fit in `CHUNK` elements."""
    count = jax.tree.leaves(trees)[0].shape[0]
    fit = max(CHUNK // max(size, 1), 1)
    if fit >= count:
        return jax.vmap(function)(*trees)
    return lax.map(lambda slices: function(*slices), trees, batch_size=fit)


def is_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Return whether a layer's products of positions are smaller than its gradient."""
    # Symbolic sizes of `jax.export` cannot be compared.
    is_static = all(isinstance(size, int) for size in (positions, inputs, outputs))
    return is_static and 2 * positions**2 <= inputs * outputs


def dense(a: jax.Array, d: jax.Array) -> Scaled:
    """Return the squared norm per example.

    `a` and `d` have shape (examples, groups, positions, size).
    """
    if a.shape[1] == 1 or not is_gram(a.shape[2], a.shape[3], d.shape[-1]):
        return _dense(a, d).summed()
    # Compute groups sequentially, so that only one is copied at a time.
    by_group = lax.map(
        lambda operands: _dense(*(x[:, None] for x in operands)),
        (jnp.moveaxis(a, 1, 0), jnp.moveaxis(d, 1, 0)),
    )
    return Scaled(*(jnp.moveaxis(x[..., 0], 0, 1) for x in by_group)).summed()


def _dense(a: jax.Array, d: jax.Array) -> Scaled:
    a, d, exponent = _balanced(a, d)
    positions, inputs = a.shape[2:]
    if not is_gram(positions, inputs, d.shape[-1]):
        return Scaled.of(_product(a, d), exponent)
    by_position = [_einsum("bgtk,bgsk->bgts", x, x) for x in (a, d)]
    pairs = by_position[0] * by_position[1]
    # Replace a negative sum by 0, since it is 0 up to rounding.
    square = jnp.maximum(jnp.sum(pairs, (-2, -1)), 0)
    if positions > 1:
        # The diagonal holds the positions' squared norms.
        lost = jnp.any(square < CANCELLED * jnp.trace(pairs, axis1=-2, axis2=-1))
        square = lax.cond(lost, _product, lambda a, d: square, a, d)
    return Scaled.of(square, exponent)


def _balanced(a: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale both near 1, with the products `a * d` of positions in proportion."""
    a, d = _near_float32(a), _near_float32(d)
    of_a, of_d = exponent_of(a, (-1,)), exponent_of(d, (-1,))
    is_any = jnp.any(d != 0, axis=-1, keepdims=True)
    # Zero `a` where `d` is 0: the product is 0, and zeros cannot overflow in the shift.
    a = a * is_any.astype(a.dtype)
    is_any &= jnp.any(a != 0, axis=-1, keepdims=True)
    exponent = jnp.max(jnp.where(is_any, of_a + of_d, NOTHING), axis=-2, keepdims=True)
    return _shifted(a, of_d - exponent), _shifted(d, -of_d), exponent[..., 0, 0]


def _near_float32(x: jax.Array) -> jax.Array:
    """Return the array; bfloat16 stays because it has the range of float32."""
    return x if x.dtype == jnp.bfloat16 else _leaves.widen(x)


def _shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return `x * 2**exponent` in the dtype of `x`; a power of two keeps its digits."""
    return shifted(_leaves.widen(x), exponent).astype(x.dtype)


def _product(a: jax.Array, d: jax.Array) -> jax.Array:
    """Return the squared norm of the gradient itself, computed in chunks."""

    def one(a, d):
        return jnp.sum(lax.square(_einsum("tk,tp->kp", a, d)))

    size = a.shape[-1] * d.shape[-1]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (a, d)]
    return mapped(one, size, *flat).reshape(a.shape[:2])


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    return jnp.einsum(
        spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )


def embedding(ids: jax.Array, d: jax.Array) -> Scaled:
    """Return the squared norm per example.

    `ids` has shape (examples, groups, positions); negative ids read no row.
    """

    def one(ids, d):
        order = jnp.argsort(ids)
        ids, d = ids[order], d[order]
        segment = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]]))
        # A negative index reads no row, so its cotangent must add nothing.
        live = jnp.where(ids[:, None] < 0, jnp.zeros_like(d), d)
        return of_gradient(jax.ops.segment_sum(live, segment, num_segments=len(ids)))

    return Scaled(*jax.vmap(jax.vmap(one))(ids, _leaves.widen(d))).summed()
