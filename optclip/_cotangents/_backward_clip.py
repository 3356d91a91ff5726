"""Build the identity whose backward pass clips, as one `jax.custom_vjp`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.core import Tracer

from .._arrays import _closures, _placement
from .._arrays._types import PyTree
from .._clip import Clip, apply, decide, layout_of
from .._typing import CotangentRecord
from . import _probe, _relative_threshold


@dataclasses.dataclass(frozen=True, eq=False)
class CotangentClip:
    """Describe how cotangents are clipped in the backward pass.

    Attributes:
      clip: the clip applied to each array of a dict separately.
      reference: the statistic that thresholds are multiples of, None for absolute ones.
    """

    clip: Clip
    reference: _relative_threshold.Reference | None

    def apply(
        self, cotangents: PyTree, thresholds: PyTree, is_recorded: bool
    ) -> tuple[PyTree, CotangentRecord | None]:
        """Return the clipped cotangents, and a record of the clipping if requested."""
        layout = layout_of(self.clip, cotangents)
        measured = self.clip.norm.measure(layout.blocks)
        limits = layout.entries(thresholds)
        if self.reference is not None:
            entries = zip(layout.blocks, measured.norms.entries(), limits, strict=True)
            limits = [
                _relative_threshold.multiple(self.reference, *entry)
                for entry in entries
            ]
        decision = decide(self.clip, layout, measured, {"max_norm": limits})
        clipped, coefficients = apply(decision)
        if not is_recorded:
            return clipped, None
        _, of_norms = self.clip.action.recorded(decision, coefficients)
        return clipped, _probe.record_of(decision.norms, of_norms)

    def spans_by_name(self) -> bool:
        """Return whether mapped axes are declared; some exist only during the call."""
        declared = jax.tree.leaves(self.clip.axis_name, is_leaf=lambda x: x is not None)
        return any(axes != () for axes in declared)


def passed(
    backward: CotangentClip,
    arrays: PyTree,
    thresholds: PyTree,
    probe: CotangentRecord | None,
) -> tuple[PyTree, CotangentRecord | None]:
    """Return the arrays and the probe unchanged, with clipping in the backward pass."""
    # Do not trace Python numbers, so that their values can still be checked.
    traced = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, thresholds)

    is_recorded = probe is not None

    def apply(cotangents: PyTree, traced: PyTree) -> Any:
        now = jax.tree.map(lambda x, t: x if t is None else t, thresholds, traced)
        return backward.apply(cotangents, now, is_recorded)

    # Tracing raises the errors of the backward pass here, at the user's call. It also
    # finds the arrays that a response or a reference closes over, of any dtype. The
    # rule below must receive traced ones as arguments.
    pulled, closed_over = _closures.converted(apply, arrays, traced)
    is_closed = not any(isinstance(x, Tracer) for x in closed_over)
    if is_closed and not backward.spans_by_name():
        # Calling the function itself avoids a compilation per call outside `jit`.
        pulled, closed_over = apply, []

    def identity(arrays: PyTree, residuals: PyTree, probe: Any) -> Any:
        return arrays, probe

    def forward(arrays: PyTree, residuals: PyTree, probe: Any) -> Any:
        return (arrays, probe), residuals

    def pull_back(residuals: PyTree, cotangents: Any) -> Any:
        of_arrays, of_probe = cotangents
        clipped, record = pulled(of_arrays, *residuals)
        if of_probe is not None:
            of_probe = _probe.joined(of_probe, _probe.on_all(record, of_probe))
        return clipped, None, of_probe

    # The custom derivative leaves the arrays unchanged and clips their cotangents.
    function = jax.custom_vjp(identity)
    function.defvjp(forward, pull_back)
    try:
        residuals = traced, *closed_over
        arrays, _, probe = _batched_alike((arrays, residuals, probe))
        return function(arrays, residuals, probe)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(
            "clip_cotangent does not support forward-mode differentiation, such as"
            " jax.jvp or jax.jacfwd. Use jax.grad, jax.vjp or jax.jacrev, or remove"
            " clip_cotangent from the function."
        ) from error


def _batched_alike(tree: PyTree) -> PyTree:
    """Return the tree; under `vmap` all leaves are batched if one is.

    The rule of a `jax.custom_vjp` with partly batched inputs is wrong if it mixes them:
    the cotangent of a shared output is summed over the examples when it enters, and the
    cotangent of the shared input is summed again when it leaves.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) < 2:
        return tree
    return treedef.unflatten(_alike(*leaves))


@jax.custom_batching.custom_vmap
def _batched(*leaves: Any) -> tuple[Any, ...]:
    return leaves


@_batched.def_vmap
def _batch(axis_size: int, are_batched: list[bool], *leaves: Any) -> Any:
    like = leaves[are_batched.index(True)]
    filled = [
        x if is_batched else _placement.stacked_as(x, like)
        for x, is_batched in zip(leaves, are_batched, strict=True)
    ]
    # The recursive call handles an enclosing `vmap`.
    return _batched(*filled), (True,) * len(leaves)


# JAX does not transpose `custom_vmap`. This rule, whose tangents JAX batches, gives it
# derivatives of any order in both modes.
_alike = jax.custom_jvp(_batched)
_alike.defjvp(lambda leaves, tangents: (_alike(*leaves), tangents))
