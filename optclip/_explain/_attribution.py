"""Split a step of unreduced losses, and attribute its gradient to its examples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves, _placement, _validate
from .._arrays._types import PyTree
from .._per_example import norms

_WANTED = "one loss per example, (batch,), or per position, (batch, positions)"
_BIND = "Bind arguments without an axis of examples with functools.partial."


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Hold a loss function with its parameters and its batch.

    Attributes:
      losses: Function of parameters and batch that returns unreduced losses.
      flat: Parameters.
      leaves: Their floating-point leaves, which are differentiated.
      names: Paths of these leaves.
      args: Batch.
      shape: Shape of the losses.
      microbatch_size: Number of examples differentiated at a time.
    """

    losses: Callable[..., jax.Array]
    flat: _leaves.Flat
    leaves: list[jax.Array]
    names: list[str]
    args: tuple[PyTree, ...]
    shape: tuple[int, ...]
    microbatch_size: int

    def of(self, leaves: list[jax.Array], args: tuple[PyTree, ...]) -> jax.Array:
        """Return the losses of some examples at other floating-point leaves."""
        replaced = iter(leaves)
        pairs = zip(self.flat.leaves, self.flat.clippable(), strict=True)
        every = [next(replaced) if is_float else x for x, is_float in pairs]
        return self.losses(self.flat.rebuild(every), *args)

    def microbatches(self) -> Iterator[tuple[PyTree, ...]]:
        """Yield the batch in parts; the last one may be smaller."""
        number, size = self.shape[0], self.microbatch_size
        if size >= number:
            yield self.args
            return
        for start in range(0, number, size):
            rows = slice(start, start + size)
            yield jax.tree.map(functools.partial(_part, rows=rows), self.args)

    def can_be_split(self) -> bool:
        """Return whether each array of the batch has one entry per example."""
        firsts = {jnp.shape(x)[:1] for x in jax.tree.leaves(self.args)}
        return firsts == {self.shape[:1]}


def _part(x: Any, rows: slice) -> jax.Array:
    """Return some rows, split over the same devices if their number allows it."""
    x = jnp.asarray(x)
    # JAX does not slice an axis that is split over an Explicit mesh axis.
    part = _placement.whole(x)[rows]
    devices = x.shape[0] // x.sharding.shard_shape(x.shape)[0]
    return part if part.shape[0] % devices else _placement.placed_as(part, x)


def step_of(
    losses: Callable[..., Any],
    params: PyTree,
    args: tuple[PyTree, ...],
    microbatch_size: int | None,
) -> Step:
    """Check the arguments of `explain`.

    Raises:
      TypeError: An argument is traced, or not of the accepted type.
      ValueError: The losses have a wrong shape, or the batch cannot be split.
    """
    _validate.kind(
        "losses",
        losses,
        Callable,
        "a function losses(params, *args) that returns unreduced losses",
    )
    if microbatch_size is not None:
        microbatch_size = _validate.length("microbatch_size", microbatch_size)
    params = _placement.on_device(params)
    flat = _leaves.flatten_dense(params, "which `explain` does not support")
    _validate.require(
        "params", params, any(flat.clippable()), "a tree with floating-point leaves"
    )
    for x in jax.tree.leaves((flat.leaves, args)):
        _validate.outside_jit("The arguments", x)
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                "`params` or `args` has an array that a step deleted by donation. Call"
                " explain before the step, or copy it: jax.tree.map(jnp.copy, params)."
            )
    _placement.check_together(
        [(_leaves.named(path), x) for path, x in jax.tree.leaves_with_path(params)],
        "Leaves that `explain` compares",
        "Their contributions are added up in one computation.",
    )
    shape = _shape_of(jax.eval_shape(losses, params, *args))
    rows = [x.shape[0] for x in jax.tree.leaves(args) if jnp.ndim(x)]
    if math.prod(shape) == 1 and min(rows, default=1) > 1:
        raise ValueError(
            f"`losses` must return {_WANTED}, got the shape {shape} for arguments of"
            " several rows. Return the losses before their mean or sum."
        )
    step = Step(
        losses, flat, [*map(jnp.asarray, compress(flat.leaves, flat.clippable()))],
        [*compress(_leaves.names_of(flat.paths), flat.clippable())],
        args, shape, microbatch_size or shape[0],
    )  # fmt: skip
    if step.microbatch_size < shape[0] and not step.can_be_split():
        shapes = sorted({jnp.shape(x) for x in jax.tree.leaves(args)})
        raise ValueError(
            f"With `microbatch_size`, each array in `args` must have {shape[0]} rows,"
            f" one per loss, got the shapes {shapes}. {_BIND}"
        )
    return step


def _shape_of(returned: Any) -> tuple[int, ...]:
    """Return the shape of the losses."""
    _validate.kind(
        "The result of losses", returned, jax.ShapeDtypeStruct, "an array",
        "Return the losses alone, without metrics or state.",
    )  # fmt: skip
    if not jnp.issubdtype(returned.dtype, jnp.floating):
        raise TypeError(f"`losses` must return floats, got {returned.dtype}.")
    if not returned.shape:
        raise ValueError(
            f"`losses` must return {_WANTED}, got a scalar, which does not show the"
            " examples. Return the losses before their mean or sum."
        )
    if len(returned.shape) > 2:
        raise ValueError(
            f"`losses` must return {_WANTED}, got the shape {returned.shape}. Reshape"
            " further axes to one: losses.reshape(batch, -1)."
        )
    if 0 in returned.shape:
        raise ValueError(f"`losses` returned no loss: its shape is {returned.shape}.")
    return returned.shape


