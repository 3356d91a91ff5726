"""Define blocks, the interface of norms, and entrywise norms of blocks."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _axis_names, _leaves, _placement, _validate, _xla
from .._arrays._batching import MANY, Batched
from .._arrays._leaf import Leaf, axes_in_data, counted_from_zero
from .._arrays._types import AxisName, LeafLike
from . import _sums


@dataclasses.dataclass(frozen=True)
class Block:
    """Group the leaves that share a norm, or with `axis` the slices of one leaf.

    Args:
      leaves: List of arrays or BCOO matrices.
      axis: Axes that each norm of a single leaf covers, counted from 0; `()` for each
        element. Default: None, one norm of all leaves.
      stacked: Axis along which each leaf stacks layers. There is one norm per layer, of
        all leaves. Default: None, no layers.
    """

    leaves: Sequence[Leaf]
    axis: tuple[int, ...] | None = None
    stacked: int | None = None

    def __post_init__(self) -> None:
        advice = "Wrap a single leaf in a list."
        _validate.kind("leaves", self.leaves, (list, tuple), "a list of arrays", advice)
        # Users' blocks hold arrays, blocks of a layout the leaves that it made.
        leaves = [x if isinstance(x, Leaf) else _leaf(x) for x in self.leaves]
        object.__setattr__(self, "leaves", leaves)
        if self.stacked is not None:
            _check_layers(self)
        if self.axis is None:
            return
        is_valid = isinstance(self.axis, tuple) and len(self.leaves) == 1
        axes = _validate.as_ints(self.axis) if is_valid else None
        if axes is None or min(axes, default=0) < 0:
            wanted = "None, or with a single leaf a tuple of ints counted from 0"
            advice = f"Leaves in the block: {len(self.leaves)}."
            raise TypeError(_validate.must_be("axis", wanted, self.axis, advice))
        object.__setattr__(self, "axis", axes)

    def axis_of(self, leaf: Leaf) -> tuple[int, ...] | None:
        """Return the axes of a leaf that each norm covers; None for all leaves."""
        if self.stacked is None:
            return self.axis
        layers = self.stacked % leaf.ndim
        return tuple(a for a in range(leaf.ndim) if a != layers)

    def along(self, leaf: Leaf, values: jax.Array) -> jax.Array:
        """Return one value per layer in a shape that broadcasts to a leaf."""
        # A leaf that is scaled but not measured was not checked before.
        _check_layers(self, leaf)
        array = jnp.asarray(leaf.array)
        return _placement.along(values, array, (self.stacked or 0) % leaf.ndim)


def _check_layers(block: Block, *more: Leaf) -> None:
    """Raise unless all leaves stack the same number of layers."""
    axis, lengths = block.stacked, {}
    if type(axis) is not int or block.axis is not None or not block.leaves:
        raise TypeError(
            _validate.must_be(
                "stacked",
                "None, or for one or more leaves an int, without `axis`",
                axis,
            )
        )
    for leaf in (*block.leaves, *more):
        if leaf.matrix is not None:
            raise ValueError(
                f"{_leaves.named(leaf.path, 'A')} is a BCOO matrix, which cannot be"
                " stacked layers. Convert it with todense(), or exclude it with mask=."
            )
        counted_from_zero((axis,), leaf, leaf.path)
        lengths.setdefault(leaf.shape[axis], leaf)
    if len(lengths) > 1:
        both = [f"{n} in {_leaves.named(x.path)}" for n, x in lengths.items()]
        raise ValueError(
            f"All leaves of a stack must have the same number of layers along axis"
            f" {axis}, got {both[0]} and {both[1]}. Pass each stack by its own path;"
            " in shard_map, split the layers of all leaves alike."
        )


def _leaf(value: LeafLike) -> Leaf:
    _leaves.check_format((), value)
    return Leaf.of(value)


def declared_of(block: Block) -> _axis_names.Declared:
    """Return the mapped axes that split the norms of a block, as far as declared."""
    if not block.leaves:
        return _axis_names.Declared()
    # Names alone specify the split of a vector of layers, but not of a matrix.
    leaf = max(block.leaves, key=lambda leaf: leaf.ndim)
    axis = block.axis_of(leaf)
    if axis is None:
        return _axis_names.Declared()
    return _axis_names.Declared(
        _axis_names.declared_across_slices(axis, leaf.axis_name)
    )


def are_apart(blocks: Sequence[Block]) -> bool:
    """Return whether no single computation accepts the arrays of all blocks.

    Raises:
      ValueError: This holds for the arrays of one block, which share a norm.
    """
    if not _placement.are_apart([x.array for block in blocks for x in block.leaves]):
        return False
    for block in blocks:
        _placement.check_together(
            [(_leaves.named(x.path), x.array) for x in block.leaves],
            "Leaves that share a norm",
            "Use one norm per leaf, as clip_by_norm does, or compute the norm yourself"
            " and pass it with use_norm= to clip_by_global_norm.",
        )
    return True


class Measured(NamedTuple):
    """Hold the norms of some blocks.

    Attributes:
      norms: One entry per block.
      memory: One array per block, from which the next measurement starts; empty if the
        norm has no memory.
      work: Other results for each block that the clipping action can use, such as a
        factorization of each matrix. Their type depends on the measurement.
    """

    norms: Batched
    memory: Sequence[jax.Array] = ()
    work: Sequence[object] = ()


class Measurement(abc.ABC):
    """Compute the norms of blocks.

    Attributes:
      is_entrywise: Whether rounding each element toward zero never increases the norm,
        which `strict` clipping relies on.
      composes: Whether the norm of a tree is the norm of its leaves' norms. Otherwise
        the tree is measured separately from its leaves with `record="leaves"`.
      remembers: Whether a measurement starts from the memory of the previous one.
    """

    is_entrywise: bool = False
    composes: bool = False
    remembers: bool = False

    @abc.abstractmethod
    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the norm of each block.

        Unless `guarded`, a norm reads inf if the sum of its squares overflows. Unless
        `flushed`, a norm below 2**-60 is returned unchanged, for use in another norm.
        """

    def init(self, blocks: Sequence[Block]) -> Sequence[jax.Array]:
        """Return the memory before the first measurement."""
        return ()


