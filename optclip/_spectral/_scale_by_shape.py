"""Scale matrices by their shape, so that wide and square layers move equally far."""

from __future__ import annotations

from collections.abc import Callable

import optax

from .._arrays import _axis_names, _leaves
from .._arrays._leaf import Leaf
from .._arrays._types import AxisName, Held, Mask, PyTree
from .._clip import lay_out
from ._matrix_scopes import Matrices


def scale_by_shape(
    matrices: Matrices,
    transposed: Callable[[str], bool] | None,
    mask: Mask | None,
    axis_name: AxisName | None,
) -> optax.GradientTransformation:
    """Multiply each matrix by `sqrt(max(1, outputs / inputs))`.

    The axes of `matrices` are inputs and outputs, in reverse order if `transposed`
    returns True for the path of a leaf.
    """
    held = Held((mask, axis_name))

    def update_fn(updates: PyTree, params: PyTree = None) -> PyTree:
        del params
        mask, axis_name = held.value
        layout = lay_out(matrices, updates, (mask, None, None), axis_name)
        names = _leaves.names_of(layout.flat.paths)
        out = {}
        for i, leaf, _ in layout.scaled:
            if leaf.ndim < 2:
                continue
            inputs, outputs = (_length(leaf, a) for a in matrices.matrix_axes)
            if transposed is not None and transposed(names[i]):
                inputs, outputs = outputs, inputs
            # A matrix without elements may have no inputs.
            out[i] = leaf.value * max(1.0, outputs / max(inputs, 1)) ** 0.5
        return layout.rebuild(out)

    return optax.stateless(update_fn)


def _length(leaf: Leaf, axis: int) -> int:
    """Return the length of an axis, over all devices that split it."""
    axis %= leaf.ndim
    split = _axis_names.split_axes_of_slices(
        leaf.array, leaf.shape, (axis,), leaf.axis_name
    )
    return leaf.shape[axis] * _axis_names.axes_size(split)
