"""Compare the norms that a step recorded with those of the whole gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._arrays import _leaves, _packed_state, _validate
from .._arrays._leaf import Leaf
from .._clip import Layout, lay_out
from .._norms import LEAST
from .._scopes import LEAF, TREE, ScopeLike, as_scope
from .._typing import ClipRecord, Mask, PyTree
from . import _copies
from ._metrics import Recorded, as_kind, names_in, read_field, states_in
from ._text import listed, wrapped

# Squared norms in float32 differ less, also of small leaves on a mesh of CPUs.
_TOLERANCE = 1e-3
_HIDDEN = "Not visible: how the gradients were averaged or summed before."
_ADVICE = ' A state with record="leaves" shows in which leaf it differs.'
# Findings that are printed.
_MOST = 10


class NormCheck(NamedTuple):
    """Hold the result of `check_norms`; prints as a text.

    Attributes:
      ok: Whether all norms cover the whole arrays, and all devices agree.
      ratios: A dict from the path of each leaf, or the label of each group, to its
        squared recorded norm over the squared norm of the whole arrays: 1 if it is
        correct, 0 if the leaf is left out. One entry `""` for a global norm without
        `record="leaves"`.
      total: The same ratio for the norm of all leaves.
      disagreements: Gradients and entries of states whose copies differ.
      findings: One sentence per mistake; empty if `ok`.
      questions: Sentences on leaves that may be tied, or copies.
      name: Name of the record.
      others: Names of further records, which were not checked.
    """

    ok: bool
    ratios: dict[str, float]
    total: float
    disagreements: list[str]
    findings: list[str]
    questions: list[str]
    name: str
    others: list[str]

    def __str__(self) -> str:
        count = len(self.ratios)
        what = f"{count} of {count} norms of {self.name!r}"
        right = f"{what} cover the whole arrays, on all devices."
        lines = self.findings[:_MOST] or [right]
        more = len(self.findings) - _MOST
        lines += [f"... and {more} more"] if more > 0 else []
        if self.others:
            others = ", ".join(map(repr, self.others))
            lines.append(f"Not checked, pass name=: {others}.")
        return wrapped("\n".join([*lines, *self.questions[:3], _HIDDEN]))


def check_norms(
    opt_state: PyTree,
    grads: PyTree,
    *,
    over: ScopeLike = "tree",
    mask: Mask | None = None,
    name: str | None = None,
) -> NormCheck:
    """Compare the norms of a step with the whole gradients, on any mesh.

    Run it once before training, on the state after one step of a transformation with
    `record="leaves"` and on the gradients of this step. Each shard is summed in float64
    on the host, without specs, types or axis names.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by_global_norm(1.0, record="leaves")
      >>> grads = {"bias": jnp.array([3.0]), "kernel": jnp.array([[4.0]])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(optclip.check_norms(state, grads))
      2 of 2 norms of 'clip' cover the whole arrays, on all devices.
      Not visible: how the gradients were averaged or summed before.
      >>> print(optclip.check_norms(state, {**grads, "bias": jnp.array([6.0])}).ratios)
      {'bias': 0.25, 'kernel': 1.0}

    Args:
      opt_state: State of an optimizer after a step that was not skipped, as the step
        returned it; under `pmap` with its axis of devices. For the stages of a pipeline
        that have states of their own, a list of states.
      grads: The gradients that entered the clipping in this step, as global arrays:
        sharded arrays of any number of processes, which all call this, or NumPy. Under
        `pmap` without its axis if devices hold copies. For a list of states, a list.
      over: The scope of the transformation, such as `optclip.groups(labels)`. Default:
        the tree or whole leaves, as recorded.
      mask: Leaves that must enter the norm, as in `clip_by`. Default: all.
      name: Name of the record, as in `optclip.metrics`. Default: None, the first with
        norms of leaves, or else the first.

    Returns:
      A `NormCheck`; print it. `ratios` has the squared recorded norm of each leaf over
      the squared norm of the whole array: 1 if it is correct, 2 if it is counted twice,
      0 if it is left out. `findings` has a sentence for each mistake, `disagreements`
      what differs between devices, and `questions` what to look at. `ok` is True if all
      ratios are 1, the norm of the tree is the root of the sum of their squares, and
      devices agree, bit for bit, on gradients, norms, coefficients, thresholds and
      memories. Ratios may be off by 1e-3, and by 2**-7 for bfloat16, which XLA may
      round after it was measured.

    Raises:
      TypeError: Called inside `jax.jit`.
      ValueError: `name` is not the name of a record; the step was skipped or not
        taken; `grads` lacks a recorded leaf; or the norms are of slices or layers.

    Guarantees:
      No array is gathered. Not visible: how gradients were averaged or summed before
      the clipping; parts of leaves whose elements are below 2**-60. Norms other than L2
      have other ratios.
    """
    pairs = [(opt_state, grads)]
    is_list = isinstance(opt_state, list) and isinstance(grads, list)
    # A chain that was restored as a list has parts without a record.
    if is_list and opt_state and all(map(states_in, opt_state)):
        wanted = f"a list of {len(opt_state)} trees, one per state"
        is_pair = len(opt_state) == len(grads)
        _validate.require("grads", grads, is_pair, wanted)
        pairs = list(zip(opt_state, grads, strict=True))
    for x in jax.tree.leaves(pairs):
        _validate.outside_jit("an array of `opt_state` or `grads`", x)
    reads = [_read(*_state_in(state, name), tree, over, mask) for state, tree in pairs]
    read = reads[0] if len(reads) == 1 else _joined(reads)
    if not read.norms:
        read.norms[""] = read.shared[0][0], [*read.leaves]
    arrays = {f"gradient `{key or 'grads'}`": x.array for key, x in read.leaves.items()}
    questions = _copied(arrays, pairs[0][0])
    copies, unlike = _copies.compare(arrays)
    squares, fingerprints = _copies.sums([*arrays.values()], copies)
    columns = squares.tolist(), [x.size for x in read.leaves.values()]
    sizes = dict(zip(read.leaves, zip(*columns, strict=True), strict=True))
    for each in itertools.chain(*(states_in(state) for state, _ in pairs)):
        entries = jax.tree.leaves_with_path((each.state, dict(each.counts)))
        arrays = {f"state `{_leaves.path_str(path[1:])}`": x for path, x in entries}
        unlike += _copies.compare(arrays, by_row=jnp.ndim(each.state.clip_step) > 0)[1]
    ratios = {
        key: _ratio(norm, [sizes[x] for x in of])
        for key, (norm, of) in read.norms.items()
    }
    norms = [norm for norm, _ in read.norms.values()]
    total_norm = read.shared[0][0] if read.shared else math.hypot(*norms)
    total = _ratio(total_norm, [*sizes.values()])
    findings = list(_mistakes(unlike, ratios, total, read))
    marks = zip(sizes, fingerprints, strict=True)
    questions += _ties({x: (mark, sizes[x][1]) for x, mark in marks if sizes[x][0]})
    return NormCheck(
        not findings, ratios, total, unlike, findings, questions, *read.names
    )


def _copied(arrays: dict[str, Any], opt_state: PyTree) -> list[str]:
    """Return a question if the gradients are equal rows, as `pmap` returns copies."""
    rows = jnp.shape(states_in(opt_state)[0].state.clip_step)
    are_rows = rows and all(jnp.shape(x)[:1] == rows for x in arrays.values())
    if not are_rows or rows[0] < 2 or _copies.compare(arrays, by_row=True)[1]:
        return []
    return [
        f"All gradients are {rows[0]} equal rows: are they copies, as of pmap? Then"
        " pass one, jax.tree.map(lambda x: x[0], grads)."
    ]


class _Read(NamedTuple):
    """Hold what a step recorded.

    Attributes:
      norms: A dict from the key of each norm to the norm and the names of its leaves;
        empty if only the norm of all leaves is recorded.
      shared: The norm of all leaves, its threshold and coefficient, from each state;
        empty if leaves or groups have their own.
      leaves: A dict from the name of each leaf to the leaf.
      names: The name of the record, and those of the other records.
    """

    norms: dict[str, tuple[float, list[str]]]
    shared: list[list[float]]
    leaves: dict[str, Leaf]
    names: tuple[str, list[str]]


def _joined(reads: list[_Read]) -> _Read:
    """Return one reading of states on different devices, as of a pipeline."""
    norms, leaves = {}, {}
    shared = [x for read in reads for x in read.shared]
    for i, read in enumerate(reads):
        leaves |= {f"{i}/{x}": leaf for x, leaf in read.leaves.items()}
        for key, (norm, names) in read.norms.items():
            norms[f"{i}/{key}"] = norm, [f"{i}/{x}" for x in names]
    return _Read(norms, shared, leaves, reads[0].names)


def _state_in(
    opt_state: PyTree, name: str | None
) -> tuple[Recorded, str, tuple[str, list[str]]]:
    """Return the state that has the record, its key, its name and other names."""
    states = states_in(opt_state)
    names = _packed_state.numbered(names_in(states))
    records = [(each, key) for each in states for key in each.state.clip_record]
    found = {x: y for x, y in zip(names, records, strict=True) if name in (None, x)}
    is_name = name is None or (isinstance(name, str) and name != "")
    _validate.require("name", name, is_name, "a non-empty string", error=TypeError)
    wanted = "an optimizer state with a record of optclip"
    advice = "Pass the state after one step of a transformation with record=True."
    _validate.require("opt_state", opt_state, bool(names), wanted, advice)
    if not found:
        raise ValueError(_validate.must_be("name", f"one of {names}", name))
    # Of several, the first that has the norms of leaves.
    detailed = [
        x for x, y in found.items() if isinstance(_detailed(_record(*y)), Mapping)
    ]
    chosen = (detailed or [*found])[0]
    each, key = found[chosen]
    counts = (x for i in each.skips for x in states[i].counts.values())
    # Flax NNX keeps numbers in boxes.
    step, *skips = jax.tree.leaves(
        [each.state.clip_step, *(read_field(x, "skip_consecutive") for x in counts)]
    )
    # Devices that differ are a finding, also if the first one skipped the step.
    numbers = {str(i): x for i, x in enumerate([step, *skips])}
    _, unlike = _copies.compare(numbers, by_row=jnp.ndim(step) > 0)
    if not unlike and (not _copies.first(step) or any(map(_copies.first, skips))):
        raise ValueError(
            "`opt_state` must be the state after a step, got one before the first step"
            " or after a skipped step. Run one update on finite gradients."
        )
    return each, key, (chosen, [x for x in names if x != chosen])


def _record(recorded: Recorded, key: str) -> ClipRecord:
    return as_kind(ClipRecord, recorded.state.clip_record[key])


def _detailed(record: ClipRecord) -> Any:
    """Return the norms of leaves if they are recorded."""
    return record.clip_norm if record.clip_leaf_norm is None else record.clip_leaf_norm


def _read(
    recorded: Recorded,
    key: str,
    names: tuple[str, list[str]],
    grads: PyTree,
    over: ScopeLike,
    mask: Mask | None,
) -> _Read:
    record = _record(recorded, key)
    by_leaf = _blocks(lay_out(LEAF, grads, (mask, None, None)))
    paths = {block.leaves[0].path: key for key, block in by_leaf.items()}
    norms, scope = _by_key(_detailed(record)), as_scope(over)
    is_by_leaf = scope in (TREE, LEAF) and norms.keys() <= by_leaf.keys()
    if is_by_leaf or record.clip_leaf_norm is not None:
        blocks = by_leaf
    else:
        blocks = _blocks(lay_out(scope, grads, (mask, None, None)))
    is_of_layers = any(isinstance(x, Mapping) for x in norms.values())
    if is_of_layers or any(x.axis is not None for x in blocks.values()):
        raise ValueError(
            "`over` must give norms of whole leaves, got those of slices or layers."
            ' Check clip_by_global_norm(inf, record="leaves") on the same gradients.'
        )
    is_one_of_many = record.clip_fraction is not None and len(by_leaf) > 1
    if (is_one_of_many and "" in norms) or "" in norms.keys() - blocks.keys():
        raise ValueError(
            "`opt_state` has only one of several norms. Build the transformation with"
            ' record="leaves", and run one update.'
        )
    if unknown := norms.keys() - blocks.keys():
        raise ValueError(
            f"`grads` lacks {sorted(unknown)[:5]}, whose norms are recorded. Pass the"
            " gradients that the transformation received, with its mask= and, for"
            " groups, its over=."
        )
    leaves = {key: block.leaves[0] for key, block in by_leaf.items()}
    found = {
        key: (_copies.first(norms.get(key, 0.0)), [paths[x.path] for x in block.leaves])
        for key, block in blocks.items()
    }
    if isinstance(record.clip_norm, Mapping):
        return _Read(found, [], leaves, names)
    shared = record.clip_norm, record.clip_threshold, record.clip_coefficient
    shared = list(map(_copies.first, shared))
    return _Read(
        found if record.clip_leaf_norm is not None else {}, [shared], leaves, names
    )


def _blocks(layout: Layout) -> dict[str, Any]:
    return _by_key(_packed_state.keyed(layout.treedef, layout.blocks))


def _by_key(entries: Any) -> dict[str, Any]:
    """Return entries by name; a bare one has the name ""."""
    if not isinstance(entries, Mapping):
        return {"": entries}
    return {_packed_state.as_name(key): x for key, x in entries.items()}


def _ratio(norm: float, leaves: list[tuple[float, int]]) -> float:
    """Return the ratio of squares, from the squared norm and size of each leaf."""
    square, size = map(sum, zip((0.0, 0), *leaves, strict=True))
    # Squares of smaller elements are lost in float32.
    if norm**2 <= square <= size * LEAST["float32"] ** 2:
        return 1.0
    return norm**2 / square if square else math.inf


def _is_right(
    ratio: float, leaves: Iterable[Leaf] = (), tolerance: float = _TOLERANCE
) -> bool:
    # XLA may measure numbers before it rounds them to bfloat16.
    rounding = max((float(jnp.finfo(x.dtype).eps) for x in leaves), default=0.0)
    return abs(ratio - 1) <= max(tolerance, rounding)


def _mistakes(
    unlike: list[str], ratios: dict[str, float], total: float, read: _Read
) -> Iterator[str]:
    if unlike:
        yield (
            f"Devices hold different values of {listed(unlike)}: a mean or sum over"
            " devices is missing. The other findings are of the first device."
        )
    leaves = {k: [read.leaves[x] for x in of] for k, (_, of) in read.norms.items()}
    wrong = {k: x for k, x in ratios.items() if not _is_right(x, leaves[k])}
    causes = {k: _cause(x, read.norms[k][0], leaves[k]) for k, x in wrong.items()}
    are_alike = len(wrong) == len(ratios) and np.allclose(
        [*wrong.values()], total, rtol=_TOLERANCE, atol=0
    )
    # One norm alone has a common factor only if this is a number of devices.
    is_factor = len(wrong) > 1 or any(map(_is_square, (total, 1 / (total or 1))))
    if wrong and are_alike and is_factor and 0 < total < math.inf:
        also = f" Or: {causes[min(wrong)]}" if all(causes.values()) else ""
        yield (
            f"All norms: {total:.4g}: the step measured gradients"
            f" {math.sqrt(total):.4g} times as large as these: a sum over devices, a"
            f" scaled loss, or another step.{also}"
        )
        return
    for key, cause in causes.items():
        if cause:
            yield f"`{key or 'grads'}`: {wrong[key]:.4g}: {cause}"
    if others := [
        f"`{k or 'grads'}`: {wrong[k]:.4g}" for k, x in causes.items() if not x
    ]:
        yield (
            f"{listed(others)}: not the norm of these gradients or of their shards."
            " Pass those that entered the clipping in the recorded step."
            f"{_ADVICE if '' in wrong and len(read.leaves) > 1 else ''}"
        )
    if not wrong and not _is_right(total, read.leaves.values()):
        yield (
            f"The norm of all leaves: {total:.4g}, while each leaf is right: it is not"
            " the root of the sum of their squares."
        )
    words = "norm", "threshold", "coefficient"
    for word, numbers in zip(words, zip(*read.shared, strict=True), strict=False):
        if not np.allclose(numbers, numbers[0], _TOLERANCE, 0, equal_nan=True):
            each = ", ".join(f"{x:.4g}" for x in numbers)
            yield f"The {word} of all leaves differs between the states: {each}."


def _is_square(ratio: float) -> bool:
    root = round(math.sqrt(ratio)) if ratio < math.inf else 0
    return root > 1 and _is_right(ratio / root**2)


def _cause(ratio: float, norm: float, leaves: list[Leaf]) -> str:
    """Return the cause of a wrong ratio of squares, or no text."""
    if ratio == 0:
        return "left out of the norm. If this is meant, pass mask=."
    if not math.isfinite(ratio):
        return (
            "not finite, or 0 only in these gradients. Check a step with finite"
            " gradients."
        )
    copies = round(ratio)
    counted = 1 < copies <= jax.device_count() and _is_right(ratio / copies)
    what = f"counted {copies} times" if counted else "a part is missing"
    what = what if counted or ratio < 1 else "some shards are counted twice"
    advice = "Pass axis_name=specs, () for whole arrays."
    if axes := _summed_axes(norm, leaves):
        # A gathered leaf counts once per device of an axis that is not known here.
        gathered = ", or gathered before," if counted else ","
        summed, split = axes
        return (
            f"{what}: summed over {summed}{gathered} but split over {split}. {advice}"
        )
    return f"{what}. {advice}" if counted else ""


def _summed_axes(norm: float, leaves: list[Leaf]) -> tuple[str, str] | None:
    """Return the axes that were summed for this norm, and those that split the leaves.

    Sets of axes that explain the norm are alternatives.
    """
    places = [getattr(x.array, "sharding", None) for x in leaves]
    shardings = [x for x in places if isinstance(x, NamedSharding)]
    if not shardings or any(x.mesh != shardings[0].mesh for x in shardings):
        return None
    mesh = shardings[0].mesh
    if len(shardings) < len(leaves) or not isinstance(mesh, jax.sharding.Mesh):
        return None
    squares = np.sum([_copies.by_device(x.array, mesh.devices) for x in leaves], axis=0)
    axes = [name for name, size in mesh.shape.items() if size > 1]
    found = []
    for number in range(len(axes) + 1):
        for some in itertools.combinations(axes, number):
            summed = squares.sum(tuple(map(mesh.axis_names.index, some)))
            # The state is read on the first device. Of many sets of axes, one may be
            # close by chance.
            ratio = _ratio(norm, [(float(summed.flat[0]), 0)])
            if _is_right(ratio, tolerance=_TOLERANCE / 10):
                found.append(_in_words(some))
    split = {x for y in shardings for z in y.spec for x in np.atleast_1d(z) if x}
    whole = _in_words([x for x in axes if x in split])
    # Several leaves may be split over other axes each.
    found = [x for x in found if x != whole]
    return (" or ".join(found), whole) if found else None


def _in_words(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes)) or "no axis"


def _ties(fingerprints: dict[str, tuple[int, int]]) -> list[str]:
    """Return a question for each two leaves that hold the same numbers."""
    alike: dict[tuple[int, int], list[str]] = {}
    for key, fingerprint in fingerprints.items():
        alike.setdefault(fingerprint, []).append(key)
    return [
        f"`{a}` and `{b}` hold the same numbers: are they tied? Then pass one of them,"
        " since the norm counts both."
        for keys in alike.values()
        for a, b in itertools.pairwise(keys)
    ]
