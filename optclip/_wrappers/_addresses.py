"""Addresses of the arrays of a state: the state around each, its role, and its leaves.

An array belongs to a leaf if the keys and nodes above it end in those above the leaf,
as `jax.tree.map` makes them. Engines show what the memories of their rules measure.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaves
from .._arrays._packed_state import PerNorm
from .._arrays._types import PyTree
from .._clip import layout_of
from .._thresholds import Rule, Scaled, norms_of_rules
from .._transforms import Noted, noting_engines
from .._typing import ClipState

# A leaf is the texts of the keys of its path, and its shape.
Leaf = tuple[tuple[str, ...], tuple[int, ...]]
Owner = frozenset[Leaf]
# The owner of the memory of a rule for losses.
LOSS: Owner = frozenset([(("loss",), ())])

# The nodes above an array, each with the key below it.
Trail = list[tuple[Any, Any]]

# The states below these fields are of their own kind, since they hold other norms than
# the clipping of updates.
_OTHER_NORMS = ("skip_norm", "constrain_clip")
# The named tuples below these fields are parts of one state.
_PARTS = ("clip_memory", "clip_record", "skip_loss", "skip_record")
# `optax.inject_hyperparams` counts the steps of a schedule in a state of its own.
_ALIASES = {"WrappedScheduleState": optax.ScaleByScheduleState}

# The roles of arrays that move together, with the position of each array, and of the
# entry on its first axis or None.
Slots = dict[tuple[str, ...], tuple[int, int | None]]


@dataclasses.dataclass(eq=False)
class State:
    """Describe a state, and the arrays for which it is the innermost one.

    Attributes:
      kind: Its type, the field of `_OTHER_NORMS` above it, and its name.
      context: The states and labels around it.
      leaves: The leaves that it belongs to.
      groups: Its arrays by what they measure, which is None except for memories, and by
        their owner: a leaf, the leaves below a norm, or None for counts.
    """

    kind: tuple[Any, str, str]
    context: tuple[str, ...]
    leaves: Owner
    groups: dict[tuple[Hashable, Owner | None], Slots] = dataclasses.field(
        default_factory=dict
    )

    def __str__(self) -> str:
        name = self.kind[0].__name__ if self.kind[0] else "the state"
        return f"{name} '{self.kind[2]}'" if self.kind[2] else name


class _Norms(NamedTuple):
    """Describe the norms of a ClipState.

    Attributes:
      name: The name of the transformation.
      leaves: The leaves below the norms.
      memories: By the place of a memory in `clip_memory`: what it measures, the leaves
        below each norm, and whether there is one norm without a path.
    """

    name: str
    leaves: Owner
    memories: dict[tuple[int, ...], tuple[Hashable, list[Owner], bool]]


def leaves_of(params: PyTree) -> dict[tuple[Any, ...], Leaf]:
    """Return the leaf for the types and keys above it.

    Raises:
      ValueError: The keys of two leaves have the same texts.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast  # The parameters of the optimizer inside.
    trails = [*_trails(params)]
    texts = _leaves.keys_of([tuple(k for _, k in trail) for trail, _ in trails])
    if twice := {"/".join(path) for path, n in Counter(texts).items() if n > 1}:
        raise ValueError(
            f"Two leaves have the path {min(twice)!r}, as in {{0: x, '0': y}}, so that"
            " carry_over cannot distinguish their states. Rename one of them."
        )
    return {
        _typed(trail): (path, jnp.shape(x))
        for (trail, x), path in zip(trails, texts, strict=True)
    }


