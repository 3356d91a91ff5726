"""Clip a tree: lay it out, decide, apply.

    clip = clip_of(TREE, L2, Hard())
    layout = layout_of(clip, tree)
    measured = clip.norm.measure(layout.blocks)
    limits = {"max_norm": layout.fill("max_norm", 1.0)}
    decision = decide(clip, layout, measured, limits)
    clipped, coefficients = apply(decision)

Transformations pass measured norms, with their memory, and thresholds from rules.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jax.typing import DTypeLike

from .._arrays import (
    _axis_names,
    _leaves,
    _numerics,
    _placement,
    _prefix,
    _validate,
    _xla,
)
from .._arrays._batching import MANY, Batched
from .._arrays._leaf import Leaf
from .._arrays._numerics import select
from .._arrays._types import AxisName, LeafLike, Mask, Number, PyTree, TreeDef
from .._norms import LEAST, Block, Measured, Measurement, declared_of
from .._responses import BaseResponse
from .._scopes import Groups, Scope, blocks_of, owners_of

# What NaN and inf do, by the values of `nonfinite=`:
#   propagate   a non-finite norm makes all elements that share it NaN (`alarm` in
#               `_scale`); elements moved to bounds keep NaN, and inf moves to its bound
#   zero        all elements that share a non-finite norm become zero (`respond` and
#               `scaled_or_zeroed` in `_scale`, `bounded` in `_bounded`)
#   raise       like propagate, and an error under `jax.experimental.checkify`
# For singular values, `_spectral/_singular_values.Cap` does the same. Where a
# norm is not finite, a rule's infinite threshold is made finite in
# `_thresholds/_learning`, so that the policy applies.
POLICIES = ("propagate", "zero", "raise")

# Thresholds under the name of the argument that set them, one value per block or
# stacked like the norms; two entries, "lower" and "upper", if elements have two bounds.
ByArgument = Mapping[str, list[Number] | Batched]


@dataclasses.dataclass(frozen=True)
class Clip:
    """Hold a clipping operation without its threshold."""

    scope: Scope
    norm: Measurement
    response: BaseResponse
    action: Action
    eps: Number = 0.0
    strict: bool = False
    nonfinite: str = "propagate"
    mask: Mask | None = None
    norm_mask: Mask | None = None
    clip_mask: Mask | None = None
    axis_name: AxisName | None = None

    def __post_init__(self) -> None:
        _validate.choice("nonfinite", self.nonfinite, POLICIES)
        _validate.flag("strict", self.strict)
        _validate.plain("eps", self.eps)
        _axis_names.check(self.axis_name)

    def at(self, step: jax.Array) -> Clip:
        """Return the operation with its response as a schedule sets it for a step."""
        response = self.response.at(step)
        if response is self.response:
            return self
        return dataclasses.replace(self, response=response)


class BlockOutcome(NamedTuple):
    """Hold the outcome of one step for one block, or for a row of blocks.

    Attributes:
      norm: The norm, or one norm per slice; or, if `number` is set, some of them, among
        which is the one that exceeds its threshold most.
      threshold: Broadcasts to the norm, as do the fields below.
      coefficient: The factor applied to the block.
      declared: The mapped axes that the norms are declared to be split over.
      nonfinite: Whether the norm is not finite; None until the record computes it.
      clipped: Whether the block is clipped, also computed there; if `number` is set,
        numbers whose sum is the number of clipped norms.
      number: The number of norms, or None if `norm` has all of them.
    """

    norm: jax.Array
    threshold: jax.Array
    coefficient: jax.Array
    declared: _axis_names.Declared
    nonfinite: Any = None
    clipped: Any = None
    number: int | None = None

    def total(self) -> Any:
        """Return the number of norms, a symbol if a size is symbolic."""
        return self.norm.size if self.number is None else self.number


class Decision(NamedTuple):
    """Hold the norms and thresholds of one run.

    Attributes:
      clip: The operation, with its response as it is in this step.
      layout: The leaves and the blocks.
      norms: One entry per block: a scalar, or an array with one norm per slice.
      norm_memory: One array per block, from which the next measurement starts.
      work: Intermediate results of the measurement for the action.
      thresholds: One entry per block, as the action fits them.
      rule_memory: The memory of the rules after the run.
      samples: The outcomes that `Action.sampled` found, each by its blocks.
      leaf_norms: The norm of each leaf of a tree with one norm, if these are recorded.
    """

    clip: Clip
    layout: Layout
    norms: Batched
    norm_memory: Sequence[jax.Array]
    work: Sequence[object]
    thresholds: Batched
    rule_memory: Sequence[PyTree]
    samples: dict[tuple[int, ...], BlockOutcome] | None = None
    leaf_norms: Any = None


class Layout(NamedTuple):
    """Hold the leaves of a tree, and its blocks.

    Attributes:
      flat: The tree, flattened.
      leaves: Its leaves; None where a leaf is not clippable.
      owners: The index of the block whose coefficient scales each leaf, or None.
      scaled: The leaves that are scaled as (index, leaf, block).
      blocks: The elements that share each norm.
      treedef: The structure of the norms.
    """

    flat: _leaves.Flat
    leaves: list[Leaf | None]
    owners: list[int | None]
    scaled: list[tuple[int, Leaf, int]]
    blocks: list[Block]
    treedef: TreeDef

    def tree(self, values: Sequence[object]) -> PyTree:
        """Return one value per block, in the structure `treedef`."""
        return jax.tree.unflatten(self.treedef, values)

    def entries(self, tree: PyTree) -> list[PyTree]:
        """Return the values of a tree of that structure, one per block."""
        return self.treedef.flatten_up_to(tree)

    def fill(self, name: str, prefix: PyTree) -> list[Number]:
        """Return one threshold per block, from a prefix of the tree of norms."""
        blocks = self.tree(range(len(self.blocks)))
        return self.entries(_prefix.fill(name, prefix, blocks))

    def rebuild(self, clipped: dict[int, object]) -> PyTree:
        """Return the tree with some leaves replaced, by their index.

        Each leaf is in the memory, of the host or the device, in which it was passed.
        """
        leaves = list(self.flat.leaves)
        for i, new in clipped.items():
            leaves[i] = _placement.back(new, leaves[i])
        return self.flat.rebuild(leaves)

    def used(self) -> list[Leaf]:
        """Return the leaves that are measured or scaled."""
        measured = {x for block in self.blocks for x in block.leaves}
        pairs = zip(self.leaves, self.owners, strict=True)
        return [x for x, owner in pairs if x and (owner is not None or x in measured)]


def lay_out(
    scope: Scope,
    tree: PyTree,
    masks: tuple[Mask | None, Mask | None, Mask | None] = (None, None, None),
    axis_name: AxisName | None = None,
) -> Layout:
    """Find the blocks of a tree and the block of each leaf.

    Args:
      scope: The scope of the norms.
      tree: The tree.
      masks: `mask=`, `norm_mask=` and `clip_mask=`.
      axis_name: The declared mapped axes.
    """
    flat = _leaves.flatten(tree)
    are_clippable = flat.clippable()
    in_mask, in_norm_mask, in_clip_mask = (
        _prefix.spread_mask(name, mask, flat, are_clippable)
        for name, mask in zip(("mask", "norm_mask", "clip_mask"), masks, strict=True)
    )
    if isinstance(scope, Groups):
        # A user's function of the tree must receive its leaves, not `Leaf` objects.
        scope = scope.labeled(flat.tree)
    declared = _axis_names.by_leaf(axis_name, flat)
    columns = flat.paths, flat.leaves, declared, are_clippable
    leaves = [
        Leaf.of(x, path, name) if is_clippable else None
        for path, x, name, is_clippable in zip(*columns, strict=True)
    ]
    to_measure = _selected(leaves, in_mask, in_norm_mask)
    to_scale = _selected(leaves, in_mask, in_clip_mask)
    blocks, treedef = blocks_of(scope, flat.rebuild(to_measure))
    index = jax.tree.unflatten(treedef, list(range(len(blocks))))
    owners = owners_of(scope, index, flat.rebuild(to_scale), flat.treedef)
    # A custom scope may return a block for a leaf that the masks exclude.
    owners = [None if x is None else i for x, i in zip(to_scale, owners, strict=True)]
    triples = zip(range(len(owners)), to_scale, owners, strict=True)
    scaled = [(i, x, block) for i, x, block in triples if x and block is not None]
    layout = Layout(flat, leaves, owners, scaled, blocks, treedef)
    for leaf in layout.used():
        _axis_names.check_reduced(leaf.path, leaf.array)
    return layout


def _selected(leaves: list[Leaf | None], *masks: list[bool]) -> list[Leaf | None]:
    """Return the leaves that are in all masks, None for others."""
    return [x if all(row) else None for x, *row in zip(leaves, *masks, strict=True)]


def layout_of(clip: Clip, tree: PyTree) -> Layout:
    """Lay out a tree for a clipping operation."""
    masks = clip.mask, clip.norm_mask, clip.clip_mask
    return lay_out(clip.scope, tree, masks, clip.axis_name)


def decide(
    clip: Clip,
    layout: Layout,
    measured: Measured,
    thresholds: ByArgument,
    rule_memory: Sequence[PyTree] = (),
) -> Decision:
    """Return a step's decision: its norms and the threshold of each."""
    fitted = clip.action.fit(clip, thresholds, measured.norms)
    return Decision(clip, layout, *measured, fitted, rule_memory)


