"""Compare the norms that a step recorded with those of the whole gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import _leaves, _packed_state, _validate
from .._clip import Layout, lay_out
from .._scopes import LEAF, TREE, ScopeLike, as_scope
from .._typing import ClipRecord, Mask, PyTree
from . import _copies
from ._metrics import Recorded, as_kind, names_in, read_field, states_in
from ._norm_findings import RecordedNorms, copied, mistakes, ratio_of, ties
from ._text import wrapped

_HIDDEN = "Not visible: how the gradients were averaged or summed before."
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
        right = (
            f"{count} of {count} norms of {self.name!r} cover the whole arrays, on all"
            " devices."
        )
        lines, more = self.findings[:_MOST] or [right], len(self.findings) - _MOST
        lines += [f"... and {more} more"] if more > 0 else []
        others = ", ".join(map(repr, self.others))
        lines += [f"Not checked, pass name=: {others}."] if others else []
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
    pairs = _pairs(opt_state, grads)
    read = _joined(
        [_norms_in(*_recorded_in(state, name), x, over, mask) for state, x in pairs]
    )
    arrays = {f"gradient `{key or 'grads'}`": x.array for key, x in read.leaves.items()}
    copies, unlike = _copies.compare(arrays)
    # A norm of all leaves differs with that of one, which is named first.
    unlike += sorted(
        _unlike_in(x for x, _ in pairs), key=lambda x: "leaf_norm" not in x
    )
    norms, fingerprints = _copies.norms([*arrays.values()], copies)
    sizes = [x.size for x in read.leaves.values()]
    whole = dict(zip(read.leaves, zip(norms.tolist(), sizes, strict=True), strict=True))
    ratios = {
        key: ratio_of(norm, map(whole.__getitem__, of))
        for key, (norm, of) in read.norms.items()
    }
    total = ratio_of(read.total, whole.values())
    findings = list(mistakes(unlike, ratios, total, read))
    questions = copied(arrays, pairs[0][0])
    marks = dict(zip(whole, zip(fingerprints, sizes, strict=True), strict=True))
    questions += ties({x: mark for x, mark in marks.items() if whole[x][0]})
    return NormCheck(
        not findings, ratios, total, unlike, findings, questions, *read.names
    )


def _pairs(opt_state: PyTree, grads: PyTree) -> list[tuple[PyTree, PyTree]]:
    """Return each state with its gradients."""
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
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                "`opt_state` or `grads` has an array that a step deleted by donation."
                " Take this step without donate_argnums=."
            )
    return pairs


def _unlike_in(opt_states: Iterable[PyTree]) -> Iterator[str]:
    """Yield the entries of states whose copies differ."""
    for each in itertools.chain(*map(states_in, opt_states)):
        entries = jax.tree.leaves_with_path((each.state, dict(each.counts)))
        arrays = {f"state `{_leaves.path_str(path[1:])}`": x for path, x in entries}
        by_row = jnp.ndim(each.state.clip_step) > 0
        yield from _copies.compare(arrays, by_row=by_row)[1]


def _joined(reads: list[RecordedNorms]) -> RecordedNorms:
    """Return the norms of states on different devices, as of a pipeline."""
    norms, leaves = {}, {}
    shared = [x for read in reads for x in read.shared]
    for i, read in enumerate(reads):
        stage = f"{i}/" if len(reads) > 1 else ""
        leaves |= {f"{stage}{x}": leaf for x, leaf in read.leaves.items()}
        for key, (norm, names) in read.norms.items():
            norms[f"{stage}{key}"] = norm, [f"{stage}{x}" for x in names]
    if shared and not norms:
        norms[""] = shared[0][0], [*leaves]
    return RecordedNorms(norms, shared, leaves, reads[0].names)


def _recorded_in(
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
    _validate.require("name", name, bool(found), f"one of {names}")
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
    if not unlike and (any(map(_copies.first, skips)) or not _copies.first(step)):
        when = (
            "after a skipped" if any(map(_copies.first, skips)) else "before the first"
        )
        raise ValueError(
            f"`opt_state` must be the state after a step, got one {when} step. Run one"
            " update on finite gradients."
        )
    return each, key, (chosen, [x for x in names if x != chosen])


def _record(recorded: Recorded, key: str) -> ClipRecord:
    return as_kind(ClipRecord, recorded.state.clip_record[key])


def _detailed(record: ClipRecord) -> Any:
    """Return the norms of leaves if they are recorded."""
    return record.clip_norm if record.clip_leaf_norm is None else record.clip_leaf_norm


def _norms_in(
    recorded: Recorded,
    key: str,
    names: tuple[str, list[str]],
    grads: PyTree,
    over: ScopeLike,
    mask: Mask | None,
) -> RecordedNorms:
    """Return the norms in a record, with the leaves of the gradients."""
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
            " groups, over=optclip.groups(labels)."
        )
    leaves = {key: block.leaves[0] for key, block in by_leaf.items()}
    found = {
        key: (_copies.first(norms.get(key, 0.0)), [paths[x.path] for x in block.leaves])
        for key, block in blocks.items()
    }
    if isinstance(record.clip_norm, Mapping):
        return RecordedNorms(found, [], leaves, names)
    shared = record.clip_norm, record.clip_threshold, record.clip_coefficient
    shared = list(map(_copies.first, shared))
    found = {} if record.clip_leaf_norm is None else found
    return RecordedNorms(found, [shared], leaves, names)


def _blocks(layout: Layout) -> dict[str, Any]:
    return _by_key(_packed_state.keyed(layout.treedef, layout.blocks))


def _by_key(entries: Any) -> dict[str, Any]:
    """Return entries by name; a bare one has the name ""."""
    if not isinstance(entries, Mapping):
        return {"": entries}
    return {_packed_state.as_name(key): x for key, x in entries.items()}
