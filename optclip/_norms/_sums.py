"""Add powers to the norm of each block: few reductions, in range, differentiable.

`norms_of` takes the roots of sums of powers, and guards squares against overflow. Small
arrays are stacked (`_parts_of`) or merged (`_merged`), so that XLA compiles few
reductions. `_totals` reduces each part, on a GPU in rows and columns that suit its
threads, and `_combined` adds the sums of a block, here and over devices.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .._arrays import _axis_names, _collectives, _leaves, _numerics, _placement, _xla
from .._arrays._batching import MANY, Batched
from .._arrays._numerics import select

# Smaller norms count as 0, since squares of their elements are flushed to zero.
LEAST = {"float32": 2.0**-60, "float64": 2.0**-500}

# Factors that keep the squares of all elements below the largest float.
_SHRINK = {"float32": 2.0**-80, "float64": 2.0**-600}

# Smaller arrays are merged or stacked, up to this many of one type, since XLA compiles
# a reduction in 9 ms, and 2,000 of them in 18 s.
_SMALL, _MERGED = 4096, 32

# XLA on CPU would store the sum of more large arrays than this.
_MERGED_LARGE = 12

# Values are reduced in rows of this length, since adding 4,000 values one by one has an
# error of 1e-4.
_ROW = 64

# XLA for TPU puts at most 256 numbers in one all-reduce. Merging values before they are
# sent makes it one all-reduce for 4,000 leaves instead of 16.
_SENT = 128

# On a GPU a large array is added in rows of one of these lengths, each by one block of
# threads.
_SHORTEST, _LONGEST = 256, 4096

# On a GPU columns are split into at most `_PARTS` parts, until `_COLUMNS` threads are
# busy: 32 in a block of threads, and 192 blocks for the 132 processors of an H100.
_PARTS, _COLUMNS = 32, 6144

# The most vectors that are added together on a GPU, times two kinds of power, since XLA
# limits the arguments of a kernel.
_TOGETHER = 32

T = TypeVar("T")

# For each kind of power to add, whether elements are shrunk first.
Kinds = tuple[bool, ...]


class Member(NamedTuple):
    """Describe how one array enters the norm of its block.

    Unless `layers` is None, the block has a vector of norms, one for each index of that
    axis of its arrays.
    """

    block: int
    axis: tuple[int, ...] | None
    split: _axis_names.Axes
    layers: int | None = None

    def of_block(self, value: jax.Array) -> jax.Array:
        """Return the sums of an array in the shape of the norms."""
        if self.layers is None:
            return value
        # Arrays of one stack may be sharded differently, and have few layers.
        return _placement.whole(lax.squeeze(value, self.axis or ()))

    def of_array(self, norm: jax.Array, x: jax.Array) -> jax.Array:
        """Return the norms in a shape that broadcasts to an array."""
        return norm if self.layers is None else _placement.along(norm, x, self.layers)


class NormPlan(NamedTuple):
    """Hold the static properties of all blocks; `declared` has one entry per block.

    `guarded` is whether squares are guarded against overflow.
    """

    ord: float
    dtype: str
    members: tuple[Member, ...]
    declared: tuple[_axis_names.Declared, ...]
    guarded: bool


class Part(NamedTuple):
    """Hold arrays of one type that are reduced together.

    Attributes:
      arrays: One array, or arrays of one block, whose powers are merged first.
      axis: The axes to reduce; None for all.
      shape: The shape of each sum.
      members: The member of each sum. Several are those of a stack, whose rows are
        small arrays, each the only one of its block.
    """

    arrays: list[jax.Array]
    axis: tuple[int, ...] | None
    shape: tuple[int, ...]
    members: list[Member]

    def sums(self, total: jax.Array) -> list[jax.Array]:
        """Return the sum of each member, from the reduced array."""
        if len(self.members) == 1:
            return [total if total.shape == self.shape else total.reshape(self.shape)]
        # Shaped before it is unstacked: XLA on CPU then removes the slices if these are
        # stacked again, and otherwise compiles a kernel for each.
        return list(jnp.unstack(total.reshape(len(self.members), *self.shape)))


class Sums(NamedTuple):
    """Hold, per kind of power, the sum of a member or a vector still to be added."""

    member: Member
    shape: tuple[int, ...]
    kinds: Sequence[jax.Array]


class Power(NamedTuple):
    """Compute the power of each element; equal instances are traced once."""

    ord: float
    dtype: str

    def __call__(
        self, x: jax.Array, scale: Sequence[jax.Array] | None = None
    ) -> jax.Array:
        # Powers are computed in the dtype of the sum, where squares of float16 fit.
        x = _leaves.widen(x, self.dtype)
        if self.ord != 2:
            return lax.abs(x)
        parts = (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
        if scale is not None:
            # The added zero keeps the product whole: XLA may turn the square of x * c
            # alone into x * x * (c * c), which is inf * 0.
            factor, zero = scale
            parts = [part * factor + zero for part in parts]
        squares = [lax.square(part) for part in parts]
        return squares[0] if len(squares) == 1 else squares[0] + squares[1]

    def merged(self, kinds: Kinds, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return for each kind the powers of arrays of one type, merged."""
        merge = lax.max if self.ord == math.inf else lax.add
        scales = [self._shrink() if is_shrunk else None for is_shrunk in kinds]
        of_kinds = ([self(x, scale) for x in arrays] for scale in scales)
        return [_by_pairs(merge, powers)[0] for powers in of_kinds]

    def _shrink(self) -> list[jax.Array]:
        """Return the factor of shrunk elements, and a zero to add.

        The barrier hides both from XLA, which would merge the factors of a square.
        """
        scale = [jnp.asarray(x, self.dtype) for x in (_SHRINK[self.dtype], 0)]
        return lax.optimization_barrier(scale)


