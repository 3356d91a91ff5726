"""Move an optimizer's state to a changed optimizer or changed parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .._arrays import _packed_state, _validate
from .._arrays._types import PyTree
from ._carrier import Carrier, is_array
from ._checks import transformation


def carry_over(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    new_tx: optax.GradientTransformation,
    new_params: PyTree,
) -> PyTree:
    """Move a state to a changed set of leaves, or to a changed optimizer.

    Learned memories, records, histories, moments and counts move by the path of their
    leaf. What is new, or has another shape, starts as in `new_tx.init(new_params)`, and
    what is gone is dropped. Use it when an adapter or a head is added, when a block is
    unfrozen, or to switch on `skip`, `with_history` or a learned threshold from an old
    checkpoint, and off again.

    Example:
      Add a head to a model that clips each leaf by its own history:

      >>> import jax.numpy as jnp, optax, optclip
      >>> clip = optclip.clip_by_norm(optclip.thresholds.quantile(0.5), record="leaves")
      >>> tx = optax.chain(clip, optax.adam(1e-3))
      >>> params = {"body": jnp.ones(2)}
      >>> _, state = tx.update({"body": jnp.array([3.0, 4.0])}, tx.init(params), params)
      >>> grown = {"body": jnp.ones(2), "head": jnp.ones(3)}
      >>> skipping = optclip.skip(tx, max_norm=100.0)
      >>> state = optclip.carry_over(tx, params, state, skipping, grown)
      >>> grads = {"body": jnp.array([30.0, 40.0]), "head": jnp.ones(3)}
      >>> _, state = skipping.update(grads, state, grown)
      >>> print(optclip.metrics(state)["clip/threshold/body"])  # Median of 5 and 50.
      27.5

    Args:
      tx: The transformation that made `state`.
      params: The parameters of `state`; `jax.ShapeDtypeStruct` leaves suffice.
      state: The state to move, with the structure of `tx.init(params)`.
      new_tx: The transformation to continue with.
      new_params: Its parameters.

    Returns:
      A state for `new_tx`. Arrays that do not change are those of `state`, so a
      donation deletes both. Call it outside of `jax.jit`.

    Raises:
      ValueError: `state` has another structure or other shapes than `tx.init(params)`.

    Edge cases:
      - Transformations of a chain are matched by type and name, then by order.
      - The memory of one rule moves as a whole: with another window it starts anew.
      - History of other quantities: those that are new read 0 in the old steps. With
        another `steps=`, the newest rows are kept.
      - Adam's moments of a new leaf start at 0, while the count goes on, so its first
        updates are smaller.
    """
    old_init, new_init = (
        transformation(name, x).init for name, x in (("tx", tx), ("new_tx", new_tx))
    )
    for name, tree in (("params", params), ("new_params", new_params)):
        for x in jax.tree.leaves(tree):
            if not (is_array(x) or _validate.is_number(x)):
                raise TypeError(_validate.must_be(name, "a tree of arrays", x))
    with _packed_state.noting_names() as names:
        expected = jax.eval_shape(lambda: old_init(_zeros(params)))
        fresh = new_init(new_params)
    _check_structure(state, expected)
    return Carrier(names).carried(state, fresh)


def _zeros(params: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if is_array(x) else x, params
    )


def _check_structure(state: PyTree, expected: PyTree) -> None:
    if jax.tree.structure(state) == jax.tree.structure(expected):
        _check_shapes(state, expected)
        return
    raise ValueError(
        "`state` must have the structure of tx.init(params):"
        f" {_first_difference(state, expected)}. Pass the `tx` and `params` that made"
        " the state, before the new ones, and restore a checkpoint into"
        " tx.init(params)."
    )


def _first_difference(state: PyTree, expected: PyTree) -> str:
    """Return a path that only one of two states has, in words."""
    here, there = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
        for tree in (state, expected)
    )
    if missing := [path for path in there if path not in {*here}]:
        return f"it lacks {missing[0]}"
    if unknown := [path for path in here if path not in {*there}]:
        return f"it has the unknown {unknown[0]}"
    return f"a {type(state).__name__} instead of a {type(expected).__name__}"


def _check_shapes(state: PyTree, expected: PyTree) -> None:
    """Raise if an array has another shape, which would start anew silently."""
    pairs = zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True
    )
    for (path, x), like in pairs:
        # A history may be restored into a transformation with another `steps=`.
        is_history = any("history_" in str(key) for key in path[-2:])
        if jnp.shape(x) == jnp.shape(like) or is_history:
            continue
        raise ValueError(
            f"`state`{jax.tree_util.keystr(path)} must have the shape"
            f" {jnp.shape(like)}, got {jnp.shape(x)}. Pass the `tx` and `params` that"
            " made it. Index a stacked state first: jax.tree.map(lambda x: x[0],"
            " state)."
        )