@dataclasses.dataclass(frozen=True)
class Norm(Measurement):
    """Compute an entrywise norm: `sum(abs(x) ** p) ** (1 / p) / n ** k`.

    Here n is the number of elements. Names and orders are also accepted as norms:
    `"l1"`, `"l2"`, `"inf"`, `"rms"` (`Norm(2.0, 0.5)`), `"average"` (`Norm(2.0, 1.0)`),
    or a number p.

    Example:
      >>> import jax.numpy as jnp
      >>> import optclip
      >>> tx = optclip.clip_by(1.0, norm=optclip.norms.Norm(3.0))
      >>> updates = jnp.array([3.0, 4.0, 5.0])
      >>> _, state = tx.update(updates, tx.init(updates))
      >>> print(optclip.metrics(state)["clip/norm"])
      6.0

    Args:
      ord: Order p, a Python or NumPy number above 0, or inf for the largest modulus.
        Orders below 0.5 soon overflow to inf. Default: 2.
      per_count: Exponent k, from 0 to 1; with p = 2, 0.5 is the root mean square and 1
        TensorFlow's average norm. Default: 0.
    """

    ord: float = 2.0
    per_count: float = 0.0

    is_entrywise = True

    def __post_init__(self) -> None:
        wanted = (
            "a Python or NumPy number above 0, or inf for the largest absolute value"
        )
        _validate.require(
            "ord", self.ord, not _validate.is_beyond_floats(self.ord), wanted
        )
        order = _validate.as_float(self.ord)
        if order is None:
            advice = f"None means 2. {_validate.static('ord', self.ord)}"
            if isinstance(self.ord, str):
                advice = "Pass a number, such as 2.0 or float('inf')."
            raise TypeError(_validate.must_be("ord", wanted, self.ord, advice))
        _validate.require("ord", self.ord, order > 0, wanted)
        object.__setattr__(self, "ord", order)
        _validate.fraction("per_count", self.per_count)
        exponent = _validate.as_float(self.per_count)
        _validate.require(
            "per_count", self.per_count, exponent is not None,
            "a Python or NumPy number", "An array may be traced.", TypeError,
        )  # fmt: skip
        object.__setattr__(self, "per_count", exponent)
        # A mean of means differs from the mean of all elements. A class with its own
        # `measure` would measure the norms of leaves as if they were elements.
        composes = exponent == 0 and type(self).measure is Norm.measure
        object.__setattr__(self, "composes", composes)

    def measure(
        self,
        blocks: Sequence[Block],
        memory: Sequence[jax.Array] = (),
        *,
        guarded: bool = True,
        flushed: bool = True,
    ) -> Measured:
        """Return the norm of each block."""
        if are_apart(blocks):
            parts = [
                self.measure([block], guarded=guarded, flushed=flushed).norms
                for block in blocks
            ]
            norms = [norm for part in parts for norm in part.entries()]
            return Measured(Batched(norms, [*map(declared_of, blocks)]))
        arrays, members, counts = [], [], [0] * len(blocks)
        for i, block in enumerate(blocks):
            for leaf in block.leaves:
                x, axis = _leaves.as_jax(leaf.array), block.axis_of(leaf)
                declared = leaf.axis_name
                if declared is None and axis != ():
                    _axis_names.check_known()
                split = _axis_names.split_axes_of_slices(x, leaf.shape, axis, declared)
                if self.per_count:
                    counts[i] += _count(leaf, axis, split)
                if leaf.matrix is not None and axis is not None:
                    axis = axes_in_data(leaf.matrix, axis)
                arrays.append(x)
                layers = None if block.stacked is None else block.stacked % leaf.ndim
                members.append(_sums.Member(i, axis, split, layers))
        # The norm of single elements is the modulus, for any order.
        are_elements = all(m.axis == () and m.layers is None for m in members)
        plan = _sums.NormPlan(
            ord=math.inf if are_elements else self.ord,
            dtype=accumulator(arrays),
            members=tuple(members),
            declared=tuple(map(declared_of, blocks)),
            guarded=guarded,
        )
        norms = _sums.norms_of(arrays, plan)
        if self.per_count:
            powers = [_leaves.count_as(n, plan.dtype) ** self.per_count for n in counts]
            # A NumPy number has no weak type.
            of = np.dtype(plan.dtype).type
            divisors = [of(x) if isinstance(x, float) else x for x in powers]
            norms = norms.map(lambda root, n: root / n, norms.with_entries(divisors))
        if flushed:
            norms = norms.map(_sums.flush_small)
        if len(blocks) >= MANY:
            norms = norms.map(_xla.computed_once)
        return Measured(norms)