def apply(decision: Decision) -> tuple[PyTree, Batched]:
    """Return the clipped tree and the coefficients."""
    clip, layout = decision.clip, decision.layout
    if clip.nonfinite == "raise":
        _check_finite(layout, decision.norms)
    if clip.response.compares_norms:
        # Other devices must have the same norms of this leaf.
        check_axes_known(layout)
    leaves, coefficients = clip.action.apply(decision)
    return layout.rebuild(leaves), coefficients


class Action(abc.ABC):
    """Fit thresholds to norms, and change leaves.

    Subclasses multiply leaves (`_scale`), move elements (`_move`) or cap singular
    values (`optclip/_spectral`).
    """

    def fit(self, clip: Clip, values: ByArgument, norms: Batched) -> Batched:
        """Return the threshold of each block in the dtype and shape of its norm."""
        ((name, of_blocks),) = values.items()
        if isinstance(of_blocks, Batched):
            stacks = [
                _fitted(clip, name, *pair)[0]
                for pair in zip(of_blocks.values, norms.values, strict=True)
            ]
            return _with_zeros(clip, Batched.tree_unflatten(norms.indices, stacks))
        limits: dict[int, tuple[jax.Array, bool]] = {}
        for index, stack in zip(norms.indices, norms.values, strict=True):
            # The norms of a stack have one type, so the first represents all.
            norm = stack if len(index) == 1 else stack[0]
            # A value is fitted once, since a number fills all leaves of a tree.
            distinct = {id(of_blocks[i]): of_blocks[i] for i in index}
            fits = {key: _fitted(clip, name, x, norm) for key, x in distinct.items()}
            limits.update((i, fits[id(of_blocks[i])]) for i in index)
        fitted = [limits[i] for i in range(len(of_blocks))]
        batched = norms.with_entries([limit for limit, _ in fitted])
        is_final = all(is_final for _, is_final in fitted)
        return batched if is_final else _with_zeros(clip, batched)

    @abc.abstractmethod
    def apply(self, decision: Decision) -> tuple[dict[int, LeafLike], Batched]:
        """Return the clipped leaves by their index, and the coefficients."""

    def recorded(
        self, decision: Decision, coefficients: Batched
    ) -> tuple[Batched, Batched]:
        """Return the threshold and the coefficient of each norm for the record."""
        return decision.thresholds, coefficients

    def sampled(self, decision: Decision, *, itemized: bool) -> Decision:
        """Return the decision with outcomes for the record that are found faster.

        Args:
          decision: The decision, before `apply`.
          itemized: Whether each block has an outcome of its own.
        """
        return decision

    def outcomes(self, decision: Decision, coefficients: Batched) -> Batched:
        """Return a `BlockOutcome` for each block."""
        norms = decision.norms
        blocks = decision.layout.blocks
        declared = norms.with_entries([declared_of(block) for block in blocks])
        limits, factors = self.recorded(decision, coefficients)
        return norms.map(BlockOutcome, limits, factors, declared)


