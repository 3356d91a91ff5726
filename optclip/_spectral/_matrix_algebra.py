"""Multiply and diagonalize batches of matrices, over mapped axes and differentiably."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._arrays import _axis_names, _collectives, _placement

# Eigenvalues and eigenvectors, or their tangents.
_Spectrum = tuple[jax.Array, jax.Array]


def times(real: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply an array that may be complex by real numbers."""
    return real.astype(x.dtype) * x


def adjoint(x: jax.Array) -> jax.Array:
    """Return the conjugate transpose."""
    return jnp.conj(jnp.swapaxes(x, -2, -1))


def product(a: jax.Array, b: jax.Array, split: _axis_names.Axes = ()) -> jax.Array:
    """Return the matrix product in full precision, summed over mapped axes.

    TPUs multiply float32 in bfloat16 pieces by default.
    """
    out = jnp.matmul(a, b, precision=lax.Precision.HIGHEST, **_placed(a))
    return _collectives.reduced_over(lax.psum, out, split)


def _placed(a: jax.Array) -> dict[str, Any]:
    """Return the sharding of a product, which a mesh of Explicit axes requires.

    The product is sharded like the rows of `a`. Only rows of the matrix itself are ever
    split, so the columns of a product are whole, or belong to a Gram matrix.
    """
    mesh = jax.typeof(a).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return {}
    *batch, rows, _ = jax.typeof(a).sharding.spec
    return {"out_sharding": NamedSharding(mesh, PartitionSpec(*batch, rows, None))}


def gram(x: jax.Array, split: _axis_names.Axes) -> jax.Array:
    """Return the Gram matrix `x x^*`, the smaller of the two."""
    return _placement.whole(product(x, adjoint(x), split))


def without(
    x: jax.Array, columns: jax.Array, rows: jax.Array, split: _axis_names.Axes
) -> jax.Array:
    """Return a matrix without its parts along orthonormal columns and rows.

    They are removed twice, since rounding leaves a fraction of the first removal.
    """
    for _ in range(2):
        x = x - product(columns, product(adjoint(columns), x))
        x = x - product(product(x, adjoint(rows), split), rows)
    return x


# The derivative uses the vectors of `eigh` below, so that second derivatives are finite
# too.
@jax.custom_jvp
def eigenvalues(g: jax.Array) -> jax.Array:
    """Return the eigenvalues of a Hermitian matrix, some of which may be equal."""
    return jnp.linalg.eigvalsh(g)


@eigenvalues.defjvp
def _eigenvalues_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    values, vectors = eigh(*primals)
    moved = product(tangents[0], vectors)
    return values, jnp.real(jnp.sum(jnp.conj(vectors) * moved, -2))


# The derivative of JAX divides by the difference of equal eigenvalues.
@jax.custom_jvp
def eigh(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ascending eigenvalues, and vectors that do not rotate among equal ones."""
    values, vectors = jnp.linalg.eigh(g)
    return values, vectors


@eigh.defjvp
def _eigh_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[_Spectrum, _Spectrum]:
    values, vectors = eigh(*primals)
    inner = product(adjoint(vectors), product(tangents[0], vectors))
    one, other = values[..., None, :], values[..., :, None]
    near = jnp.sqrt(jnp.finfo(values.dtype).eps) * (jnp.abs(one) + jnp.abs(other))
    apart = jnp.abs(one - other) > near
    # The inner select keeps the division by 0 out of the branch that is not selected.
    turned = times(jnp.where(apart, 1 / jnp.where(apart, one - other, 1), 0), inner)
    moved = jnp.real(jnp.diagonal(inner, axis1=-2, axis2=-1))
    return (values, vectors), (moved, product(vectors, turned))