L1: Norm = Norm(1.0)
L2: Norm = Norm(2.0)
INF: Norm = Norm(math.inf)
RMS: Norm = Norm(2.0, per_count=0.5)
AVERAGE: Norm = Norm(2.0, per_count=1.0)

NormName = Literal["l1", "l2", "inf", "rms", "average", "spectral"]
NormLike = Measurement | float | NormName
"""A norm's name, its order p, or a `Norm`."""

# The package `_spectral` registers its norm here, since this package may not import it.
BY_NAME: dict[str, Measurement] = {
    "l1": L1,
    "l2": L2,
    "inf": INF,
    "rms": RMS,
    "average": AVERAGE,
}


def as_norm(norm: NormLike) -> Measurement:
    """Return the norm of a `norm=` argument."""
    if isinstance(norm, Measurement):
        return norm
    if isinstance(norm, str) and norm in BY_NAME:
        return BY_NAME[norm]
    if isinstance(norm, (int, float, np.generic)) and _validate.is_number(norm):
        return Norm(norm)
    names = ", ".join(map(repr, BY_NAME))
    wanted = f"{names}, an order p, or a Norm or Spectral of optclip.norms"
    advice = _validate.static("norm", norm)
    raise TypeError(_validate.must_be("norm", wanted, norm, advice))