# Compiled, so that norms of one type are traced once.
@jax.jit
def flush_small(norm: jax.Array) -> jax.Array:
    """Return the norm, or 0 if it is smaller than `LEAST`."""
    return select(norm < LEAST[norm.dtype.name], jnp.zeros_like(norm), norm)


def norms_of(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return the norm of each block; inf above the largest float."""
    # In an eager call, a custom derivative takes as long as the norms of small arrays.
    is_traced = any(isinstance(x, Tracer) for x in arrays)
    return (_differentiable if is_traced else _compiled)(arrays, plan)


# The derivative of JAX is not finite at zero, and would differentiate both branches of
# the guard.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _differentiable(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    return _compiled(arrays, plan)


@functools.partial(jax.jit, static_argnums=1)
def _compiled(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return the norms.

    If a sum of squares overflows, the norm is computed from shrunk elements.
    Accelerators always compute both sums, since they read the elements once for both,
    and a branch would make them wait for the host. A CPU would read them twice, so it
    computes the second sum only if the first is inf.
    """
    # The function is compiled, since each call outside of jax.jit would compile the
    # branches again.
    arrays = _joined(arrays, plan)
    if plan.ord not in (1, 2, math.inf):
        return _by_largest(arrays, plan)
    if plan.ord == math.inf:
        return _totals(_parts_of(arrays, plan), plan)[0]
    is_guarded = plan.ord == 2 and plan.guarded
    is_guarded = is_guarded and any(_may_overflow(x, plan) for x in arrays)
    norm = functools.partial(_norm_of_total, plan.ord)

    def elsewhere(arrays: list[jax.Array]) -> Batched:
        add = functools.partial(_totals, _parts_of(arrays, plan), plan)
        (totals,) = add()
        if not is_guarded:
            return totals.map(norm)

        def shrunk(small: float = _SMALL) -> Batched:
            return add((True,), small=small)[0]

        def shrunk_if_needed() -> Batched:
            is_over = totals.map(lambda total: total == jnp.inf).any()
            # A branch that hardly ever runs may add large arrays too, which halves it.
            merging = functools.partial(shrunk, math.inf)
            return lax.cond(_agreed(is_over, plan), merging, lambda: totals)

        small = lax.platform_dependent(cpu=shrunk_if_needed, default=shrunk)
        return totals.map(norm, small)

    def on_gpu(arrays: list[jax.Array]) -> Batched:
        kinds = (False, True) if is_guarded else (False,)
        totals, *small = _totals(_parts_of(arrays, plan), plan, kinds, in_rows=True)
        return totals.map(norm, *small)

    return _xla.on_gpu(on_gpu, elsewhere, arrays)


@_differentiable.defjvp
def _norms_of_jvp(
    plan: NormPlan,
    primals: tuple[list[jax.Array]],
    tangents: tuple[list[jax.Array]],
) -> tuple[Batched, Batched]:
    (arrays,), (tangent_arrays,) = primals, tangents
    norms = norms_of(arrays, plan)
    entries = norms.entries()
    slopes, ties = [], []
    for x, dx, member in zip(arrays, tangent_arrays, plan.members, strict=True):
        x, dx = (_leaves.widen(each, plan.dtype) for each in (x, dx))
        norm = member.of_array(entries[member.block], x)
        direction, is_tie = _direction(x, norm, plan.ord)
        slopes.append(_sum(jnp.real(jnp.conj(direction) * dx), member.axis))
        ties.append(_sum(is_tie, member.axis))
    slope = _combined(slopes, plan.members, plan)
    if plan.ord == math.inf:
        count = _combined(ties, plan.members, plan)
        slope = [s / jnp.maximum(c, 1) for s, c in zip(slope, count, strict=True)]
    return norms, norms.with_entries(slope)


def _direction(
    x: jax.Array, norm: jax.Array, ord: float
) -> tuple[jax.Array, jax.Array]:
    """Return the conjugate derivative of the norm, and flags of the largest elements.

    With respect to a leaf of zeros both are zero.
    """
    size = jnp.abs(x)
    moving = (norm > 0) & jnp.isfinite(norm)
    live = (size > 0) & moving
    # The divisor is 1 for a zero or non-finite norm, so that the derivatives of the
    # quotient stay finite. The selects below set the direction to 0.
    norm = jnp.where(moving, norm, jnp.ones_like(norm))
    if ord == 2:
        # Zeros are included: there too the second derivative is 1 / norm.
        direction = jnp.where(moving, _numerics.divided_by(x, norm), jnp.zeros_like(x))
        return direction, jnp.zeros_like(size)
    modulus = jnp.where(live, size, jnp.ones_like(size))
    sign = jnp.where(live, _numerics.divided_by(x, modulus), jnp.zeros_like(x))
    if ord == 1:
        return sign, jnp.zeros_like(size)
    if ord == math.inf:
        # Elements that share the maximum share its derivative; the flags are counted.
        tie = (live & (size == norm)).astype(size.dtype)
        return sign * tie.astype(sign.dtype), tie
    # A zero to a negative power would be infinite; it is replaced before the power.
    fraction = jnp.where(live, _numerics.ratio(size, norm), jnp.ones_like(size))
    return sign * (fraction ** (ord - 1)).astype(sign.dtype), jnp.zeros_like(size)


# Compiled, so that sums of one type are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _norm_of_total(
    ord: float, total: jax.Array, small: jax.Array | None = None
) -> jax.Array:
    """Return the norm of a sum, or of a shrunk one if the sum overflowed."""
    if ord == 1:
        return total
    if small is None:
        return _root(total)
    is_over = total == jnp.inf
    # The root of the sum in use is taken once, then scaled back if it was shrunk.
    norm = _root(select(is_over, small, total))
    return select(is_over, norm / _SHRINK[norm.dtype.name], norm)


