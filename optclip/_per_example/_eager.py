"""Compile the loops of eager calls once per loss function.

JAX compiles a loop of an eager call again if its body is a new function, as a body is
that closes over parameters and examples. Such calls run one program per loss and
options, whose operands are the arguments.
"""

from __future__ import annotations

import atexit
import collections
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._arrays._types import PyTree

# Objects of other types may change.
_CONSTANTS = {bool, int, float, complex, str, types.FunctionType}
# Programs of functions that still exist; older ones are compiled again.
_MOST = 64


class _Program(NamedTuple):
    # The values that the loss closes over, which are constants of the program.
    captured: tuple[Any, ...]
    run: Callable[..., Any]


_programs: collections.OrderedDict[Any, _Program] = collections.OrderedDict()
# When Python ends, it clears modules before losses, and a hash of groups calls JAX.
atexit.register(_programs.clear)


def run_once_compiled(
    compute: Callable[..., Any], loss: Any, options: Any, operands: PyTree
) -> Any:
    """Return `compute(loss, options, operands)`, with its loops compiled once.

    The key of a program is the function object of the loss, with the objects that it
    refers to, and the options.

    Args:
      compute: A function that refers to no value of the call.
      loss: A plain function; others may have a state of which JAX does not know.
      options: A hashable value.
      operands: Any pytree. Numbers, strings and functions in it are constants of the
        program.
    """
    leaves, treedef = jax.tree.flatten(operands)
    are_arrays = tuple(isinstance(x, (jax.Array, np.ndarray)) for x in leaves)
    arrays = [x for x, is_array in zip(leaves, are_arrays, strict=True) if is_array]
    others = tuple(x for x in leaves if not isinstance(x, (jax.Array, np.ndarray)))
    # The types tell 1, 1.0 and True apart.
    types_of_others = tuple(map(type, others))
    is_plain = isinstance(loss, types.FunctionType) and {*types_of_others} <= _CONSTANTS
    if not is_plain:
        return compute(loss, options, operands)
    captured = _captured(loss)
    if not _is_eager([*arrays, *captured]):
        return compute(loss, options, operands)
    try:
        key = (weakref.ref(loss, _forget), compute, options, treedef, are_arrays)
        key = (*key, others, types_of_others)
        program = _programs.get(key)
    except TypeError:  # Not hashable.
        return compute(loss, options, operands)
    if program is None or not _are_same(program.captured, captured):
        program = _Program(captured, _jitted(compute, key))
    try:
        result = program.run(arrays)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ):
        # The loss reads the value of an argument.
        return compute(loss, options, operands)
    _programs[key] = program
    _programs.move_to_end(key)
    while len(_programs) > _MOST:
        _programs.popitem(last=False)
    return result


def _jitted(compute: Callable[..., Any], key: Any) -> Callable[..., Any]:
    reference, _, options, treedef, are_arrays, others, _ = key

    @jax.jit
    def run(arrays: list[Any]) -> Any:
        given, constants = iter(arrays), iter(others)
        leaves = [next(given if is_array else constants) for is_array in are_arrays]
        return compute(reference(), options, treedef.unflatten(leaves))

    return run


def _forget(reference: Any) -> None:
    """Remove the programs of a function that no longer exists."""
    for key in [key for key in _programs if key[0] is reference]:
        del _programs[key]


def _captured(loss: types.FunctionType) -> tuple[Any, ...]:
    """Return the objects that a function refers to by name."""
    try:
        names = inspect.getclosurevars(loss)
    except ValueError:  # A cell is empty: the function is defined further down.
        return (object(),)
    values = [*names.nonlocals.values(), *names.globals.values()]
    defaults = [*(loss.__defaults__ or ()), *(loss.__kwdefaults__ or {}).values()]
    return (*values, *defaults)


def _are_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))


def _is_eager(values: list[Any]) -> bool:
    """Return whether JAX traces neither the values nor the call."""
    is_traced = any(isinstance(x, Tracer) for x in values)
    return not is_traced and not isinstance(jnp.zeros(()), Tracer)