class ActingScope(Scope):
    """A scope with a measurement and an action of its own."""

    @abc.abstractmethod
    def parts(
        self, norm: Measurement, response: BaseResponse, eps: Number
    ) -> tuple[Measurement, Action]:
        """Return the measurement and the action; raise if an argument does not fit."""


def check_axes_known(layout: Layout) -> None:
    """Raise if devices must agree on the norms of slices, and may not.

    They may not if neither types nor `axis_name=` specify the axes that split a leaf.
    They must if there is a memory, a common decision, or a response that compares.
    """
    slices = [x for b in layout.blocks for x in b.leaves if b.axis_of(x) is not None]
    if any(leaf.axis_name != () for leaf in slices):
        _axis_names.check_all_known()


def _check_finite(layout: Layout, norms: Batched) -> None:
    """Raise under checkify an error that names each leaf with a non-finite entry.

    A norm may also be non-finite because it overflows or was passed by the caller.
    """
    for leaf in layout.used():
        name = _leaves.named(leaf.path).replace("{", "{{").replace("}", "}}")
        # A debug check is inert outside checkify; a plain one would break jit.
        checkify.debug_check(
            jnp.all(jnp.isfinite(leaf.array)),
            f"non-finite update in {name} (nonfinite='raise')",
        )
    for norm in norms.entries():
        finite = jnp.all(jnp.isfinite(norm))
        checkify.debug_check(finite, "non-finite norm (nonfinite='raise')")