def _by_largest(arrays: list[jax.Array], plan: NormPlan) -> Batched:
    """Return norms of other orders, with powers relative to the largest element.

    Each array is scaled by its own maximum. A common maximum would make XLA copy its
    computation into the loop of every array, and make the compile time quadratic.
    """
    peaks, powers = [], []
    for x, member in zip(arrays, plan.members, strict=True):
        modulus = Power(plan.ord, plan.dtype)
        peaks.append(_collectives.largest(x, member.axis, 0.0, modulus))
        fraction = _numerics.fraction_of_peak(modulus(x), peaks[-1]) ** plan.ord
        powers.append(_sum(fraction, member.axis))
    peak = _combined(peaks, plan.members, plan, largest=True)
    relative = []
    for power, leaf_peak, member in zip(powers, peaks, plan.members, strict=True):
        of_block = member.of_array(peak[member.block], leaf_peak)
        fraction = _numerics.fraction_of_peak(leaf_peak, of_block)
        relative.append(power * fraction**plan.ord)
    # Where the peak is inf the fractions are NaN, but the norm is inf.
    norms = [
        select(p == jnp.inf, p, t ** (1 / plan.ord) * p)
        for t, p in zip(_combined(relative, plan.members, plan), peak, strict=True)
    ]
    return Batched(norms, plan.declared)


