"""Hide values from XLA on CPU that it would copy, and choose code for a GPU.

Other platforms widen while reading and compute shared values once, so
`lax.platform_dependent` omits most workarounds for CPUs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from . import _leaves
from ._axis_names import varying
from ._types import PyTree

Axis = tuple[int, ...] | None

# Arrays of at most this many numbers are joined or stored, which takes little memory.
FEW = 2**16


def may_be_split(x: jax.Array) -> bool:
    mesh = jax.typeof(x).sharding.mesh
    return any(kind != AxisType.Manual for kind in mesh.axis_types)


def on_gpu(
    function: Callable[[list[jax.Array]], PyTree],
    elsewhere: Callable[[list[jax.Array]], PyTree],
    arrays: list[jax.Array],
) -> PyTree:
    """Call a function written for one GPU there, and `elsewhere` on other platforms.

    The platform is known when a program is lowered, so the program has no branch.
    Arrays that XLA splits over devices go `elsewhere`, since XLA would gather an array
    to reshape it.
    """
    if not arrays or any(map(may_be_split, arrays)):
        return elsewhere(arrays)
    return lax.platform_dependent(
        arrays, cuda=function, rocm=function, default=elsewhere
    )


def materialized(numbers: Any) -> Any:
    """Return the same numbers, computed once, as XLA on CPU does for a quotient.

    XLA on CPU recomputes other shared values for each consumer. Subnormal numbers
    become 0, as in most of its operations. Integers are returned unchanged: their
    quotient would be a float, and no integer here is as costly as a root.
    """

    def quotient(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return quotient(x.astype(jnp.float32)) != 0
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        # XLA cannot infer that this divisor is 1, so it keeps the division. Without it,
        # clipping 2,000 small leaves by their norms accesses 54.9 MB, not 7.0.
        return x / lax.stop_gradient(lax.select(x != x, x, jnp.ones_like(x)))

    return lax.platform_dependent(
        numbers,
        cpu=lambda numbers: jax.tree.map(quotient, numbers),
        default=lambda numbers: numbers,
    )


# Compiled, so that leaves of one type are traced once, and eager derivatives evaluate
# one program, not a choice of platform that is compiled anew in each call.
materialized_once = jax.jit(materialized)


def computed_once(x: jax.Array) -> jax.Array:
    """Return the norms or thresholds of slices, `materialized`; other numbers as given.

    XLA on CPU would compute them again for the coefficients and for each number of the
    record, which was half of AGC's program.
    """
    return materialized_once(x) if x.ndim and _leaves.size_of(x) <= FEW else x


@jax.custom_jvp
def numbers(vector: jax.Array) -> tuple[jax.Array, ...]:
    """Return the entries of a vector, each in the shape of the further axes."""
    if not isinstance(vector, Tracer):
        # The index is an argument, since jnp.unstack would compile each slice.
        return tuple(_compiled_entry(vector, i) for i in range(len(vector)))
    return lax.platform_dependent(vector, cpu=_looked_up, default=jnp.unstack)


@numbers.defjvp
def _numbers_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    return numbers(*primals), jnp.unstack(*tangents)


def _looked_up(vector: jax.Array) -> tuple[jax.Array, ...]:
    """Return the same, by indices that are not constants for XLA.

    XLA would write known indices into the kernel of each leaf, so that no two kernels
    are equal and each is compiled: 300 leaves would take 19 s to compile, not 3.
    """
    vector = materialized(vector)
    # XLA folds an index array of one number into a constant, so each has two. It is
    # unsigned, since a signed index could count from the end.
    last = len(vector)
    places = [jnp.array([i, last], jnp.uint32) for i in range(last)]
    places = lax.optimization_barrier(places)
    return tuple(entry(vector, place[0]) for place in places)


def entry(vector: jax.Array, place: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(vector, place, keepdims=False)


_compiled_entry = jax.jit(entry)


def in_place(new: PyTree, old: PyTree) -> PyTree:
    """Return `new`, which XLA writes over the donated arrays of `old`.

    JAX drops inputs that a program does not read before it pairs donated inputs with
    results. A result without such an input is a new array in each step, and XLA keeps
    scalars there that all kernels read, so that each step updates as many nodes of its
    CUDA graph, 212 with AdamW and GPT-2. The barrier reads the old array, leaves 1 node
    to update, and costs no kernel.
    """
    return jax.tree.map(_after_reading, new, old)


def _after_reading(new: Any, old: Any) -> Any:
    # Outside jit a barrier would be a copy. It rejects operands that vary over
    # different axes of a mesh.
    is_eager = not (isinstance(new, Tracer) and isinstance(old, Tracer))
    if is_eager or varying(jax.typeof(new)) != varying(jax.typeof(old)):
        return new
    return lax.optimization_barrier((new, old))[0]


def read_again(x: jax.Array) -> jax.Array:
    """Return the same leaf, but hide from XLA that the norm has read it already.

    The barrier keeps XLA on CPU from materializing values that the norm and the scaling
    both read: a bfloat16 leaf as float32, which makes a step 1.4 times as long, or the
    squares, if an optimizer squares an unclipped leaf.
    """
    # Elsewhere the barrier would store each leaf that is computed, such as a gradient
    # that `skip` sets to zero: 498 MB, not 0.7, in a step of GPT-2 under
    # skip(chain(clip, adamw)) on an H100. On a TPU, clipping unscaled gradients
    # before AdamW would access 1.19 times the bytes in float32, 1.68 in bfloat16.
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)
