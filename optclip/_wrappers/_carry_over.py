"""Move an optimizer's state to a changed optimizer or changed parameters."""

from __future__ import annotations

import operator
import warnings

import jax
import jax.numpy as jnp
import optax

from .._arrays import _validate
from .._arrays._types import PyTree
from . import _boxes
from ._addresses import addressed, leaves_of
from ._carrier import Carrier
from ._checks import transformation


def carry_over(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    new_tx: optax.GradientTransformation,
    new_params: PyTree,
) -> PyTree:
    """Move a state to a changed set of leaves, or to a changed optimizer.

    Each array moves to the place with the same address: the same leaf, by its path, and
    the same role in the same state, such as `mu` of Adam. Chains, wrappers and labels
    above do not matter. The rest starts as in `new_tx.init(new_params)`, and one
    warning names the moments and memories that restart, with the reason. Use it when an
    adapter or a head is added, when a block is unfrozen, or to switch on `skip`,
    `with_history` or a learned threshold from an old checkpoint, and off again.

    Example:
      Add a head to a model that clips each leaf by its own history:

      >>> import warnings, jax.numpy as jnp, optax, optclip
      >>> clip = optclip.clip_by_norm(optclip.thresholds.quantile(0.5), record="leaves")
      >>> tx = optax.chain(clip, optax.adam(1e-3))
      >>> params = {"body": jnp.ones(2)}
      >>> _, state = tx.update({"body": jnp.array([3.0, 4.0])}, tx.init(params), params)
      >>> grown = {"body": jnp.ones(2), "head": jnp.ones(3)}
      >>> skipping = optclip.skip(tx, max_norm=100.0)
      >>> with warnings.catch_warnings(action="ignore"):  # Adam's count goes on.
      ...     state = optclip.carry_over(tx, params, state, skipping, grown)
      >>> grads = {"body": jnp.array([30.0, 40.0]), "head": jnp.ones(3)}
      >>> _, state = skipping.update(grads, state, grown)
      >>> print(optclip.metrics(state)["clip/threshold/body"])  # Median of 5 and 50.
      27.5

    Args:
      tx: The transformation that made `state`.
      params: The parameters of `state`; `jax.ShapeDtypeStruct` leaves suffice.
      state: The state to move, with the structure of `tx.init(params)`, or
        `optimizer.opt_state` of Flax NNX.
      new_tx: The transformation to continue with.
      new_params: Its parameters.

    Returns:
      A state for `new_tx`, in variables if `state` is. Arrays that do not change are
      those of `state`, so a donation deletes both. All arrays have the memory space and
      sharding of the old ones. Call it outside of `jax.jit`.

    Raises:
      ValueError: `state` has another structure or other shapes than `tx.init(params)`,
        two leaves have the same path, or several states of one type and name, such as
        two transformations `clip`, become more or fewer, and it is unclear whose
        memory or moments continue: give each a `name`.

    Warns:
      UserWarning: A moment of a leaf in `new_params` or a learned memory restarts, a
        count continues for moments that do, joined counts differ, a schedule of optax
        is new, or no leaf remains.

    Edge cases:
      - Paths are compared by the texts of their keys, so `[x]`, `(x,)` and `{"0": x}`
        have the same leaf. A leaf of another shape is another leaf.
      - A count moves with the moments that it counts. It continues for a new leaf under
        the same label, whose first updates by Adam are up to 6.6 times the learning
        rate. Under a separate label of `optax.partition` it starts at 0. Joined labels
        keep the count of most elements.
      - The memory of a rule moves if name, norm, scope, kind of rule and window are the
        same. If its norm covers other leaves, it moves, with a warning, where the
        common leaves have at least half of all elements.
      - States of one type and name are matched by the labels around them, then by norm
        and scope, where these are unique, then by order.
      - History of other quantities: those that are new read 0 in the old steps. With
        another `steps=`, the newest rows are kept.
      - Arrays over all leaves, as in `optax.flatten`, restart if a leaf changes. States
        without a named tuple restart if a chain or wrapper around them changes.
    """
    old_init, new_init = (
        transformation(name, x).init for name, x in (("tx", tx), ("new_tx", new_tx))
    )
    for name, tree in (("params", params), ("new_params", new_params)):
        for x in jax.tree.leaves(tree):
            is_array = hasattr(x, "dtype") or _validate.is_number(x)
            _validate.require(name, x, is_array, "a tree of arrays", error=TypeError)
    for x in jax.tree.leaves(state):
        _validate.outside_jit("state", x)
    leaves = [leaves_of(params), leaves_of(new_params)]
    olds = []

    def run(params: PyTree) -> PyTree:
        expected, states = addressed(old_init, params, leaves[0])
        olds.extend(states)
        return expected

    expected = jax.eval_shape(run, params)
    _check_structure(_boxes.unboxed(state), _boxes.unboxed(expected))
    fresh, news = addressed(new_init, new_params, leaves[1])
    old, like, arrays = map(jax.tree.leaves, (state, expected, fresh))
    carrier = Carrier(olds, old, like, news, arrays, [[*x.values()] for x in leaves])
    treedef = jax.tree.structure(_boxes.boxed_as(state, expected, fresh))
    carried = jax.tree.unflatten(treedef, carrier.carried())
    if lines := carrier.lines():
        text = "\n- ".join(["carry_over moved `state` with exceptions:", *lines])
        warnings.warn(text, UserWarning, stacklevel=2)
    return carried


def _check_structure(state: PyTree, expected: PyTree) -> None:
    """Raise unless a state has the structure and the shapes that `init` returns."""
    is_same = jax.tree.structure(state) == jax.tree.structure(expected)
    shapes = ([*map(jnp.shape, jax.tree.leaves(x))] for x in (state, expected))
    if is_same and operator.eq(*shapes):
        return
    here, there = (
        {
            jax.tree_util.keystr(path): jnp.shape(x)
            for path, x in jax.tree.leaves_with_path(tree)
        }
        for tree in (state, expected)
    )
    if not is_same:
        words = [
            *(f"it lacks {path}" for path in there if path not in here),
            *(f"it has the unknown {path}" for path in here if path not in there),
            f"a {type(state).__name__} instead of a {type(expected).__name__}",
        ]
        raise ValueError(
            f"`state` must have the structure of tx.init(params): {words[0]}. Pass the"
            " `tx` and `params` that made the state, before the new ones, and restore a"
            " checkpoint into tx.init(params)."
        )
    for path, shape in here.items():
        # A history may be restored into a transformation with another `steps=`.
        rows = ".history_rows" in path and len(shape) == len(there[path])
        if shape[rows:] != there[path][rows:]:
            raise ValueError(
                f"`state`{path} must have the shape {there[path]}, got {shape}. Pass"
                " the `tx` and `params` that made it. Index a stacked state first:"
                " jax.tree.map(lambda x: x[0], state)."
            )