def _parts_of(arrays: list[jax.Array], plan: NormPlan) -> list[Part]:
    """Return one part per array, or per stack of small arrays with a norm each.

    XLA compiles three kernels for the sum of each array, and two kernels for a stack.
    """
    in_block = collections.Counter(member.block for member in plan.members)
    shapes = [
        ()
        if m.axis is None
        else tuple(1 if i in m.axis else size for i, size in enumerate(x.shape))
        for x, m in zip(arrays, plan.members, strict=True)
    ]
    groups: dict[Hashable, list[int]] = {}
    for i, (x, member) in enumerate(zip(arrays, plan.members, strict=True)):
        is_small = 0 < _leaves.size_of(x) <= _SMALL and not _xla.may_be_split(x)
        is_alone = in_block[member.block] == 1 and member.layers is None
        is_row = is_small and is_alone and math.prod(shapes[i]) == 1
        kind = jax.typeof(x), member.axis, member.split
        groups.setdefault(kind if is_row else i, []).append(i)
    parts = []
    for group in groups.values():
        for few in _pieces(group, _MERGED if len(group) >= MANY else 1):
            first, members = few[0], [plan.members[i] for i in few]
            axis, x = members[0].axis, arrays[first]
            if len(few) > 1:
                axis, x = (1,), jnp.stack([arrays[i].ravel() for i in few])
            parts.append(Part([x], axis, shapes[first], members))
    return parts


def _merged(parts: list[Part], small: float) -> list[Part]:
    """Merge parts of one block and type that are smaller than `small`."""
    groups: dict[Hashable, list[Part]] = {}
    for i, part in enumerate(parts):
        (x,), member = part.arrays, part.members[0]
        is_alone = part.axis is not None or _leaves.size_of(x) >= small
        groups.setdefault(i if is_alone else (member, jax.typeof(x)), []).append(part)
    merged = []
    for group in groups.values():
        is_small = _leaves.size_of(group[0].arrays[0]) < _SMALL
        for few in _pieces(group, _MERGED if is_small else _MERGED_LARGE):
            merged.append(few[0]._replace(arrays=[part.arrays[0] for part in few]))
    return merged