Method = Literal["derivative", "norms"]

# JAX raises these when a `custom_vjp` or a kernel lacks forward mode. Reverse mode has
# run before, so the loss itself is sound.
_UNSUPPORTED = (TypeError, ValueError, NotImplementedError, AssertionError)


def gradient(step: Step) -> tuple[np.ndarray, list[jax.Array]]:
    """Return the losses, and the gradient of their mean in float32 or wider."""
    number = int(np.prod(step.shape))

    @jax.jit
    def of_part(
        leaves: list[jax.Array], args: tuple[PyTree, ...]
    ) -> tuple[list[jax.Array], jax.Array]:
        def total(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            losses = step.of(leaves, args)
            return jnp.sum(_leaves.widen(losses)), losses

        grads, losses = jax.grad(total, has_aux=True)(leaves)
        return [_leaves.widen(g) / number for g in grads], losses

    grads, losses = None, []
    for args in step.microbatches():
        part, values = of_part(step.leaves, args)
        grads = part if grads is None else list(map(jnp.add, grads, part))
        losses.append(np.asarray(values, np.float64))
    return np.concatenate(losses).reshape(step.shape), grads or []


def contributions(
    step: Step, grads: list[jax.Array]
) -> tuple[np.ndarray | None, Method]:
    """Return the fraction of the gradient that each loss contributes, and the method.

    The derivative of a loss along the gradient g is <g_i, g>, and these sum to |g|^2
    times the number of losses. The fractions are negative for losses that oppose it.
    Without derivatives, they are those of the squared gradient norms of the examples.
    The buffers of the gradient are reused.
    """
    # Otherwise derivatives of huge or tiny gradients would leave the range of float32.
    # One computation of all leaves would take minutes to compile for hundreds of them.
    largest = max(float(jnp.max(jnp.abs(g), initial=0.0)) for g in grads) or 1.0
    direction = [_scaled(g, largest) for g in grads]
    for along in (_forward, _transposed):
        compiled = jax.jit(functools.partial(along, step))
        with contextlib.suppress(*_UNSUPPORTED):
            parts = [compiled(direction, args) for args in step.microbatches()]
            derivatives = np.concatenate(parts, dtype=np.float64).reshape(step.shape)
            if (fractions := _fractions(derivatives)) is not None:
                return fractions, "derivative"
    if not step.can_be_split():
        return None, "norms"
    return _fractions(example_norms(step) ** 2), "norms"


def _fractions(parts: np.ndarray) -> np.ndarray | None:
    """Return the fractions of a sum, or None if it is not positive and finite."""
    # In narrow dtypes the direction is rounded, so |g|^2 is not the exact sum.
    total = np.sum(parts)
    return parts / total if 0 < total < np.inf else None


def example_norms(step: Step) -> np.ndarray:
    """Return the gradient norm of the mean loss of each example."""

    def loss(leaves: list[jax.Array], *example: PyTree) -> jax.Array:
        batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), example)
        return jnp.mean(_leaves.widen(step.of(leaves, batch)))

    places = tuple(range(1, len(step.args) + 1))
    # One at a time: a gradient per example would multiply the memory.
    measure = norms(loss, batch_argnums=places, microbatch_size=1)
    return np.asarray(jax.jit(measure)(step.leaves, *step.args)[1], np.float64)


def _forward(
    step: Step, direction: list[jax.Array], args: tuple[PyTree, ...]
) -> jax.Array:
    primals = step.leaves
    tangents = [x.astype(p.dtype) for x, p in zip(direction, primals, strict=True)]
    return jax.jvp(lambda leaves: step.of(leaves, args), (primals,), (tangents,))[1]


def _transposed(
    step: Step, direction: list[jax.Array], args: tuple[PyTree, ...]
) -> jax.Array:
    """Return the same by reverse mode alone, as the transpose of the backward pass."""
    losses, pull = jax.vjp(lambda leaves: step.of(leaves, args), step.leaves)

    def product(weights: jax.Array) -> jax.Array:
        (grads,) = pull(weights)
        products = map(jnp.multiply, map(_leaves.widen, grads), direction)
        return sum((jnp.sum(jnp.real(x)) for x in products), jnp.zeros(()))

    return jax.grad(product)(jnp.zeros_like(losses))


# Donated, since the gradient itself is not needed any more.
@functools.partial(jax.jit, donate_argnums=0)
def _scaled(grad: jax.Array, largest: float) -> jax.Array:
    """Return a leaf of the direction of the gradient, whose largest element is 1."""
    # The steepest direction of a complex leaf is the conjugate of JAX's gradient.
    return jnp.conj(grad / largest)


def nonfinite_examples(step: Step, places: list[tuple[int, ...]]) -> list[int]:
    """Return the examples whose loss, at these places, or gradient is not finite.

    A batch that cannot be split has gradients of the whole batch only, so that these
    examples are found by their losses.
    """
    examples = {place[0] for place in places}
    if step.can_be_split():
        examples |= {*np.flatnonzero(~np.isfinite(example_norms(step))).tolist()}
    return sorted(examples)