Limit = TypeVar("Limit", bound=jax.Array | np.ndarray)

# A smaller threshold counts as 0 in strict clipping: at 2**-36, the flushed squares of
# 2**40 elements, each below 2**-126, are a fraction of 2**-14 of the squared norm, or
# 2**-15 of the norm.
_LEAST_STRICT = {"float32": 2.0**-36, "float64": 2.0**-450}


def _with_zeros(clip: Clip, limits: Batched) -> Batched:
    def with_zeros(c: jax.Array) -> jax.Array:
        c = zero_below(clip, least_of(clip.strict, c.dtype), c)
        return _xla.computed_once(c) if len(limits.values) >= MANY else c

    return limits.map(with_zeros)


def _fitted(
    clip: Clip, name: str, value: Number, norm: jax.Array
) -> tuple[jax.Array, bool]:
    """Return the threshold, and whether `zero_below` has been applied to it."""
    limit = as_limit(_placement.beside(value, norm), norm.dtype)
    check_replicated({name: limit, "eps": clip.eps}, norm)
    is_final = isinstance(limit, np.ndarray)
    if is_final:
        limit = zero_below(clip, least_of(clip.strict, norm.dtype), limit)
    _validate.broadcasts(name, limit.shape, norm.shape)
    return _numerics.broadcast_like(jnp.asarray(limit), norm), is_final


def least_of(strict: bool, dtype: DTypeLike) -> float:
    """Return the smallest threshold that does not count as 0."""
    return (_LEAST_STRICT if strict else LEAST)[jnp.dtype(dtype).name]


def check_replicated(limits: dict[str, Number], norm: jax.Array) -> None:
    """Raise if a threshold or `eps` varies over devices that share the norm."""
    for argument, value in limits.items():
        if isinstance(value, jax.Array):
            _axis_names.check_replicated(argument, value, norm)


def zero_below(clip: Clip, least: float, limit: Limit) -> Limit:
    """Return the threshold, or 0 if it is below `least` and no signed parameter.

    A NumPy array stays one, since the program then has nothing left to compute.
    """
    if clip.response.signed:
        return limit
    if isinstance(limit, np.ndarray):
        return np.where(limit < least, np.zeros_like(limit), limit)
    return _zero_below(least, limit)


# Compiled, so that the thresholds of slices of one type are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _zero_below(least: float, limit: jax.Array) -> jax.Array:
    # A threshold of 0 is not replaced, so it keeps its derivative from above.
    return select((limit < least) & (limit != 0), jnp.zeros_like(limit), limit)


def as_limit(
    value: Number, dtype: DTypeLike, *, towards_zero: bool = False
) -> jax.Array | np.ndarray:
    """Return a threshold in `dtype`, a NumPy array if it is a number or NumPy array.

    A finite threshold stays finite, since an infinite one would change nothing.
    """
    info = jnp.finfo(dtype)
    is_static = isinstance(value, (numbers.Real, np.ndarray))
    of: Any = np if is_static else jnp
    exact = of.asarray(value if is_static else _placement.on_device(value))
    exact = exact.astype(np.float64) if is_static else exact
    if jnp.issubdtype(exact.dtype, jnp.floating) and exact.dtype.itemsize == 8:
        largest = float(info.max)
        bounded = of.where(of.isinf(exact), exact, of.clip(exact, -largest, largest))
        limit = bounded.astype(dtype)
        grew = of.abs(limit.astype(exact.dtype)) > of.abs(exact)
    else:
        # Of other numbers, only large integers are rounded.
        if jnp.issubdtype(exact.dtype, jnp.integer) and towards_zero:
            exact = _representable(exact, info.nmant + 1)
        return exact.astype(dtype)
    if not towards_zero:
        return limit
    # The cast rounds to nearest; a threshold that grew moves back by one step.
    return of.where(grew, of.nextafter(limit, of.zeros_like(limit)), limit)


def _representable(value: jax.Array, digits: int) -> jax.Array:
    """Return the next integers towards zero of at most so many binary digits."""
    bits = 8 * value.dtype.itemsize
    if bits <= digits:
        return value
    # The smallest integer has no positive counterpart, except as unsigned.
    size = jnp.abs(value).astype(f"uint{bits}")
    excess = jnp.maximum(bits - lax.clz(size).astype(jnp.int32) - digits, 0)
    lost = size & ((jnp.ones_like(size) << excess.astype(size.dtype)) - 1)
    lost = lost.astype(value.dtype)
    return jnp.where(value < 0, value + lost, value - lost)
