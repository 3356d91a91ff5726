"""Addresses of the arrays of a state: the state around each, its role, and its leaves.

The path of an array ends in that of its leaf; where this is unclear, `init` runs once
more on marked leaves. Engines show what the memories of their rules measure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaves
from .._arrays._leaves import MarkKey
from .._arrays._types import KeyPath, PyTree
from .._clip import layout_of
from .._thresholds import Rule, Scaled, norms_of_rules
from .._transforms import Engine, Noted, noting_engines
from .._typing import ClipState

# A leaf is the texts of the keys of its path, and its shape.
Leaf = tuple[tuple[str, ...], tuple[int, ...]]
Owner = frozenset[Leaf]
# The leaf of a label without leaves, and the owner of the memory of a rule for losses.
NO_LEAF: Leaf = (("no leaf",), (0,))
LOSS: Owner = frozenset([(("max_loss", "of", "skip"), ())])

# The keys of lists, tuples and dicts, which are not states.
_PLAIN = jax.tree_util.SequenceKey, jax.tree_util.DictKey

# The states below these fields are of their own kind, since they hold other norms than
# the clipping of updates.
_OTHER_NORMS = ("skip_norm", "constrain_clip")
# The named tuples below these fields are parts of one state.
_PARTS = ("clip_memory", "clip_record", "skip_loss", "skip_record")
# Below these fields are digests, and names that may be those of leaves.
_NAMED = {
    *("by_digest", "skip_loss", "clip_record", "skip_record", "history_rows"),
    *("hyperparams", "hyperparams_states"),  # Of `optax.inject_hyperparams`.
}
# `optax.inject_hyperparams` counts the steps of a schedule in a state of its own.
_ALIASES = {"WrappedScheduleState": optax.ScaleByScheduleState}

# The roles of arrays that move together, with the position of each array, and of the
# entry on its first axis or None.
Slots = dict[tuple[str, ...], tuple[int, int | None]]
# What arrays measure, and their owner.
Group = tuple[Hashable, Owner | None]


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Describe a state, and the arrays for which it is the innermost one.

    Attributes:
      kind: Its type, the field of `_OTHER_NORMS` above it, and its name.
      labels: The labels around it, such as those of `optax.partition`.
      measured: The norm and the scope that it measures, or "".
      leaves: The leaves that it belongs to.
      groups: Its arrays by what they measure, which is None except for memories, and by
        their owner: a leaf, the leaves below a norm, or None for counts.
    """

    kind: tuple[Any, str, str]
    labels: tuple[str, ...]
    measured: str
    leaves: set[Leaf]
    groups: dict[Group, Slots] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        name = self.kind[0].__name__ if self.kind[0] else "a state without a type"
        return f"{name} '{self.kind[2]}'" if self.kind[2] else name


class _Norms(NamedTuple):
    """Describe the norms of a ClipState.

    Attributes:
      engine: The engine that measures them.
      leaves: The leaves below the norms.
      memories: By the place of a memory in `clip_memory`: what it measures, the leaves
        below each norm, and whether there is one norm without a path.
    """

    engine: Engine
    leaves: Owner
    memories: dict[tuple[int, ...], tuple[Hashable, list[Owner], bool]]


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Wrap a leaf in a node with a number. Other attributes are those of the leaf."""

    key: MarkKey
    leaf: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "leaf"), name)


jax.tree_util.register_pytree_with_keys(
    _Mark,
    lambda mark: ([(mark.key, mark.leaf)], mark.key),
    lambda key, leaves: _Mark(key, *leaves),
)


def leaves_of(params: PyTree) -> dict[KeyPath, Leaf]:
    """Return the leaves of parameters by their path.

    Raises:
      ValueError: The keys of two leaves have the same texts.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast  # The parameters of the optimizer inside.
    pairs = jax.tree.leaves_with_path(params)
    texts = _leaves.keys_of([path for path, _ in pairs])
    if twice := {"/".join(path) for path, n in Counter(texts).items() if n > 1}:
        raise ValueError(
            f"Two leaves have the path {min(twice)!r}, as in {{0: x, '0': y}}, so that"
            " carry_over cannot distinguish their states. Rename one of them."
        )
    return {
        path: (keys, jnp.shape(x)) for (path, x), keys in zip(pairs, texts, strict=True)
    }


