"""Pack memory per norm under a key that no rule over parameter names matches.

Flax boxes a parameter with its sharding, `optax.tree_map_params` finds parameters by
their structure, and trainers match partition rules with their names. In a tree with the
structure of the parameters, or under such a name, one number would get the sharding of
a matrix.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _leaves
from ._types import KeyPath, PyTree, TreeDef

_ONE = jax.tree.structure(0)

# The key of the numbers of layers in the record of a stack. A path has no slash in a
# record, so the parts of a path tell the two apart.
LAYERS = "layers"


class PerNorm(NamedTuple):
    """Hold one value for each norm, such as the memory of a rule.

    Attributes:
      by_digest: A dict of one entry. Its key is the number of norms and a digest of
        their paths, such as `"291_5f0c2d9e81ab"`. The entry is one array over the
        norms, `(norms,)` or `(norms, window)`, if each norm is one number. Otherwise it
        is a dict with an array for each norm, `"0"`, `"1"`, in their order.
    """

    by_digest: dict[str, Any]


def keyed(treedef: TreeDef, entries: list[Any]) -> Any:
    """Return a dict by path with one entry per leaf; for one array, the bare entry.

    Its keys are `as_key` of the paths.
    """
    if treedef == _ONE:
        return entries[0]
    return dict(zip(map(as_key, _names(treedef)), entries, strict=True))


def as_key(name: str) -> str:
    """Return a name as a key of a state: its slashes become "%2F".

    Trainers join the keys of a state by slashes when they save it, and split them again
    when they restore it.
    """
    return name.replace("%", "%25").replace("/", "%2F")


def as_name(key: str) -> str:
    """Return the inverse of `as_key`."""
    return key.replace("%2F", "/").replace("%25", "%")


def of_vector(treedef: TreeDef, vector: Any) -> PerNorm:
    """Return a memory with one array over all norms."""
    return PerNorm({_digest(treedef): vector})


def by_position(treedef: TreeDef, entries: list[Any]) -> PerNorm:
    """Return a memory with one array per norm."""
    return PerNorm({_digest(treedef): {str(i): x for i, x in enumerate(entries)}})


def packed(memory: PyTree, norm: PyTree, *, is_like_params: bool) -> PyTree:
    """Return a memory with a `PerNorm` for each tree of the structure of the norms.

    If norms are as large as the parameters, entries as large as the norms stay in their
    tree, since the sharding of the parameters is correct there.
    """
    treedef = jax.tree.structure(norm)
    if treedef == _ONE or not treedef.num_leaves:
        return memory
    shapes = [jnp.shape(x) for x in jax.tree.leaves(norm)]

    def one(x: Any) -> Any:
        entries = _entries(treedef, x)
        if entries is None or (
            is_like_params and shapes == [jnp.shape(e) for e in entries]
        ):
            return x
        if not _can_be_stacked(entries, shapes):
            return by_position(treedef, entries)
        return of_vector(treedef, jax.tree.map(lambda *e: jnp.stack(e), *entries))

    return jax.tree.map(one, memory, is_leaf=lambda x: _entries(treedef, x) is not None)


def unpacked(memory: PyTree, norm: PyTree) -> PyTree:
    """Return the inverse of `packed`.

    Raises:
      ValueError: The memory belongs to norms with other paths.
    """
    treedef = jax.tree.structure(norm)

    def one(x: Any) -> Any:
        return treedef.unflatten(in_order(x, treedef)) if _is_packed(x) else x

    return jax.tree.map(one, memory, is_leaf=_is_packed)


def in_order(memory: PerNorm, treedef: TreeDef) -> list[Any]:
    """Return the entries of a memory in the order of the norms.

    Raises:
      ValueError: The memory belongs to norms with other paths.
    """
    check_same_norms(memory, treedef)
    (entry,) = memory.by_digest.values()
    number = treedef.num_leaves
    if _is_by_position(entry, number):
        # The keys are read by position, since `jit` returns a dict sorted by key.
        return [entry[str(i)] for i in range(number)]
    arrays, structure = jax.tree.flatten(entry)
    columns = [jnp.unstack(jnp.asarray(x)) for x in arrays]
    return [structure.unflatten([c[i] for c in columns]) for i in range(number)]


def check_same_norms(memory: PyTree, treedef: TreeDef) -> None:
    """Raise unless each `PerNorm` of a memory belongs to norms with these paths."""
    for x in jax.tree.leaves(memory, is_leaf=_is_packed):
        if _is_packed(x) and list(x.by_digest) != [_digest(treedef)]:
            raise ValueError(
                "`state` was made for other leaves than these updates, whose paths"
                f" begin with {sorted(_names(treedef))[:5]}: its key is"
                f" {sorted(x.by_digest)}, theirs is {_digest(treedef)!r} (number of"
                " norms and digest of their paths). A leaf was added, removed, renamed"
                " or reordered. Pass trees of one structure to init and update. After a"
                " change of the model, move the state with optclip.carry_over."
            )


def unique(name: str, reserved: Set[str], taken: Set[str]) -> str:
    """Return `name`, or `name` with the first number that makes it unique."""
    if name not in taken:
        return name
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    return next(n for n in numbered if n not in reserved and n not in taken)


def unique_names(paths: list[KeyPath]) -> list[str]:
    """Return unique names of paths: {"a/b": x, "a": {"b": y}} repeats one."""
    return numbered(_leaves.names_of(paths))


def numbered(names: list[str]) -> list[str]:
    """Return unique names: the second `clip` is `clip_2`."""
    reserved, unique_ones = set(names), dict[str, None]()
    for name in names:
        unique_ones[unique(name, reserved, unique_ones.keys())] = None
    return list(unique_ones)


@functools.lru_cache(maxsize=64)
def _digest(treedef: TreeDef) -> str:
    paths = json.dumps(_names(treedef)).encode()
    return f"{treedef.num_leaves}_{hashlib.sha256(paths).hexdigest()[:12]}"


@functools.lru_cache(maxsize=64)
def _names(treedef: TreeDef) -> tuple[str, ...]:
    """Return the unique paths of the leaves."""
    pairs = jax.tree.leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
    return tuple(unique_names([path for path, _ in pairs]))


def is_per_norm(treedef: TreeDef, x: Any) -> bool:
    """Return whether a part of a memory has an entry per norm of this structure."""
    return _entries(treedef, x) is not None


def _is_packed(x: Any) -> bool:
    return isinstance(x, PerNorm)


def _is_by_position(entry: Any, number: int) -> bool:
    return isinstance(entry, dict) and entry.keys() == set(map(str, range(number)))


def _can_be_stacked(entries: list[Any], shapes: list[tuple[int, ...]]) -> bool:
    """Return whether there is one entry per number, and all have one type.

    Entries of arrays of norms are not stacked, since each may be sharded differently.
    """
    kinds = {
        tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(entry))
        for entry in entries
    }
    is_ambiguous = _is_by_position(entries[0], len(entries))
    are_numbers = not any(shapes) or not any(map(jnp.shape, jax.tree.leaves(entries)))
    return len(kinds) == 1 and are_numbers and not is_ambiguous


def _entries(treedef: TreeDef, x: Any) -> list[Any] | None:
    """Return the subtree at each leaf of a structure; None if `x` has another one."""
    if jax.tree.structure(x).node_data() != treedef.node_data():
        return None  # Checked first, since the error below would print all arrays.
    try:
        entries = treedef.flatten_up_to(x)
    except (ValueError, TypeError):
        return None
    # A memory of a count and of norms is not a tree of norms, even if it is as long.
    return entries if len(set(map(jax.tree.structure, entries))) <= 1 else None
