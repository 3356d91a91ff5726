"""Define `clip_cotangent`: the identity whose backward pass clips."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import _scopes as scopes
from .._arrays import _axis_names, _leaves, _packed_state, _prefix, _validate
from .._clip import Clip, clip_of
from .._functional import raise_if_exchanged
from .._norms import of_order
from .._responses import BaseResponse, signs, without_schedules
from .._scopes import ELEMENT, LEAF
from .._typing import (
    AxisName,
    CotangentRecord,
    Mask,
    Nonfinite,
    Number,
    PyTree,
    Relative,
    ResponseLike,
    is_cotangent_record,
)
from ._backward_clip import CotangentClip, passed
from ._relative_threshold import reference_of


def clip_cotangent(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = -1,
    ord: float | None = None,
    response: ResponseLike = "hard",
    relative: Relative | None = None,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
    probe: CotangentRecord | None = None,
) -> PyTree:
    """Clip cotangents in the backward pass; the forward pass is the identity.

    Each cotangent g of a leaf is multiplied by `min(1, max_norm / norm(g))`, with one
    norm per slice along `axis`.

    Cotangent clipping biases the parameters' gradient and does not bound it. Start with
    `optclip.clip_by_global_norm` in the optimizer; both together can be worse than it.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> def loss(w):
      ...     h = w * jnp.array([[3.0, 4.0], [0.3, 0.4]])
      ...     h = optclip.clip_cotangent(h, 1.0)
      ...     return jnp.sum(h**2) / 2
      >>> print(loss(1.0), jax.grad(loss)(1.0))
      12.625 5.25

    Args:
      tree: Pytree of arrays, such as a layer's activations. Integers, bools and PRNG
        keys are unchanged.
      max_norm: Threshold: a number, array that broadcasts to the norms (shape of the
        leaf with 1 at `axis`), or prefix tree of these with None for unclipped.
      axis: Axes that each norm covers, an int or a tuple. Default: -1, one norm per
        vector along the last axis. None: per leaf. `()`: per element.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      relative: Statistic of the leaf's norms that multiplies `max_norm`: `"median"`, or
        a function from the vector of norms to a number. Default: None, absolute
        thresholds.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves: a `PartitionSpec`, the names that
        each norm spans (`()` for none), or a tree of these. Default: read from their
        types, which suffices for `axis=None`.
      probe: Record from `cotangent_probe` whose gradient reports the clipping.

    Returns:
      The same tree. With `probe`, a pair of the tree and the probe to pass to the next
      `clip_cotangent`.

    Raises:
      TypeError: The function is differentiated in forward mode, as by `jax.jvp`.
      ValueError: `max_norm` is negative, NaN or of the wrong shape; a leaf lacks
        `axis`; or `relative` is combined with `axis=None`.

    Guarantees:
      Cotangents within the threshold are bit-identical, and zeros stay zero. A traced
      negative threshold counts as 0, unless `response` has `signed = True`. The
      gradient with respect to `max_norm` is 0. Second derivatives differentiate the
      clipped backward pass.

      `relative` excludes norms that are 0 or non-finite; a function receives 0 for
      both. Relative thresholds scale with the loss.

      Under `jax.vmap` each example has separate norms. The cotangent of an array shared
      by all examples is clipped after summation, unless another leaf, a threshold or
      the probe is batched.

      If the value that `jax.value_and_grad` returns is differentiated again, its
      cotangents are not clipped; call the loss itself for that value.

      Code that requires a backward pass linear in the cotangent may ignore clipping, as
      `diffrax.BacksolveAdjoint` does in a vector field.

    See Also:
      `cotangent_probe` records the clipping.

    References:
      Graves, "Generating Sequences With Recurrent Neural Networks", 2013,
      arXiv:1308.0850, section 2.1 (per element).
    """
    clip = _clip(axis, ord, response, relative, nonfinite)
    reference = reference_of(relative)
    _check_threshold(tree, max_norm, clip.response)
    _check_probe(probe)
    chosen = chosen_leaves(tree, mask)
    _check_leaves(chosen, axis)
    thresholds = chosen.spread("max_norm", max_norm)
    clip = dataclasses.replace(clip, axis_name=chosen.axis_names(axis_name))
    out, passed_on = tree, probe
    if any(chosen.are_chosen):
        arrays, passed_on = passed(
            CotangentClip(clip, reference), chosen.arrays, thresholds, probe
        )
        out = chosen.rebuild(arrays)
    return out if probe is None else (out, passed_on)


def _clip(
    axis: int | tuple[int, ...] | None,
    ord: float | None,
    response: ResponseLike,
    relative: Relative | None,
    nonfinite: Nonfinite,
) -> Clip:
    how = without_schedules(response, "clip_cotangent counts no steps")
    _validate.require(
        "axis",
        axis,
        axis is not None or relative is None,
        "an int or a tuple with `relative`, which compares norms within a leaf",
        "Pass axis=-1, or axis=() for elements.",
    )
    if axis is None:
        scope = LEAF
    else:
        scope = ELEMENT if isinstance(axis, tuple) and not axis else scopes.axes(axis)
    return clip_of(scope, of_order(ord), how, nonfinite=nonfinite)


def _check_threshold(tree: PyTree, max_norm: Any, response: BaseResponse) -> None:
    _validate.require(
        "max_norm",
        max_norm,
        not callable(max_norm),
        "a number, an array, or a tree of these",
        "clip_cotangent counts no steps; pass schedule(step).",
        TypeError,
    )
    raise_if_exchanged("max_norm", tree, max_norm)
    _validate.threshold_given("max_norm", max_norm)
    for value in jax.tree.leaves(max_norm):
        _validate.number("max_norm", value, **signs(response))


def _check_leaves(chosen: Chosen, axis: Any) -> None:
    axes = () if axis is None else _validate.as_ints(axis) or ()
    for name, leaf in chosen.by_name():
        if any(not -leaf.ndim <= a < leaf.ndim for a in axes):
            raise ValueError(
                f"`axis` must name axes that each leaf has, got {axes} for {name} of"
                f" shape {leaf.shape}. Exclude such leaves with mask=, or pass"
                " axis=None for one norm per leaf."
            )


def _check_probe(probe: Any) -> None:
    _validate.kind(
        "probe",
        probe,
        (CotangentRecord, type(None)),
        "a record from optclip.cotangent_probe(), or None",
    )
    shapes = [jnp.shape(x) for x in jax.tree.leaves(probe)]
    are_scalars = probe is None or shapes == [()] * 6
    _validate.require(
        "probe",
        probe,
        are_scalars,
        "a record of scalars",
        "Pass a cotangent_probe(steps) through the xs of jax.lax.scan.",
    )


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Hold a tree and which of its leaves have clipped cotangents.

    Attributes:
      flat: the whole tree.
      are_chosen: for each leaf whether it is clipped.
    """

    flat: _leaves.Flat
    are_chosen: list[bool]

    @property
    def arrays(self) -> PyTree:
        """Return the clipped arrays by path, or the only array, with None elsewhere."""
        return self._keyed(self.flat.leaves)

    def by_name(self) -> list[tuple[str, Any]]:
        """Return the name in errors and the array of each clipped leaf."""
        names = map(_leaves.named, self.flat.paths)
        leaves = zip(names, self.flat.leaves, self.are_chosen, strict=True)
        return [(name, leaf) for name, leaf, is_chosen in leaves if is_chosen]

    def spread(self, name: str, threshold: PyTree) -> PyTree:
        """Return a threshold for each of `arrays`, in its structure."""
        places = self.flat.rebuild(list(range(len(self.are_chosen))))
        filled = _prefix.fill(name, threshold, places)
        return self._keyed(self.flat.treedef.flatten_up_to(filled))

    def axis_names(self, axis_name: AxisName | None) -> PyTree:
        """Return the mapped axes declared for each of `arrays`, in its structure."""
        _axis_names.check(axis_name)
        return self._keyed(_axis_names.by_leaf(axis_name, self.flat))

    def rebuild(self, arrays: PyTree) -> PyTree:
        """Return the tree with the clipped leaves replaced by `arrays`."""
        is_one = not isinstance(self.arrays, dict)
        replacements = iter([arrays] if is_one else [arrays[k] for k in self.arrays])
        pairs = zip(self.flat.leaves, replacements, self.are_chosen, strict=True)
        return self.flat.rebuild(
            [new if is_chosen else old for old, new, is_chosen in pairs]
        )

    def _keyed(self, entries: list[Any]) -> PyTree:
        pairs = zip(entries, self.are_chosen, strict=True)
        chosen = [entry if is_chosen else None for entry, is_chosen in pairs]
        return _packed_state.keyed(self.flat.treedef, chosen)


def chosen_leaves(tree: PyTree, mask: Mask | None) -> Chosen:
    """Select the floating-point arrays of a tree that are in the mask.

    Raises:
      TypeError: A leaf is a sparse matrix, or neither an array nor a number; or the
        tree contains a probe.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_cotangent_record)
    has_probe = any(map(is_cotangent_record, leaves))
    wanted = "a tree without a probe"
    advice = "With `probe`, unpack the result: h, probe = clip_cotangent(...)."
    _validate.require("tree", tree, not has_probe, wanted, advice, TypeError)
    flat = _leaves.flatten(tree)
    live = flat.clippable()
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        subject, is_dense = _leaves.named(path, "The"), not _leaves.is_sparse(leaf)
        advice = "Pass its data, and rebuild the sparse array from the result."
        _validate.require(subject, leaf, is_dense, "a dense array", advice, TypeError)
    in_mask = _prefix.spread_mask("mask", mask, flat, live)
    return Chosen(
        flat,
        [
            is_live and is_taken and hasattr(leaf, "shape")
            for leaf, is_live, is_taken in zip(flat.leaves, live, in_mask, strict=True)
        ],
    )