def of_order(ord: float | None) -> Norm:
    """Return the norm of an `ord=` argument; None means 2."""
    return L2 if ord is None else Norm(ord)


def _count(leaf: Leaf, axis: tuple[int, ...] | None, split: _axis_names.Axes) -> Any:
    """Count the elements of one leaf in a norm, on all devices of its split.

    The count is an int, or under `jax.export` a symbol, whose type is not public.
    """
    if leaf.matrix is not None and split:
        raise ValueError(
            "A BCOO leaf must be on one device for a norm with a mean, such as 'rms',"
            f" got one that is split over the mesh axes {split}, whose number of"
            " elements is unknown. Pass a norm without a mean, or dense leaves."
        )
    shape = leaf.shape
    here = math.prod(shape if axis is None else [shape[a] for a in axis])
    return here * _axis_names.axes_size(split)


def accumulator(arrays: Sequence[jax.Array]) -> str:
    """Return the dtype in which elements of these arrays are added."""
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in arrays)
    return "float64" if wide else "float32"


def measure(
    blocks: Sequence[Block], norm: NormLike = "l2", axis_name: AxisName | None = None
) -> list[jax.Array]:
    """Compute the norm of each block, over all devices that split it.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip import norms
      >>> kernel, bias = jnp.array([[3.0, 0.0], [4.0, 1.0]]), jnp.array([2.0])
      >>> columns, all = norms.Block([kernel], (0,)), norms.Block([kernel, bias])
      >>> print(*norms.measure([columns, all], "inf"))
      [[4. 1.]] 4.0

    Args:
      blocks: List of `Block`, one per norm.
      norm: `"l2"` (default), `"l1"`, `"inf"`, `"rms"`, `"average"`, `"spectral"`, an
        order p above 0, or a `Norm` or `Spectral`.
      axis_name: Mapped axes that split all leaves: a name, a tuple of names (`()` for
        none) or a `PartitionSpec`. Default: read from each leaf's type.

    Returns:
      One norm per block, float32, or float64 if any leaf is. Each is a scalar, or with
      `axis` has the shape of the leaf with 1 at these axes. Norms read inf above the
      largest float, means if their sum or root is above it before the division. They
      read 0 below 2**-60 (2**-500 in float64), and NaN if an element is NaN.

    Raises:
      ValueError: A leaf lacks an axis, or `axis_name` is not mapped.
    """
    _check(blocks, axis_name)
    declared = functools.partial(dataclasses.replace, axis_name=axis_name)
    blocks = [dataclasses.replace(x, leaves=[*map(declared, x.leaves)]) for x in blocks]
    return as_norm(norm).measure(blocks).norms.entries()


def _check(blocks: Sequence[Block], axis_name: AxisName | None) -> None:
    _validate.kind("blocks", blocks, (list, tuple), "a list of optclip.norms.Block")
    _axis_names.check(axis_name, by_leaf=False)
    for i, block in enumerate(blocks):
        _validate.kind(f"`blocks[{i}]`", block, Block, "an optclip.norms.Block")
        for leaf in block.leaves:
            _check_leaf(block, leaf.value)


def _check_leaf(block: Block, leaf: LeafLike) -> None:
    try:
        is_valid = _leaves.is_clippable((), leaf)
    except TypeError:
        is_valid = False
    _validate.require(
        "A leaf of a block",
        leaf,
        is_valid,
        "a real or complex floating-point array, number or BCOO matrix",
        error=TypeError,
    )
    if block.axis and max(block.axis) >= jnp.ndim(leaf):
        raise ValueError(
            f"`axis` must name axes that the leaf has, got {block.axis} for the shape"
            f" {jnp.shape(leaf)}. Count axes from 0."
        )