def _totals(
    parts: list[Part],
    plan: NormPlan,
    kinds: Kinds = (False,),
    *,
    small: float = _SMALL,
    in_rows: bool = False,
) -> list[Batched]:
    """Return for each kind of power the sum of each block, or its largest element.

    Args:
      parts: The arrays.
      plan: The blocks.
      kinds: For each kind, whether elements are shrunk first.
      small: Arrays of a block below this size are merged.
      in_rows: Whether to add in few kernels of a GPU: one per large array, and few for
        all others. XLA adds a large array in two: many blocks of threads add its parts,
        and one block adds their sums. Here the sums of the parts of all arrays are
        added together, and all kinds of power in the same kernels.
    """
    power = Power(plan.ord, plan.dtype)
    sums: list[Sums] = []
    vectors: list[Sums] = []
    for part in _merged(parts, small):
        member, is_stack = part.members[0], len(part.members) > 1
        is_number = not is_stack and math.prod(part.shape) == 1
        if in_rows and is_number and _leaves.size_of(part.arrays[0]) > 0:
            rows = _in_rows(power, kinds, part.arrays)
            vectors += [Sums(member, part.shape, row) for row in rows]
            continue
        totals = _reduced(power, kinds, part.axis, in_rows, part.arrays)
        of_members = zip(part.members, *map(part.sums, totals), strict=True)
        sums += [Sums(one, part.shape, values) for one, *values in of_members]
    sums += _added(vectors)
    members, largest = [each.member for each in sums], plan.ord == math.inf
    rows = [each.kinds for each in sums]
    by_kind = zip(*rows, strict=True) if rows else [()] * len(kinds)
    return [
        Batched(_combined(values, members, plan, largest=largest), plan.declared)
        for values in by_kind
    ]


# Compiled, as are the next functions, so that arrays of one type are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _reduced(
    power: Power,
    kinds: Kinds,
    axis: tuple[int, ...] | None,
    in_parts: bool,
    arrays: list[jax.Array],
) -> list[jax.Array]:
    """Reduce the merged powers of arrays over axes; on a GPU, columns in parts."""
    if power.ord == math.inf and len(arrays) == 1:
        return [_collectives.largest(arrays[0], axis, 0.0, power)]
    if power.ord == math.inf:
        return [_collectives.largest(x, axis, 0.0) for x in power.merged(kinds, arrays)]
    parted = _in_parts(arrays[0], axis, guarded=len(kinds) > 1) if in_parts else None
    if parted is None:
        return [_sum(x, axis) for x in power.merged(kinds, arrays)]
    parts, at = parted
    sums_of_parts = [jnp.sum(x, at + 1) for x in power.merged(kinds, [parts])]
    # Without the barrier XLA would merge the sums in parts and those of the parts: AGC
    # of GPT-2 would launch 281 kernels on an H100, not 241, with 10.6 MB, not 1.7.
    sums_of_parts = lax.optimization_barrier(sums_of_parts)
    return [jnp.sum(each, at, keepdims=True) for each in sums_of_parts]


