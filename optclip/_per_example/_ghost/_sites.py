"""Decide how to measure each leaf, and prepare the arguments of its formula.

A site has a formula if a leaf meets data only there, in a matrix product, a convolution
or a row lookup. Steps of a scan are positions if all use the same weight, and groups if
each has a separate one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import _leaves
from ..._arrays._types import PyTree
from . import _formulas, _plan
from ._formulas import Scaled
from ._plan import DATA, JaxprPlan, Site, Weight, is_inexact

# A leaf whose gradient may be nonlinear in the cotangents of its sites.
CUSTOM = "custom"


class Trace(NamedTuple):
    """Hold the static analysis of a loss."""

    plan: JaxprPlan
    out_tree: Any
    # The sites of each leaf.
    sites: list[list[Site]]
    # How each leaf is measured: by a `formula` or, `materialized`, from its gradient;
    # `unused`, or `custom`, which is not supported.
    kinds: list[str]

    def is_narrow(self) -> bool:
        """Return whether a summed gradient is rounded to fewer than 32 bits."""
        return any(site.is_narrow() for sites in self.sites for site in sites)


def check_supported(trace: Trace, params: PyTree, *, strict: bool) -> None:
    """Raise if the gradients of a leaf, or their sum, would be wrong."""
    for path, kind in zip(_leaves.flatten(params).paths, trace.kinds, strict=True):
        if kind == CUSTOM:
            raise ValueError(
                "method='ghost' does not support a custom derivative (`jax.custom_vjp`,"
                " `jax.lax.custom_linear_solve`) between a parameter and its first use"
                f" with data, got one at {_leaves.named(path)}. It may be nonlinear in"
                " the cotangent. Use method='vmap'."
            )
    if strict and trace.is_narrow():
        raise ValueError(
            "`strict` must be False for method='ghost' if parameters meet data in fewer"
            " than 32 bits, such as bfloat16, because the sum over examples is rounded"
            " to it. Compute in float32, use method='vmap', or pass strict=False."
        )


def traced(loss: Callable[..., Any], params: PyTree, example: PyTree) -> Trace:
    """Trace a loss, and decide how to measure each leaf."""
    arguments, treedef = jax.tree.flatten((params, example))

    def flat(arguments, zero):
        value, aux = loss(*treedef.unflatten(arguments))
        value = jnp.asarray(value)
        # Adding the zero makes a loss that depends only on parameters depend on data.
        return value + zero.astype(value.dtype), aux

    zero = jnp.zeros((), jnp.float32)
    jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(arguments, zero)
    leaves = jax.tree.leaves(params)
    infos = [
        Weight(frozenset([i]), is_narrow=_leaves.is_narrow(leaf))
        for i, leaf in enumerate(leaves)
    ]
    data = [DATA] * (len(arguments) + 1 - len(leaves))
    plan = _plan.planned(jaxpr, [*infos, *data])
    sites = [[s for s in plan.sites if i in s.leaves] for i in range(len(leaves))]
    return Trace(plan, jax.tree.structure(shapes), sites, list(map(_kind, sites)))


def _kind(sites: list[Site]) -> str:
    if not sites:
        return "unused"
    if not all(site.is_linear() for site in sites):
        return CUSTOM
    return "formula" if len(sites) == 1 and _has_formula(sites[0]) else "materialized"


# Rows are numbered in int32.
_MOST_ROWS = 2**31 - 1


def _has_formula(site: Site) -> bool:
    if not _is_simple(site):
        return False
    if site.name == "gather":
        return _takes_rows(site)
    return site.name == "dot_general" or (_is_convolution(site) and _is_gram(site))


def squares(site: Site, records: tuple[jax.Array, ...], taps: tuple) -> Scaled:
    """Return per-example squared norms of a site that has a formula."""
    (x,), (d,) = records, taps
    if site.name == "gather":
        return _formulas.embedding(*_rows(site, x, d))
    if not is_inexact(x):
        # A matrix product accepts bools and integers, but a norm requires floats.
        x = x.astype(jnp.promote_types(d.dtype, jnp.float32))
    if site.name == "dot_general":
        return _formulas.dense(*_matrices(site, x, d))
    return _formulas.dense(*_patches(site, x, d))


def _is_simple(site: Site) -> bool:
    """Return whether a site has one real rearranged weight and nonempty data."""
    infos = list(site.weights.values())
    if len(infos) != 1 or not infos[0].is_moved or site.eqn is None:
        return False
    shapes = [site.lengths, *(var.aval.shape for var in site.eqn.invars)]
    return (
        len(site.avals) == 1 == len(site.kept)
        and all(0 not in shape for shape in shapes)
        and jnp.issubdtype(site.avals[0].dtype, jnp.floating)
    )


def _is_convolution(site: Site) -> bool:
    return (
        site.name == "conv_general_dilated"
        and list(site.weights) == [1]
        and site.eqn.params["batch_group_count"] == 1
    )


def _is_gram(site: Site) -> bool:
    """Return whether products of a convolution's positions are small.

    Otherwise its patches take more memory than computing its gradient directly.
    """
    kernel, params = site.eqn.invars[1].aval.shape, site.eqn.params
    stacked = zip(site.lengths, site.weights[1].stacked, strict=True)
    groups = math.prod(n for n, is_stacked in stacked if is_stacked)
    layer_groups = params["feature_group_count"]
    outputs = kernel[params["dimension_numbers"].rhs_spec[0]] // layer_groups
    inputs = math.prod(kernel) // (outputs * layer_groups)
    steps = math.prod(site.lengths) // groups
    positions = site.avals[0].size // (layer_groups * outputs) * steps
    return _formulas.is_gram(positions, inputs, outputs)


def _takes_rows(site: Site) -> bool:
    """Return whether each index, or tuple of indices, selects a whole row."""
    params, shape = site.eqn.params, site.eqn.invars[0].aval.shape
    numbers = params["dimension_numbers"]
    indexed = set(numbers.start_index_map)
    whole = all(
        params["slice_sizes"][i] == (1 if i in indexed else n)
        for i, n in enumerate(shape)
    )
    return (
        list(site.weights) == [0]
        and whole
        and indexed == set(numbers.collapsed_slice_dims)
        and not numbers.operand_batching_dims
        # Symbolic sizes count as few.
        and math.prod(shape[i] for i in indexed if isinstance(shape[i], int))
        <= _MOST_ROWS
    )


def _arranged(site: Site, x: jax.Array, *axes: Sequence[int]) -> jax.Array:
    """Arrange as (examples, groups, positions, size), from axes of one step."""
    (weight,) = site.weights.values()
    first = 1 + len(site.lengths)
    groups, positions, size = ([first + i for i in each] for each in axes)
    steps = range(1, first)
    stacked = [i for i in steps if weight.stacked[i - 1]]
    groups = stacked + groups
    positions = [i for i in steps if i not in stacked] + positions
    shape = [math.prod(x.shape[i] for i in each) for each in (groups, positions, size)]
    return x.transpose(0, *groups, *positions, *size).reshape(x.shape[0], *shape)


def _matrices(site: Site, x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (weight,) = site.weights
    contract, batch = site.eqn.params["dimension_numbers"]
    contracted, batched = contract[1 - weight], batch[1 - weight]
    rank = x.ndim - 1 - len(site.lengths)
    free = [i for i in range(rank) if i not in (*contracted, *batched)]
    # Axes of the output: batch, free axes on the left, free axes on the right.
    width = len(site.avals[0].shape) - len(batched) - len(free)
    of_x = [len(batched) + (0 if weight else width) + i for i in range(len(free))]
    of_w = [len(batched) + (len(free) if weight else 0) + i for i in range(width)]
    # The order of contracted axes does not affect the norm.
    a = _arranged(site, x, batched, free, contracted)
    return a, _arranged(site, d, range(len(batched)), of_x, of_w)


def _patches(site: Site, x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    params = site.eqn.params
    numbers = params["dimension_numbers"]
    kernel = site.eqn.invars[1].aval.shape
    channels = params["feature_group_count"]

    # Return (examples, groups, steps, images, channels, ...), and the images of all
    # steps as one axis.
    def images(x, spec):
        x = _arranged_images(site, x, spec)
        return x, x.reshape(-1, *x.shape[4:])

    def positions(x, lead):
        x = x.reshape(*lead, channels, x.shape[1] // channels, -1)
        x = x.transpose(0, 1, 4, 2, 3, 6, 5)
        examples, groups, feature_groups, steps, count, places, size = x.shape
        return x.reshape(
            examples, groups * feature_groups, steps * count * places, size
        )

    x, flat = images(x, numbers.lhs_spec)
    patches = lax.conv_general_dilated_patches(
        flat,
        [kernel[i] for i in numbers.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        precision=lax.Precision.HIGHEST,
    )
    d, flat = images(d, numbers.out_spec)
    return positions(patches, x.shape[:4]), positions(flat, d.shape[:4])


def _arranged_images(site: Site, x: jax.Array, spec: Sequence[int]) -> jax.Array:
    """Arrange as (examples, groups, steps, images, channels, ...)."""
    (weight,) = site.weights.values()
    first = 1 + len(site.lengths)
    stacked = [i for i in range(1, first) if weight.stacked[i - 1]]
    rest = [i for i in range(1, first) if i not in stacked]
    x = x.transpose(0, *stacked, *rest, *(first + i for i in spec))
    groups = math.prod(x.shape[1 : 1 + len(stacked)])
    return x.reshape(x.shape[0], groups, -1, *x.shape[first:])


def _rows(site: Site, ids: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    params, shape = site.eqn.params, site.eqn.invars[0].aval.shape
    numbers = params["dimension_numbers"]
    if ids.dtype.itemsize < 4:
        # A dtype of fewer bits may not hold the number of rows, and JAX wraps integers
        # of Python, so that existing rows would count as out of range.
        ids = ids.astype(jnp.int32)
    row, live = jnp.zeros(ids.shape[:-1], jnp.int32), True
    for i, axis in enumerate(numbers.start_index_map):
        one, last = ids[..., i], shape[axis] - 1
        if params["mode"] != lax.GatherScatterMode.CLIP:
            live = live & (one >= 0) & (one <= last)
        row = row * (last + 1) + jnp.clip(one, 0, last).astype(jnp.int32)
    # An out-of-range index reads no row, unless the mode clips it.
    row = jnp.where(live, row, -1)
    batch = [i for i in range(len(site.avals[0].shape)) if i not in numbers.offset_dims]
    row = _arranged(site, row, (), range(len(batch)), ())[..., 0]
    return row, _arranged(site, d, (), batch, numbers.offset_dims)