def addressed(
    init: Callable[[PyTree], PyTree], params: PyTree, leaves: dict[KeyPath, Leaf]
) -> tuple[PyTree, list[State]]:
    """Return the result of `init`, and the states in it.

    Args:
      init: A function that returns a state.
      params: Its argument.
      leaves: The leaves of `params`.
    """
    with noting_engines() as noted:
        state = init(params)
    norms = {id(each.state.clip_step): _norms_of(each) for each in noted}
    nodes: dict[KeyPath, Any] = {(): state}
    states: dict[KeyPath, State] = {}
    # The states of each label of `optax.partition`, by the path of its state.
    labeled: dict[KeyPath, list[State]] = {}
    for index, (above, below, owner) in enumerate(_owned(init, params, state, leaves)):
        fields = [i for i, key in enumerate(above) if not isinstance(key, _PLAIN)]
        parts = [i for i in fields if _text(above[i]) in _PARTS]
        start = (parts[:1] or fields[-1:] or [0])[0]
        place, inside = above[:start], (*above[start:], *below)
        node = _node(nodes, place) if fields else None
        of_node = norms.get(id(node.clip_step)) if isinstance(node, ClipState) else None
        if place not in states:
            states[place] = _state(place, node, of_node)
            outer = [place[:i] for i in fields if i < start]
            masks = [x for x in outer if isinstance(_node(nodes, x), optax.MaskedState)]
            labeled.setdefault([(), *masks][-1], []).append(states[place])
        for what, role, owner_of_slot, row in _slots(inside, owner, of_node):
            group = states[place].groups.setdefault((what, owner_of_slot), {})
            # Two rules of one class, each for some leaves, may each have a count.
            while role in group:
                role = (*role, "again")
            group[role] = index, row
    for label, inside in labeled.items():
        _add_leaves(inside, nodes[label] if label else None, leaves)
    return state, [*states.values()]