def _in_parts(
    x: jax.Array, axis: tuple[int, ...] | None, *, guarded: bool
) -> tuple[jax.Array, int] | None:
    """Return an array with its columns in parts, along an axis before the added one.

    Whole columns are too little work for all threads, so XLA would store the shrunk
    powers first, an array as large as the leaf. Rows have no such limit.
    """
    lengths = [(i, x.shape[i]) for i in axis or () if x.shape[i] != 1]
    if len(lengths) != 1 or not isinstance(x.size, int) or x.size < _SMALL:
        return None
    ((at, length),) = lengths
    columns = x.size // length
    counts = [n for n in range(1, _PARTS + 1) if length % n == 0]
    needed = _COLUMNS if guarded else 0
    enough = (n for n in counts if n * columns >= needed and length <= n * _LONGEST)
    count = next(enough, counts[-1])
    if count == 1 or math.prod(x.shape[at + 1 :]) == 1:
        return None
    return x.reshape((*x.shape[:at], count, length // count, *x.shape[at + 1 :])), at


@functools.partial(jax.jit, static_argnums=(0, 1))
def _in_rows(
    power: Power, kinds: Kinds, arrays: list[jax.Array]
) -> list[list[jax.Array]]:
    """Return vectors of each kind, whose sum is the sum of all powers.

    They are the powers of small arrays, merged, and the sums of rows of a large one.
    """
    x = arrays[0]
    if not isinstance(x.size, int):
        return [[jnp.sum(y).reshape(1) for y in power.merged(kinds, arrays)]]
    if x.size < _SMALL:
        return [[y.ravel() for y in power.merged(kinds, arrays)]]
    lengths = range(_LONGEST, _SHORTEST - 1, -1)
    length = next((n for n in lengths if x.size % n == 0), _LONGEST)
    parts, whole = [x.ravel()], x.size - x.size % length
    if whole != x.size:
        # Elements after the last whole row are rows of their own.
        parts = [parts[0][:whole], parts[0][whole:, None]]
    parts[0] = parts[0].reshape(-1, length)
    return [[jnp.sum(y, 1) for y in power.merged(kinds, [part])] for part in parts]


def _added(vectors: list[Sums]) -> list[Sums]:
    """Add the numbers of vectors, those of many blocks at once."""
    of_sum: dict[tuple[Member, Hashable], list[Sums]] = {}
    for each in vectors:
        varying = _axis_names.varying(jax.typeof(each.kinds[0]))
        of_sum.setdefault((each.member, varying), []).append(each)
    of_length: dict[tuple[int, int, Hashable], list[list[Sums]]] = {}
    for (_, varying), same in of_sum.items():
        for piece in _pieces(same, _TOGETHER):
            length = sum(each.kinds[0].size for each in piece)
            of_length.setdefault((length, len(piece), varying), []).append(piece)
    added = []
    for (_, count, _), pieces in of_length.items():
        for group in _pieces(pieces, max(1, _TOGETHER // count)):
            rows = [[each.kinds for each in piece] for piece in group]
            columns = _rows_of_equal_length(rows)
            for (first, *_), *values in zip(group, *columns, strict=True):
                shaped = [x.reshape(first.shape) for x in values]
                added.append(first._replace(kinds=shaped))
    return added


@jax.jit
def _rows_of_equal_length(
    rows: list[list[list[jax.Array]]],
) -> list[tuple[jax.Array, ...]]:
    """Add the numbers of each row, a list of vectors by kind; return sums by kind."""
    kinds = range(len(rows[0][0]))
    vectors = [vector[k] for k in kinds for row in rows for vector in row]
    table = jnp.concatenate(vectors).reshape(len(kinds), len(rows), -1)
    totals = jnp.sum(table, axis=2)
    return [jnp.unstack(total) for total in jnp.unstack(totals)]


def _combined(
    values: Sequence[jax.Array],
    members: Sequence[Member],
    plan: NormPlan,
    *,
    largest: bool = False,
) -> list[jax.Array]:
    """Add the values of each block, or take their maximum; 0 for an empty block.

    One collective per set of mapped axes combines the values of all blocks.
    """
    by_axes: dict[_axis_names.Axes, dict[int, list[jax.Array]]] = {}
    for value, member in zip(values, members, strict=True):
        by_block = by_axes.setdefault(member.split, {})
        by_block.setdefault(member.block, []).append(member.of_block(value))
    totals: list[list[jax.Array]] = [[] for _ in plan.declared]
    for axes, by_block in by_axes.items():
        here = {i: _of_many(x, largest=largest) for i, x in by_block.items()}
        if axes:
            here = (_collectives.over_devices if largest else lax.psum)(here, axes)
        for i, value in here.items():
            totals[i].append(value)
    zero = jnp.zeros((), plan.dtype)
    return [_of_many(each or [zero], largest=largest) for each in totals]


def _of_many(values: list[jax.Array], *, largest: bool) -> jax.Array:
    """Add arrays of one shape, or take their maximum, element by element."""
    if not largest and _xla.may_be_split(values[0]):
        values = _by_pairs(lax.add, values, _SENT)
    while len(values) > 1:
        # Without the barrier XLA on CPU unrolls this into a chain over all values and
        # the kernels that compute them: 2,000 leaves compile in 15 s instead of 10.
        stacks = map(jnp.stack, _pieces(values, _ROW))
        stacks = [lax.optimization_barrier(stack) for stack in stacks]
        largest_of = functools.partial(_collectives.largest, initial=0.0)
        reduce = largest_of if largest else _sum
        values = [reduce(stack, (0,))[0] for stack in stacks]
    return values[0]


def _by_pairs(
    merge: Callable[[jax.Array, jax.Array], jax.Array],
    values: list[jax.Array],
    most: int = 1,
) -> list[jax.Array]:
    """Merge values in pairs until at most `most` remain."""
    while len(values) > most:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [merge(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values


def _pieces(items: list[T], most: int) -> list[list[T]]:
    return [items[i : i + most] for i in range(0, len(items), most)]


def _sum(x: jax.Array, axis: _xla.Axis) -> jax.Array:
    """Sum over `axis`, kept as dimensions of 1; None sums all, to a scalar."""
    return jnp.sum(x, axis=axis, keepdims=axis is not None)


def _joined(arrays: list[jax.Array], plan: NormPlan) -> list[jax.Array]:
    """Merge adjacent reduced axes into one, and leave axes of length 1 in their place.

    XLA on CPU adds along one axis in a tree of sums of 32 elements, and along k axes in
    sums of 32**k, which lose up to 45 and 7,000 roundings. An array that XLA splits
    over devices is unchanged, since XLA would gather it.
    """
    if plan.ord == math.inf:
        return arrays
    joined = []
    for x, member in zip(arrays, plan.members, strict=True):
        axis = member.axis
        shape = [math.prod(x.shape)] if axis is None else list(x.shape)
        reduced = () if axis is None else axis
        for i in sorted(reduced):
            if i + 1 in reduced:
                shape[i], shape[i + 1] = 1, shape[i] * shape[i + 1]
        joined.append(x if _xla.may_be_split(x) else lax.reshape(x, shape))
    return joined


def _agreed(flag: jax.Array, plan: NormPlan) -> jax.Array:
    """Return the flag, set on all devices of a collective if it is set on one of them.

    A device that takes the branch alone would wait forever for the others. This happens
    if, for example, one device has a column of zeros in a leaf, and the columns of
    another leaf are split.
    """
    of_block: dict[int, set[Hashable]] = {}
    for member in plan.members:
        of_block.setdefault(member.block, set()).update(member.split)
    # A dict and not a set, since all processes must name the axes in the same order.
    spoken = dict.fromkeys(name for member in plan.members for name in member.split)
    # Axes over which some block is not summed, since types may not specify which axes
    # the flag varies over.
    apart = tuple(n for n in spoken if any(n not in b for b in of_block.values()))
    varies = {*_axis_names.split_axes(flag), *_axis_names.split_axes(flag, apart)}
    axes = tuple(name for name in spoken if name in varies)
    if not axes:
        return flag
    # The flag is sent as a number, whose maximum is 1 if it is set on any device.
    return _collectives.reduced_over(lax.pmax, flag.astype(jnp.float32), axes) > 0


def _root(total: jax.Array) -> jax.Array:
    root = jnp.sqrt(total)
    # The select keeps XLA on CPU from computing the roots of slices in the kernel of a
    # sum, which made a second sum over the embedding of GPT-2 eight times slower.
    return select(total > 0, root, total) if total.ndim else root


def _may_overflow(x: jax.Array, plan: NormPlan) -> bool:
    """Return whether a sum of squares of finite elements can overflow in plan.dtype."""
    largest = 2 * jnp.finfo(x.dtype).maxexp + math.log2(max(_leaves.size_of(x), 1))
    return largest >= jnp.finfo(plan.dtype).maxexp
