"""Describe the loss of one example: its parameters and its batch arguments."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import _axis_names, _leaves, _validate
from .._arrays._axis_names import Axes
from .._arrays._types import PyTree
from ._ghost._plan import collectives
from ._microbatches import batch_size


@dataclasses.dataclass(frozen=True)
class Loss:
    """Hold a user's function of one example, and the places of its arguments."""

    function: Callable[..., Any]
    by: tuple[int, ...]
    batch: tuple[int, ...]
    is_by_tuple: bool
    has_aux: bool

    def params(self, args: tuple[Any, ...]) -> PyTree:
        """Return the argument to differentiate with respect to, or a tuple of them."""
        needed = 1 + max(*self.by, *self.batch)
        if len(args) < needed:
            raise TypeError(
                f"The function must be called with at least {needed} arguments to cover"
                f" `argnums` and `batch_argnums`, got {len(args)}. Pass the others."
            )
        params = tuple(args[i] for i in self.by)
        return params if self.is_by_tuple else params[0]

    def examples(self, args: tuple[Any, ...]) -> list[PyTree]:
        """Return the arguments that have a batch axis; warn if one may be missing."""
        examples = [args[i] for i in self.batch]
        size = batch_size(examples)
        for i in sorted({*range(len(args))} - {*self.batch, *self.by}):
            shapes = [jnp.shape(x) for x in jax.tree.leaves(args[i])]
            is_many = not isinstance(size, int) or size > 1
            if is_many and shapes and all(shape[:1] == (size,) for shape in shapes):
                warnings.warn(
                    f"Each example receives all of argument {i} of the loss, although"
                    f" its first axis has the length of the batch, {size}. If it has an"
                    f" entry per example, pass batch_argnums={(*self.batch, i)};"
                    " otherwise bind it with functools.partial.",
                    stacklevel=4,
                )
        return examples

    def of_one(self, args: tuple[Any, ...]) -> Callable[..., tuple[jax.Array, Any]]:
        """Return a function of parameters and one example: `(value, aux)`."""

        def function(params: PyTree, example: list[PyTree]) -> tuple[jax.Array, Any]:
            by = params if self.is_by_tuple else (params,)
            arguments = dict(enumerate(args))
            arguments |= dict(zip(self.by, by, strict=True))
            arguments |= dict(zip(self.batch, example, strict=True))
            returned = self.function(*arguments.values())
            if not self.has_aux:
                returned = returned, None
            elif not isinstance(returned, (tuple, list)) or len(returned) != 2:
                raise TypeError(
                    "With has_aux=True the loss must return (value, aux), got"
                    f" {_kind(returned)}. Return both, or remove has_aux=True."
                )
            value, aux = returned
            _check_value(value)
            return value, aux

        return function


def loss_of(
    function: Callable[..., Any],
    argnums: int | tuple[int, ...],
    batch_argnums: int | tuple[int, ...],
    has_aux: bool,
) -> Loss:
    """Return the validated loss that a user's arguments specify."""
    _validate.kind(
        "loss", function, Callable, "a function loss(params, example) of one example"
    )
    _validate.flag("has_aux", has_aux)
    by, batch = _places("argnums", argnums), _places("batch_argnums", batch_argnums)
    if len({*by, *batch}) < len(by) + len(batch):
        raise ValueError(
            "`argnums` and `batch_argnums` must list different arguments, got"
            f" {argnums} and {batch_argnums}. List each argument once."
        )
    return Loss(function, by, batch, isinstance(argnums, tuple), has_aux)


def apart(
    loss: Callable[..., tuple[jax.Array, Any]], params: PyTree, examples: list[PyTree]
) -> tuple[PyTree, Callable[[PyTree], PyTree], Axes]:
    """Return parameters with respect to which each device differentiates separately.

    Inside `shard_map`, JAX sums derivatives with respect to replicated arrays over
    devices, which would be the gradient of several examples.

    Returns:
      The parameters; a function that returns the mapped axes that split each of them,
      for the norm; and the axes that split the examples.
    """
    if _axis_names.untyped_axes():
        raise ValueError(
            "Per-example gradients are not supported inside pmap, or shard_map with"
            " check_vma=False, where types do not specify which devices hold other"
            " examples. Use shard_map with check_vma=True."
        )
    values, _ = jax.eval_shape(jax.vmap(loss, (None, 0)), params, examples)
    # Include the axes of the examples, because a loss summed over devices does not vary
    # over any.
    example_types = [jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(examples)]
    axes = frozenset().union(*map(_axis_names.varying, [values, *example_types]))
    flat = _leaves.flatten(params)
    axes_of_leaves = [_axis_names.varying(jax.typeof(x)) for x in flat.leaves]
    for path, names in zip(flat.paths, axes_of_leaves, strict=True):
        if both := names & axes:
            raise ValueError(
                "Parameters must be whole on devices with different examples, got"
                f" {_leaves.named(path)} split over {_sorted(both)}, mesh axes that"
                " also split the loss. Gather it first with jax.lax.all_gather, or use"
                " jax.jit on Auto axes without shard_map."
            )
    moved = [
        lax.pcast(x, _sorted(axes), to="varying") if axes else x for x in flat.leaves
    ]
    if axes and batch_size(examples):
        _check_separate(loss, flat.rebuild(moved), examples, axes)
    split = flat.rebuild([_sorted(names) for names in axes_of_leaves])
    # Return the axes as a function, because `axis_name` calls a callable tree.
    return flat.rebuild(moved), lambda _: split, _sorted(axes)


def _check_separate(
    loss: Callable[..., tuple[jax.Array, Any]],
    params: PyTree,
    examples: list[PyTree],
    axes: frozenset[Any],
) -> None:
    """Raise if a collective makes an example's gradient depend on others."""
    # Trace one example, because jax 0.8.3 lacks psum in a vmap inside shard_map.
    one = jax.tree.map(lambda x: jnp.asarray(x)[0], examples)
    backward = jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, one)
    if combining := collectives(backward.jaxpr, axes):
        raise ValueError(
            "The loss must not combine examples of different devices, got"
            f" `{combining[0]}` over the mesh axes {_sorted(axes)}, which makes the"
            " gradient of one example depend on others. Remove it; for"
            " clip_cotangent, pass axis_name=()."
        )


def _sorted(axes: frozenset[Any]) -> Axes:
    return tuple(sorted(axes, key=str))


def _places(name: str, argnums: Any) -> tuple[int, ...]:
    wanted = "an int of at least 0, or a tuple of these"
    places: Any = _validate.as_ints(argnums)
    _validate.require(name, argnums, places is not None, wanted, error=TypeError)
    _validate.require(
        name, argnums, places != (), "a tuple that is not empty, or an int"
    )
    _validate.require(name, argnums, min(places) >= 0, wanted)
    return places


def _check_value(value: Any) -> None:
    is_real = _leaves.is_floating(value) and not jnp.iscomplexobj(value)
    if not is_real or jnp.shape(value):
        raise TypeError(
            f"The loss must return one real number for one example, got {_kind(value)}."
            " Its arguments have no batch axis; pass has_aux=True if it returns"
            " (value, aux)."
        )


def _kind(returned: Any) -> str:
    """Describe a result of the loss by its array type or its Python type."""
    if hasattr(returned, "dtype"):
        return str(jax.typeof(returned))
    return type(returned).__name__