def _add_leaves(
    states: list[State], label: PyTree, leaves: dict[KeyPath, Leaf]
) -> None:
    """Add the leaves of the states below one label, or below none."""
    for each in states:
        owners = [owner for what, owner in each.groups if owner and what is None]
        each.leaves.update(*owners)
    # A count belongs to the leaves of its label, as far as other states show these.
    rest = set[Leaf]().union(*(each.leaves for each in states if label is not None))
    inside = jax.tree.leaves(label, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    is_hiding = any(isinstance(x, optax.MaskedNode) for x in inside)
    rest = rest or {*([NO_LEAF] if is_hiding else leaves.values())}
    for each in states:
        each.leaves.update(() if each.leaves else rest)


def _node(nodes: dict[KeyPath, Any], path: KeyPath) -> Any:
    """Return the node at a path, and store it."""
    if path not in nodes:
        above = _node(nodes, path[:-1])
        is_child = functools.partial(operator.is_not, above)
        children = jax.tree.leaves_with_path(above, is_leaf=is_child)
        nodes.update({(*path[:-1], key): child for (key,), child in children})
    return nodes[path]


def _owned(
    init: Callable[[PyTree], PyTree],
    params: PyTree,
    state: PyTree,
    leaves: dict[KeyPath, Leaf],
) -> Iterator[tuple[KeyPath, KeyPath, Owner | None]]:
    """Yield the keys above and below the path of the leaf, and the owner, of arrays."""
    pairs = jax.tree.leaves_with_path(state)
    starts = [_starts(path, leaves) for path, _ in pairs]
    grown: list[Any] = []
    # Marks cost another run of `init`. Most paths end in that of one leaf without them.
    # A number may be a count, although a parameter is named `count` too.
    if not all(
        jnp.ndim(x) > 0 and [leaves[path[i:]][1] for i in found] == [jnp.shape(x)]
        if found
        else not jnp.ndim(x) or _is_ours(path)
        for (path, x), found in zip(pairs, starts, strict=True)
    ):
        runs = (_grown(init, params, node) for node in (_Mark, lambda _, x: x))
        paths = [path for path, _ in pairs]
        same = (x for x in runs if [_leaves.unmarked(path) for path, _ in x] == paths)
        grown = next(same, [])
    has_marks = any(_leaves.unmarked(path) != path for path, _ in grown)
    in_order, has_axes = [*leaves.items()], any(shape for _, shape in leaves.values())
    for i, (path, x) in enumerate(pairs):
        at, end, leaf = len(path), (), None
        keys, longer = grown[i] if grown else (path, None)
        if has_marks:
            at = next((j for j, k in enumerate(keys) if isinstance(k, MarkKey)), at)
            if at < len(keys):
                end, leaf = in_order[keys[at].number]
        elif starts[i]:
            end = path[starts[i][0] :]
            leaf = leaves[end]
        if leaf is not None:
            # An array below a mark may lie outside of the tree of the parameters.
            has_path = path[at - len(end) : at] == end
            above = path[: at - len(end)] if has_path else path[:at]
            yield above, path[at:], frozenset([leaf])
            continue
        # One array for all leaves, as in `optax.flatten`, becomes longer with them. Its
        # role includes their order.
        is_same = longer is not None and has_axes and jnp.shape(x) == longer.shape
        is_pooled = not (_is_ours(path) or is_same)
        if is_pooled and jnp.ndim(x) and _leaves.is_floating(x):
            yield path, tuple(itertools.chain(*leaves)), frozenset(leaves.values())
        else:
            yield path, (), None


def _is_ours(path: KeyPath) -> bool:
    return not {"clip_memory", *_NAMED}.isdisjoint(map(_text, path))


def _starts(path: KeyPath, leaves: dict[KeyPath, Leaf]) -> list[int]:
    """Return the positions from which a path may be that of a leaf."""
    texts = [*map(_text, path)]
    if not _NAMED.isdisjoint(texts):
        return []
    # Memories are in lists, and parameters may be in lists too.
    least = texts.index("clip_memory") + 4 if "clip_memory" in texts else 1
    return [i for i in range(least, len(path)) if path[i:] in leaves]


def _grown(
    init: Callable[[PyTree], PyTree], params: PyTree, node: Callable[..., Any]
) -> list[Any]:
    """Return the paths and arrays of a state of longer leaves, each in a node."""
    numbers = itertools.count()

    def longer(x: Any) -> Any:
        leaf = jax.ShapeDtypeStruct([n + 1 for n in jnp.shape(x)], jnp.result_type(x))
        return node(MarkKey(next(numbers)), leaf)

    try:
        return jax.tree.leaves_with_path(
            jax.eval_shape(init, jax.tree.map(longer, params))
        )
    except Exception:  # An `init` may do anything with its parameters.
        return []


def _text(key: Any) -> str:
    return _leaves.path_str((key,))


def _state(place: KeyPath, node: Any, norms: _Norms | None) -> State:
    """Describe the state at a place; its arrays are added later."""
    fields = [_text(key) for key in place if not isinstance(key, _PLAIN)]
    other = next((field for field in fields if field in _OTHER_NORMS), "")
    name = norms.engine.name if norms else "".join(getattr(node, "skip_record", ()))
    kind = None if node is None else _ALIASES.get(type(node).__name__, type(node))
    labels = tuple(_text(k) for k in place if isinstance(k, jax.tree_util.DictKey))
    measured, leaves = (norms.engine.measured, norms.leaves) if norms else ("", ())
    return State((kind, other, name), labels, measured, {*leaves})


# What an array measures, its role and owner, and the row of an entry.
_Address = tuple[Hashable, tuple[str, ...], Owner | None, int | None]


def _slots(
    inside: KeyPath, owner: Owner | None, norms: _Norms | None
) -> Iterator[_Address]:
    """Yield the addresses of an array: one, or in a memory one for each norm in it."""
    role = tuple(map(_text, inside))
    if norms is None or role[0] != "clip_memory":
        if role[:1] == ("skip_loss",):
            yield "losses", role, LOSS, None
        else:
            yield None, role[:1] if role[:1] == ("history_rows",) else role, owner, None
        return
    # After the name of the norm come the positions of the argument and of its part; the
    # norm's own memory has one position.
    indices = [key.idx for key in inside[2:4] if hasattr(key, "idx")]
    what, below, is_alone = norms.memories[tuple(indices)]
    role = (role[0], *role[2 + len(indices) :])
    if "by_digest" not in role:
        yield what, role, owner or (below[0] if is_alone else None), None
        return
    at = role.index("by_digest")
    # The key after the digest is the position of a norm, or there is a row for each.
    before, after = role[:at], role[at + 2 :]
    if after and after[0].isdecimal():
        yield what, (*before, *after[1:]), below[int(after[0])], None
        return
    for row, leaves in enumerate(below):
        yield what, (*before, *after), leaves, row


def _norms_of(noted: Noted) -> _Norms:
    """Describe the norms that an engine measures."""
    engine, params, _ = noted
    layout = layout_of(dataclasses.replace(engine.clip, axis_name=()), params)
    paths = layout.flat.paths
    texts = dict(zip(paths, _leaves.keys_of(paths), strict=True))
    owners = [
        frozenset((texts[x.path], jnp.shape(x.value)) for x in block.leaves)
        for block in layout.blocks
    ]
    memories: dict[tuple[int, ...], tuple[Hashable, list[Owner], bool]] = {}
    for i, (name, rules) in enumerate(engine.rules.by_argument.items()):
        parts = norms_of_rules(
            name, rules, layout.treedef, [()] * len(owners), is_like_params=False
        )
        for j, part in enumerate(parts):
            below = [owners[k] for k in part.indices]
            is_alone = jax.tree_util.treedef_is_leaf(part.treedef)
            what = engine.measured, i, rule_text(part.rule)
            memories[i, j] = what, below, is_alone
    # The memory of the norm itself, as of the power iteration, follows.
    memories[(len(engine.rules.by_argument),)] = engine.measured, owners, False
    return _Norms(engine, frozenset().union(*owners), memories)


def rule_text(rule: Rule) -> str:
    """Return the class of a rule; its numbers do not change what it learns."""
    if isinstance(rule, Scaled):  # It scales the threshold, not the memory.
        return rule_text(rule.rule)
    inner = getattr(rule, "rule", None)
    words = str(getattr(rule, "reduce", "")), "" if inner is None else rule_text(inner)
    return " ".join([type(rule).__qualname__, *filter(None, words)])
