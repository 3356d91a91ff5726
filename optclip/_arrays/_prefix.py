"""Match trees that describe other trees: masks, labels and thresholds as prefixes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _leaves, _validate
from ._types import KeyPath, Mask, PyTree, TreeDef

_CALLED_ONCE = (
    "It is called once, with the whole tree. Wrap a function of one leaf's path in"
    " optclip.by_path(...)."
)


def by_path(function: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Build a mask or label function that decides by the path of each leaf.

    Arguments with a value per leaf (`mask`, `groups`, `axis_name`) accept a tree or
    a function of the whole tree, which `by_path` makes from a function of one path.
    Arguments that describe a single leaf (`stacked`, `transposed`, `keep`) accept a
    function of its path, with or without `by_path`.

    Example:
      >>> import optclip
      >>> no_bias = optclip.by_path(lambda path: not path.endswith("bias"))
      >>> print(no_bias({"dense": {"bias": 0.0, "kernel": 1.0}}))
      {'dense': {'bias': False, 'kernel': True}}

    Args:
      function: Function of a path such as `"encoder/layer_0/kernel"`; returns a bool
        for a mask, a label for groups. An array in a Flax box or a haliax `NamedArray`
        has the path of its box.

    Returns:
      A function from a tree to a tree of the same structure, for `mask=`, `groups=`,
      `optax.masked` and `optax.partition`; for a path, the result of `function`.
    """
    _validate.kind(
        "function", function, Callable, "a function of a path such as 'encoder/kernel'"
    )

    def describe(tree: PyTree) -> PyTree:
        if isinstance(tree, str):
            return function(tree)
        flat = _leaves.flatten(tree)
        if flat.paths == [()] and jnp.ndim(flat.leaves[0]) == 0:
            raise TypeError(
                "The result of by_path must be called with a tree, got a single"
                " number, perhaps a step because it was passed as a schedule. For"
                " thresholds per path, pass clip_by_norm(by_path(function)(params))."
                " With optax.inject_hyperparams, name the argument in static_args, such"
                " as static_args=('mask',)."
            )
        return flat.rebuild([function(name) for name in _leaves.names_of(flat.paths)])

    return describe


