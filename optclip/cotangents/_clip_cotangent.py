"""`clip_cotangent`: the identity forwards, a clip backwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from optclip import scopes
from optclip._arrays import _validate
from optclip._clip import clip_of
from optclip.cotangents._backward_clip import HAS_LOGS, CotangentClip, passed
from optclip.cotangents._masked_leaves import Chosen, chosen_leaves
from optclip.cotangents._relative_threshold import reference_of
from optclip.functional._interface import raise_if_exchanged
from optclip.norms._interface import of_order
from optclip.responses._interface import is_same_always, resolve
from optclip.scopes._interface import ELEMENT, LEAF
from optclip.typing import (
    AxisName,
    CotangentRecord,
    Mask,
    Nonfinite,
    Number,
    PyTree,
    Relative,
    ResponseLike,
)


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
    name: str | None = None,
) -> PyTree:
    r"""The tree as it is; in the backward pass its cotangents are clipped.

    .. math:: g \leftarrow g \min(1, c / \|g\|_{axis})

    Args:
      tree: any pytree of arrays, such as the activations of a layer or the state of a
        recurrent network. Integers, bools and keys of random numbers pass.
      max_norm: the largest norm of a cotangent that is let through, c in the formula: a
        number, an array that broadcasts to the norms (the shape of the leaf with 1 at
        `axis`), traced or not, or a prefix tree of these with None for what is not
        clipped. With `relative` it is a factor. 0 clips to zero, inf clips nothing.
      axis: the axes of each leaf that a norm is taken over, an int or a tuple: -1 makes
        a norm for each vector along the last axis, which is that of a token or of an
        example. None is all axes, one norm a leaf; `()` is none, each element by
        itself, clipped to `[-max_norm, max_norm]`.
      ord: the order p of the norm, any number above 0, or inf for the largest modulus;
        None is 2.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two. It is traced, and may close over traced values of any
        dtype, such as the step of a `jax.lax.scan`.
      relative: what the threshold is `max_norm` times of: `"rms"` and `"median"` of all
        norms of the leaf, or a number from 0 to 1, that quantile of them; norms of 0,
        as of padding, and norms that are not finite are left out. Or a function that
        returns one number of a vector of all norms, with 0 for one that is not finite;
        it may close over traced values too.
        None is `max_norm` itself. A loss scale, and the mean of a loss, change a
        relative threshold along with the cotangents.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others pass. A tree of bools, a prefix of one,
        or a function that makes one of the tree, such as `optclip.by_path(...)`; None
        is all leaves.
      axis_name: inside `jax.shard_map` the mesh axes that leaves are split over. A
        `PartitionSpec` says it by dimension and is right for any `axis`; a name or a
        tuple of names, those that a norm spans (`()` for none); or a tree of these.
        None reads them off the type of each leaf, which is enough with `axis=None`.
      probe: a `cotangent_probe`, whose gradient is the record of what was clipped.
      name: under which `jax.vjp(...)[1].with_logs` has that record; JAX 0.11.1 or
        newer. Names differ from each other.

    Returns:
      The tree, to the bit; with `probe` a pair of the tree and the probe, which the
      next clip takes.

    Raises:
      TypeError: an argument is not of its kind. In forward mode, such as `jax.jvp`:
        there is no clip of tangents. Inside `jax.jit` it is JAX that says so, "can't
        apply forward-mode autodiff (jvp) to a custom_vjp function".
      ValueError: `max_norm` is a known number that is negative or NaN, or fits no norm;
        a leaf lacks `axis`; `relative` is given with `axis=None`; `response` has a
        schedule in it; `name` is given to a JAX older than 0.11.1.

    ==================== =============================================================
    edge                 backward pass
    ==================== =============================================================
    nothing above c      the cotangents to the bit
    traced c below 0     0, as for c = 0
    cotangents of 0      0, whatever the threshold
    `jax.vmap`           each example has norms, and a reference, of its own
    one array for all    clipped per example if another array, a threshold or the probe
    examples of a vmap   has an axis of examples, otherwise once, after summation
    second derivatives   those of the clip: of what the backward pass computes
    `value_and_grad`     inside another `grad`, its value is differentiated unclipped:
                         call the function again for the value
    `max_norm`           gets a gradient of 0
    ==================== =============================================================

    A clip of each step does not bound the gradient of the parameters, and it makes that
    gradient a biased one: keep a clip by global norm behind it.

    Example:
      >>> import jax, jax.numpy as jnp, optclip
      >>> def loss(w):
      ...     h = w * jnp.array([[3.0, 4.0], [0.3, 0.4]])
      ...     h = optclip.clip_cotangent(h, 1.0)
      ...     return jnp.sum(h**2) / 2
      >>> print(loss(1.0), jax.grad(loss)(1.0))
      12.625 5.25

    Source: Graves, "Generating Sequences With Recurrent Neural Networks", 2013,
    arXiv:1308.0850, section 2.1, by value.
    """
    backward = _backward(axis, ord, response, relative, nonfinite)
    _check_threshold(tree, max_norm)
    _check_statistics(probe, name)
    chosen = chosen_leaves(tree, mask)
    _check_leaves(chosen, axis)
    thresholds = chosen.spread("max_norm", max_norm)
    backward = backward.spanning(chosen.axis_names(axis_name))
    out, passed_on = tree, probe
    if any(chosen.are_chosen):
        arrays, passed_on = passed(backward, chosen.arrays, thresholds, probe, name)
        out = chosen.rebuild(arrays)
    return out if probe is None else (out, passed_on)


def _backward(
    axis: int | tuple[int, ...] | None,
    ord: float | None,
    response: ResponseLike,
    relative: Relative | None,
    nonfinite: Nonfinite,
) -> CotangentClip:
    how = resolve(response)
    if not is_same_always(how):
        advice = "There is no step here: give the value of the schedule."
        wanted = "without a schedule in it"
        raise ValueError(_validate.must_be("response", wanted, response, advice))
    if axis is None and relative is not None:
        wanted = "ints with `relative`, which compares the norms of a leaf"
        advice = "None makes one norm a leaf. Give axis=-1, or () for elements."
        raise ValueError(_validate.must_be("axis", wanted, axis, advice))
    clip = clip_of(
        LEAF if axis is None else ELEMENT if axis == () else scopes.axes(axis),
        of_order(ord), how, nonfinite=nonfinite,
    )  # fmt: skip
    return CotangentClip(clip, reference_of(relative))


def _check_threshold(tree: PyTree, max_norm: Any) -> None:
    if callable(max_norm):
        wanted = "a number, an array, or a tree of these"
        advice = "There is no step here: give the value of a schedule, schedule(step)."
        raise TypeError(_validate.must_be("max_norm", wanted, max_norm, advice))
    raise_if_exchanged("max_norm", tree, max_norm)
    _validate.not_none("max_norm", max_norm)
    for value in jax.tree.leaves(max_norm):
        _validate.number("max_norm", value)


def _check_leaves(chosen: Chosen, axis: Any) -> None:
    axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    for name, leaf in chosen.by_name():
        if any(isinstance(a, int) and not -leaf.ndim <= a < leaf.ndim for a in axes):
            raise ValueError(
                f"`axis` must name axes that each leaf has, got {axes} for {name} of"
                f" shape {leaf.shape}. Exclude such leaves with mask=, or give"
                " axis=None for one norm per leaf."
            )


def _check_statistics(probe: Any, name: Any) -> None:
    wanted = "what optclip.cotangent_probe() returned, or None"
    _validate.kind("probe", probe, (CotangentRecord, type(None)), wanted)
    if probe is not None and [jnp.shape(x) for x in jax.tree.leaves(probe)] != [()] * 6:
        wanted = "one record, six numbers"
        advice = "One of cotangent_probe(steps) goes among the xs of a jax.lax.scan."
        raise ValueError(_validate.must_be("probe", wanted, probe, advice))
    wanted = "a string, or None for no log"
    _validate.kind("name", name, (str, type(None)), wanted)
    if name == "":
        wanted = "a string that is not empty, or None for no log"
        raise ValueError(_validate.must_be("name", wanted, name))
    if name is not None and not HAS_LOGS:
        advice = "It needs JAX 0.11.1 or newer. Give a probe in its place."
        raise ValueError(_validate.must_be("name", "None", name, advice))
