"""Parts that compare two implementations of the same clipping, written without optclip.

`overflow guard`: the square of an element above 2**64 overflows in float32. A second
sum, of shrunk elements, then gives the norm. Either both sums are always computed,
which XLA can do in one pass over the gradients, or the second is computed in a branch,
whose predicate the host may have to read.

`second reading`: the norm and the product read the same gradients. XLA may store an
intermediate array for the product, such as the gradients in float32. A barrier prevents
this, but may also prevent a useful fusion.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optclip
from benchmarks import clip
from benchmarks.donated_buffers import DonatedTree, compiled_together
from benchmarks.gpu import racing
from benchmarks.timing import Row, race

# The factor that optclip uses: the square of a shrunk float32 cannot overflow.
SHRINK = 2.0**-80


def sum_of_squares(leaves: list[jax.Array]) -> jax.Array:
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves)


def sum_of_small_squares(leaves: list[jax.Array]) -> jax.Array:
    # Without the barrier XLA turns the square of x * c into x * x * (c * c), and x * x
    # overflows.
    factor, zero = lax.optimization_barrier((jnp.float32(SHRINK), jnp.float32(0)))
    return sum_of_squares([x.astype(jnp.float32) * factor + zero for x in leaves])


def unguarded(leaves: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum_of_squares(leaves))


def with_two_sums(leaves: list[jax.Array]) -> jax.Array:
    total, small = sum_of_squares(leaves), sum_of_small_squares(leaves)
    return jnp.where(total == jnp.inf, jnp.sqrt(small) / SHRINK, jnp.sqrt(total))


def with_branch(leaves: list[jax.Array]) -> jax.Array:
    total = sum_of_squares(leaves)
    small = lax.cond(
        total == jnp.inf, lambda: sum_of_small_squares(leaves), lambda: total
    )
    return jnp.where(total == jnp.inf, jnp.sqrt(small) / SHRINK, jnp.sqrt(total))


Norm = Callable[[list[jax.Array]], jax.Array]
NORMS: dict[str, Norm] = {
    "no guard": unguarded,
    "two sums": with_two_sums,
    "branch": with_branch,
}


def transformation(limit: float, norm: Norm, *, barrier: bool = False) -> Any:
    """Build global-norm clipping without a record from a norm."""

    def clipped(tree: Any, _: Any) -> Any:
        scale = jnp.minimum(1.0, limit / norm(jax.tree.leaves(tree)))
        if barrier:
            # Makes XLA read the gradients again instead of storing an intermediate
            # array.
            tree = lax.optimization_barrier(tree)
        return jax.tree.map(
            lambda x: (x.astype(jnp.float32) * scale).astype(x.dtype), tree
        )

    return optax.stateless(clipped)


def guards(tiny: bool) -> Iterator[Row]:
    for dtype in racing.dtypes(tiny):
        source = racing.numbers(tiny, dtype)
        limit, error = clip.checked(jax.tree.leaves(source))
        clips = {name: transformation(limit, norm) for name, norm in NORMS.items()}
        alone = clips | {"optclip": optclip.clip_by_global_norm(limit)}
        donated = DonatedTree(source)
        contenders = compiled_together(
            lambda tx, d=donated, e=error: d.clip(tx, e), alone
        )
        for row in race(contenders, racing.rounds(tiny), against="no guard"):
            yield {"what": "clipping alone", "dtype": dtype, **row}
        del donated, contenders
        for row in racing.steps(racing.adamw(source, "arguments"), clips, tiny):
            yield {"what": "AdamW step", "dtype": dtype, **row}


def readings(tiny: bool) -> Iterator[Row]:
    for dtype in racing.dtypes(tiny):
        source = racing.numbers(tiny, dtype)
        limit, _ = clip.checked(jax.tree.leaves(source))
        clips = {
            "no barrier": transformation(limit, unguarded),
            "barrier": transformation(limit, unguarded, barrier=True),
        }
        for row in racing.steps(racing.adamw(source), clips, tiny):
            yield {"dtype": dtype, **row}