def spread_prefix(
    name: str,
    prefix: PyTree,
    tree: PyTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Return `prefix` with one value for each leaf of `tree`.

    Raises:
      ValueError: `prefix` is not a prefix of `tree`; the message names the argument.
    """
    return map_prefix(
        name,
        lambda value, part: jax.tree.map(
            lambda _: value, part, is_leaf=_leaves.is_sparse
        ),
        prefix,
        tree,
        is_leaf=is_leaf,
    )


def described(name: str, description: PyTree, tree: PyTree) -> PyTree:
    """Return a description of `tree`: itself, or the result of a function of the tree.

    Raises:
      TypeError: The function expects paths, not trees.
    """
    if not callable(description):
        return description
    function = f"The function passed as {_validate.quoted(name)}"
    try:
        result = description(tree)
    except AttributeError as error:
        raise TypeError(
            f"{function} failed on the tree: {error}. {_CALLED_ONCE}"
        ) from error
    is_none = result is None and jax.tree.leaves(tree)
    is_one = isinstance(result, (bool, str)) and len(_leaves.flatten(tree).leaves) > 1
    if is_none or is_one:
        missing = " Add the missing `return`." if is_none else ""
        raise TypeError(
            f"{function} must return a tree with the structure of its"
            f" argument, or a prefix of it, got {result!r}.{missing} {_CALLED_ONCE}"
        )
    return result


def map_prefix(
    name: str,
    function: Callable[..., Any],
    prefix: PyTree,
    tree: PyTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Map a function over the leaves of `prefix` and the subtrees at their places."""
    treedef = jax.tree.structure(prefix, is_leaf=is_leaf)
    try:
        treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        try:
            prefix = _in_containers(prefix, tree, is_leaf)
        except LookupError:
            full = jax.tree.structure(tree, is_leaf=_leaves.is_sparse)
            differences = _differences(prefix, tree, is_leaf)
            raise ValueError(
                f"{_validate.quoted(name)} must be a prefix of the tree to which it"
                f" applies.{differences or f' Expected {full}, got {treedef}.'}"
                f" {_remedy(tree)}"
            ) from error
    return jax.tree.map(function, prefix, tree, is_leaf=is_leaf)


def _in_containers(prefix: PyTree, tree: PyTree, is_leaf: Any) -> PyTree:
    """Return a prefix in the containers of a tree that has the same keys.

    A dict describes a `FrozenDict`, an `OrderedDict` or a dataclass. Entries for
    subtrees that `optax.masked` hides are removed.

    Raises:
      LookupError: The keys differ.
    """
    if jax.tree_util.all_leaves([prefix], is_leaf=is_leaf):
        return prefix
    if is_masked(tree):
        return tree
    ours, theirs = _children(prefix), _children(tree)
    if ours is None or theirs is None or {*ours[0]} != {*theirs[0]}:
        raise LookupError
    return theirs[1].unflatten(
        [
            _in_containers(ours[0][key], child, is_leaf)
            for key, child in theirs[0].items()
        ]
    )


def _children(node: PyTree) -> tuple[dict[str, PyTree], TreeDef] | None:
    """Return the children of a container by key, and its structure; None for a leaf."""
    if node is None or jax.tree_util.all_leaves([node], is_leaf=_leaves.is_sparse):
        return None
    pairs, treedef = jax.tree.flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return {_leaves.path_str(path): child for path, child in pairs}, treedef


def is_masked(x: Any) -> bool:
    # Compared by name, since optax is not imported below `_transforms`.
    return type(x).__name__ == "MaskedNode"


def _remedy(tree: PyTree) -> str:
    if jax.tree_util.all_leaves([tree]):
        return (
            "There is only one norm, so pass one number. For several thresholds, clip"
            " per leaf (clip_by_norm) or per group (clip_by_group_norm)."
        )
    return (
        "Pass one value, or a tree with an entry for each (in thresholds and labels,"
        " None means unclipped). optclip.by_path(...) builds such a tree from paths."
    )


def _differences(prefix: PyTree, tree: PyTree, is_leaf: Any) -> str:
    """Return the entries of `tree` that a failed prefix lacks, and its unknown ones."""
    paths = [p for p, _ in jax.tree.leaves_with_path(prefix, is_leaf=is_leaf)]
    there = _leaves.flatten(tree).paths
    lacking = [p for p in there if not any(p[: len(g)] == g for g in paths)]
    unknown = [g for g in paths if not any(p[: len(g)] == g for p in there)]
    text = "".join(
        f" {what} {_listed(entries)}."
        for what, entries in (("Missing:", lacking), ("Unexpected:", unknown))
        if any(entries)
    )
    return text + _nesting(lacking, unknown)


def _nesting(lacking: list[KeyPath], unknown: list[KeyPath]) -> str:
    """Return advice on a path that a prefix has, but in other keys."""
    by_name = {_leaves.path_str(path): path for path in unknown}
    for path in lacking:
        if (name := _leaves.path_str(path)) in by_name:
            wanted, got = (
                "one key" if len(keys) == 1 else f"{len(keys)} nested keys"
                for keys in (path, by_name[name])
            )
            return f" Write '{name}' as {wanted}, not as {got}."
    return ""


def _listed(paths: list[KeyPath]) -> str:
    names = [f"'{name}'" for name in _leaves.names_of(paths)[:5]]
    return ", ".join(names + ["..."] * (len(paths) > 5))


def fill(name: str, threshold: PyTree, norm: PyTree) -> PyTree:
    """Return one threshold for each norm, from a prefix tree.

    None means unclipped: -inf in the argument `lower`, inf in others.
    """
    none = -math.inf if name == "lower" else math.inf

    def as_number(value: Any) -> Any:
        if value is None:
            return none
        # JAX rejects Python ints beyond 32 bits.
        return float(value) if isinstance(value, int) else value

    numbers = jax.tree.map(as_number, threshold, is_leaf=lambda t: t is None)
    return spread_prefix(name, numbers, norm)


def spread_mask(
    name: str, mask: Mask | None, flat: _leaves.Flat, live: list[bool]
) -> list[bool]:
    """Return one bool for each leaf, in order; None means all.

    Raises:
      TypeError: The mask is not made of bools.
      ValueError: It selects none of the leaves that are `live`, which may be clipped.
    """
    if mask is None:
        return [True] * len(flat.leaves)
    if isinstance(mask, (bool, np.bool_)) and len(flat.leaves) > 1:
        wanted = "a tree of bools, a function that returns one, or None for all leaves"
        # optax.inject_hyperparams calls a function with the step, as a schedule.
        advice = f"With optax.inject_hyperparams, pass static_args=('{name}',)."
        raise TypeError(_validate.must_be(name, wanted, mask, advice))
    mask = described(name, mask, flat.tree)
    # None is no bool, so that the error below names its leaf.
    by_leaf = spread_prefix(name, mask, flat.tree, is_leaf=lambda m: m is None)
    spread = flat.treedef.flatten_up_to(by_leaf)
    # A mask from a plain tree.map has a BCOO of bools where the tree has a BCOO.
    spread = [v.data if _leaves.is_sparse(v) else v for v in spread]
    for path, value in zip(flat.paths, spread, strict=True):
        if not isinstance(value, (bool, np.bool_)):
            subject = f"`{name}` for {_leaves.named(path)}"
            advice = "Pass a tree of bools or a function that returns one."
            raise TypeError(
                _validate.must_be(
                    subject,
                    "True or False, not a traced value",
                    value,
                    f"{advice} {_validate.static(name, value)}",
                )
            )
    is_missed = any(live) and not any(map(operator.and_, spread, live))
    if is_missed and not has_masked_nodes(flat.tree):
        there = [p for p, is_live in zip(flat.paths, live, strict=True) if is_live]
        paths = (
            f"the paths are {_listed(there)}" if any(there) else "it is a single leaf"
        )
        raise ValueError(
            f"`{name}` must be True for at least one leaf, got False for all: {paths}."
            " To measure without clipping, pass a threshold of inf."
        )
    return [bool(value) for value in spread]


def has_masked_nodes(tree: PyTree) -> bool:
    """Return whether `optax.masked` or `optax.partition` hides some of the leaves."""
    return any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked)))


def lookup(values: PyTree, tree: PyTree) -> PyTree:
    """Return a tree like `tree` of the values at the same paths, None for no value."""
    flat = _leaves.flatten(values)
    at = dict(zip(flat.paths, flat.leaves, strict=True))
    wanted = _leaves.flatten(tree)
    return wanted.rebuild([at.get(path) for path in wanted.paths])


def lacks_leaf(name: str, path: KeyPath, value: PyTree) -> str:
    """Return the error message for an argument that lacks a leaf of the updates."""
    wanted = f"a tree with {_leaves.named(path)}, which the updates have"
    wanted = wanted if path else "one array, as the updates are"
    return _validate.must_be(
        name,
        wanted,
        value,
        "Pass the tree that was differentiated, such as variables['params'].",
    )
