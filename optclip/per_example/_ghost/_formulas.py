"""Norms of gradients from what went into a site and the cotangent of what came out.

A dense layer is `A`, of T positions and k inputs, and `D`, of as many positions and p
outputs: its gradient is `A^T D`, whose squared norm is `<A A^T, D D^T>` too. Numbers
are brought near 1 by powers of two first; `Scaled` keeps the exponent.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optclip._arrays import _leaves

# So many elements of gradients are kept at once where they are made one by one.
CHUNK = 2**20

# Positions cancel if the square is so much smaller than the sum of their own squares,
# and the products of positions then lose as many digits.
CANCELLED = 2.0**-4

# What is below any exponent, of a gradient that is 0.
NOTHING = -5000


class Scaled(NamedTuple):
    """Squares of norms: `square * 4**exponent`."""

    square: jax.Array
    exponent: jax.Array

    @classmethod
    def of(cls, square: jax.Array, exponent: jax.Array) -> "Scaled":
        # A square of 0 has the least exponent, so that it never sets the unit of a sum.
        return cls(square, jnp.where(square == 0, NOTHING, exponent))

    def at(self, exponent: jax.Array) -> jax.Array:
        """The square, in units of `4**exponent`."""
        by = self.exponent - exponent
        return shifted(shifted(self.square, by), by)

    def norm(self) -> jax.Array:
        """The norm, in the whole range of its dtype."""
        return shifted(jnp.sqrt(self.square), self.exponent)

    def summed(self) -> "Scaled":
        """The sum over the last axis."""
        most = jnp.max(self.exponent, axis=-1)
        square = sum_last(self.at(most[..., None]), 1)
        return Scaled.of(square, most)


def sum_last(x: jax.Array, count: int) -> jax.Array:
    """The sum over the last axes."""
    first = x.ndim - count
    return jnp.sum(x, tuple(range(first, x.ndim)))


def shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2**exponent`, in two steps that stay in range; `x` as wide as sums are."""
    bits, bias = _layout(x.dtype)
    exponent = jnp.clip(exponent, 2 - 2 * bias, 2 * bias - 2)
    for step in (exponent // 2, exponent - exponent // 2):
        # The bits of a power of two are its exponent alone.
        pattern = (step + bias).astype(f"uint{8 * x.dtype.itemsize}") << bits
        x = x * lax.bitcast_convert_type(pattern, x.dtype)
    return x


def _layout(dtype: Any) -> tuple[int, int]:
    """How many bits come after the exponent, and what it is for 1."""
    info = jnp.finfo(dtype)
    return info.nmant, info.maxexp - 1


def exponent_of(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Of the largest element, 0 of zeros and where one is not finite; axes are kept."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0)
    # The exponent is constant to derivatives: the norm does not depend on it, and
    # `bitcast_convert_type` has no derivative.
    largest = lax.stop_gradient(_leaves.widen(largest))
    bits, bias = _layout(largest.dtype)
    kind = f"uint{8 * largest.dtype.itemsize}"
    pattern = lax.bitcast_convert_type(largest, kind)
    exponent = (pattern >> bits).astype(jnp.int32) - bias
    # The bits of zero, inf and NaN do not hold an exponent.
    live = (largest > 0) & (largest < jnp.inf)
    return jnp.where(live, exponent, 0)


def of_gradient(gradient: jax.Array) -> Scaled:
    """The squared norm of one array."""
    flat = _leaves.widen(gradient).reshape(-1)
    exponent = exponent_of(flat, (0,))
    square = jnp.sum(lax.square(shifted(flat, -exponent)))
    return Scaled.of(square, exponent[0])


def mapped(function: Any, size: int, *trees: Any) -> Any:
    """`function` of the slices of trees, so few at once that `size` elements fit."""
    count = jax.tree.leaves(trees)[0].shape[0]
    fit = max(CHUNK // max(size, 1), 1)
    if fit >= count:
        return jax.vmap(function)(*trees)
    return lax.map(lambda slices: function(*slices), trees, batch_size=fit)


class Dense(NamedTuple):
    """The sizes of a dense layer, `groups` of them side by side."""

    groups: int
    positions: int
    inputs: int
    outputs: int

    @property
    def is_gram(self) -> bool:
        """Whether products of positions are smaller than the gradient."""
        return 2 * self.positions**2 <= self.inputs * self.outputs


def dense(a: jax.Array, d: jax.Array) -> Scaled:
    """Of each example; `a` and `d` are of (examples, groups, positions, size)."""
    groups, positions, inputs = a.shape[1:]
    sizes = Dense(groups, positions, inputs, d.shape[-1])
    if sizes.groups == 1 or not sizes.is_gram:
        return _dense(sizes, a, d).summed()
    # Groups are computed one after the other, so that only one is copied at a time.
    by_group = lax.map(
        lambda operands: _dense(sizes, *(x[:, None] for x in operands)),
        (jnp.moveaxis(a, 1, 0), jnp.moveaxis(d, 1, 0)),
    )
    return Scaled(*(jnp.moveaxis(x[..., 0], 0, 1) for x in by_group)).summed()


def _dense(sizes: Dense, a: jax.Array, d: jax.Array) -> Scaled:
    a, d, exponent = _balanced(a, d)
    if not sizes.is_gram:
        return Scaled.of(_product(a, d), exponent)
    square, diagonal = _gram(a, d)
    if sizes.positions > 1:
        lost = jnp.any(square < CANCELLED * diagonal)
        square = lax.cond(lost, _product, lambda a, d: square, a, d)
    return Scaled.of(square, exponent)


def _balanced(a: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both near 1, the products `a * d` of a position in the proportion they had."""
    a, d = _near_float32(a), _near_float32(d)
    of_a, of_d = exponent_of(a, (-1,)), exponent_of(d, (-1,))
    is_any = jnp.any(d != 0, axis=-1, keepdims=True)
    # Where d is 0 the size of a does not matter; zeros cannot overflow in the shift.
    a = a * is_any.astype(a.dtype)
    is_any &= jnp.any(a != 0, axis=-1, keepdims=True)
    of_both = jnp.where(is_any, of_a + of_d, NOTHING)
    exponent = jnp.max(of_both, axis=-2, keepdims=True)
    return _shifted(a, of_d - exponent), _shifted(d, -of_d), exponent[..., 0, 0]


def _near_float32(x: jax.Array) -> jax.Array:
    """Return the array; bfloat16 stays, since it has the range of float32."""
    return x if x.dtype == jnp.bfloat16 else _leaves.widen(x)


def _shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return `x * 2**exponent` in the dtype of `x`; a power of two keeps its digits."""
    return shifted(_leaves.widen(x), exponent).astype(x.dtype)


def _gram(a: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The squared norm, and the sum of the squared norms of single positions."""
    by_position = [_einsum("bgtk,bgsk->bgts", x, x) for x in (a, d)]
    pairs = by_position[0] * by_position[1]
    diagonal = jnp.trace(pairs, axis1=-2, axis2=-1)
    # A negative sum is a rounding error of 0, so it becomes 0.
    return jnp.maximum(sum_last(pairs, 2), 0), diagonal


def _product(a: jax.Array, d: jax.Array) -> jax.Array:
    """The squared norm of the gradient itself, of few at once."""

    def one(a, d):
        gradient = _einsum("tk,tp->kp", a, d)
        return jnp.sum(lax.square(gradient))

    size = a.shape[-1] * d.shape[-1]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (a, d)]
    return mapped(one, size, *flat).reshape(a.shape[:2])


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    return jnp.einsum(
        spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )


def embedding(ids: jax.Array, d: jax.Array) -> Scaled:
    """Of each example; `ids` (examples, groups, positions), negative for none."""

    def one(ids, d):
        order = jnp.argsort(ids)
        ids, d = ids[order], d[order]
        is_new = jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]])
        segment = jnp.cumsum(is_new)
        # A negative index reads no row, so that its cotangent adds nothing.
        live = jnp.where(ids[:, None] < 0, jnp.zeros_like(d), d)
        total = jax.ops.segment_sum(live, segment, num_segments=len(ids))
        return of_gradient(total)

    return Scaled(*jax.vmap(jax.vmap(one))(ids, _leaves.widen(d))).summed()