def addressed(
    init: Callable[[PyTree], PyTree],
    params: PyTree,
    leaves: dict[tuple[Any, ...], Leaf],
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
    states = dict[tuple[Any, ...], State]()
    for index, (trail, x) in enumerate(_trails(state)):
        above, leaf = _split(trail, leaves)
        start = _start(above)
        node = above[start][0] if above else None
        of_node = norms.get(id(node.clip_step)) if isinstance(node, ClipState) else None
        place = tuple(key for _, key in above[:start])
        if place not in states:
            states[place] = _state(above[:start], node, of_node)
        owner = None if leaf is None else frozenset([leaf])
        if owner is None and jnp.ndim(x) and _leaves.is_floating(x) and of_node is None:
            # It may have a part for each leaf, as in `optax.flatten`.
            owner = frozenset(leaves.values())
        for what, role, below, row in _slots(above[start:], owner, of_node):
            states[place].groups.setdefault((what, below), {})[role] = index, row
    for each in states.values():
        owners = [owner for what, owner in each.groups if owner and what is None]
        each.leaves = each.leaves.union(*owners) or frozenset(leaves.values())
    return state, [*states.values()]


def _trails(tree: PyTree) -> Iterator[tuple[Trail, Any]]:
    """Yield the nodes and keys above each array, and the array."""
    waiting: list[tuple[Trail, Any]] = [([], tree)]
    while waiting:
        trail, x = waiting.pop()
        is_child = functools.partial(operator.is_not, x)
        children = jax.tree.leaves_with_path(x, is_leaf=is_child)
        if children and not children[0][0]:
            yield trail, x
            continue
        waiting += [([*trail, (x, path[0])], y) for path, y in reversed(children)]


def _typed(trail: Trail) -> tuple[Any, ...]:
    return tuple((type(node), key) for node, key in trail)


def _split(
    trail: Trail, leaves: dict[tuple[Any, ...], Leaf]
) -> tuple[Trail, Leaf | None]:
    """Return the nodes above an array without those of its leaf, and the leaf."""
    typed = _typed(trail)
    states = [i for i, (node, _) in enumerate(trail) if _is_state(node)]
    least = states[0] + 1 if states else len(trail)
    fields = [_text(trail[i][1]) for i in states]
    if any(field.endswith("_record") for field in fields):
        return trail, None  # Its entries have the paths of leaves.
    if "clip_memory" in fields:
        # The memories are in a dict of lists, and parameters may be in these too.
        least = states[fields.index("clip_memory")] + 4
    starts = (i for i in range(least, len(trail)) if typed[i:] in leaves)
    i = next(starts, None)
    return (trail, None) if i is None else (trail[:i], leaves[typed[i:]])


def _start(above: Trail) -> int:
    """Return the position of the innermost state."""
    states = [i for i, (node, _) in enumerate(above) if _is_state(node)]
    parts = [i for i in states if _text(above[i][1]) in _PARTS]
    return (parts[:1] or states[-1:] or [0])[0]


def _is_state(node: Any) -> bool:
    """Return whether a node is a state, not a chain or a dict."""
    return type(node) is not tuple and not isinstance(node, (list, dict, PerNorm))


def _text(key: Any) -> str:
    return _leaves.path_str((key,))


def _state(above: Trail, node: Any, norms: _Norms | None) -> State:
    """Return a state without arrays."""
    fields = [_text(key) for x, key in above if _is_state(x)]
    other = next((field for field in fields if field in _OTHER_NORMS), "")
    name = norms.name if norms else "".join(getattr(node, "skip_record", ()))
    kind = _ALIASES.get(type(node).__name__, type(node)) if _is_state(node) else None
    context = tuple(
        _label(*x) for x in above if _is_state(x[0]) or isinstance(x[0], dict)
    )
    return State((kind, other, name), context, norms.leaves if norms else frozenset())


def _label(node: Any, key: Any) -> str:
    return f"{type(node).__name__}.{_text(key)}" if _is_state(node) else _text(key)


def _slots(
    inside: Trail, owner: Owner | None, norms: _Norms | None
) -> Iterator[tuple[Hashable, tuple[str, ...], Owner | None, int | None]]:
    """Yield what an array measures, its role, owner and row; for each norm in it."""
    field = _text(inside[0][1]) if inside else ""
    role = [field, *(_label(*x) for x in inside[1:])]
    if field == "skip_loss":
        yield "losses", tuple(role), LOSS, None
    elif field == "history_rows":
        yield None, (field,), None, None
    elif field != "clip_memory" or norms is None:
        yield None, tuple(role), owner, None
    else:
        inside = [inside[0], *inside[2:]]  # Without the name of the norm.
        del role[1]
        at = tuple(int(key.idx) for node, key in inside[1:3] if isinstance(node, list))
        what, below, is_alone = norms.memories[at]
        role[1 : 1 + len(at)] = []
        i = next(
            (i for i, (node, _) in enumerate(inside) if isinstance(node, PerNorm)), None
        )
        if i is None:
            alone = below[0] if is_alone else None
            yield what, tuple(role), owner or alone, None
            return
        entries, cut = [x for x, _ in inside[i + 2 :]], i - len(at)
        if entries and set(entries[0]) == {*map(str, range(len(below)))}:
            role[cut : cut + 3] = []
            yield what, tuple(role), below[int(_text(inside[i + 2][1]))], None
            return
        role[cut : cut + 2] = []
        for row, owner in enumerate(below):
            yield what, tuple(role), owner, row


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
        shapes = [()] * len(owners)
        parts = norms_of_rules(
            name, rules, layout.treedef, shapes, is_like_params=False
        )
        for j, part in enumerate(parts):
            below = [owners[k] for k in part.indices]
            is_alone = jax.tree_util.treedef_is_leaf(part.treedef)
            what = engine.measured, i, rule_text(part.rule)
            memories[i, j] = what, below, is_alone
    memories[(len(engine.rules.by_argument),)] = engine.measured, owners, False
    return _Norms(engine.name, frozenset().union(*owners), memories)


def rule_text(rule: Rule) -> str:
    """Return the class of a rule; its numbers do not change what it learns."""
    if isinstance(rule, Scaled):  # It scales the threshold, not the memory.
        return rule_text(rule.rule)
    inner = getattr(rule, "rule", None)
    words = str(getattr(rule, "reduce", "")), "" if inner is None else rule_text(inner)
    return " ".join([type(rule).__qualname__, *filter(None, words)])
