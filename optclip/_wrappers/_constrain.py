"""Clipping of the parameters after an optimizer's step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import _responses as responses
from .._arrays import _leaves, _placement, _validate
from .._arrays._numerics import applied, update_to
from .._arrays._types import LeafLike, PyTree
from .._transforms import Engine, is_placeholder, noting_engines
from .._typing import ClipState, ConstrainState
from ._checks import check_state, transformation

_SPARSE = "whose new parameters would be dense"


def constrain(
    inner: optax.GradientTransformation, clip: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Clip the parameters after each step of an optimizer.

    The new parameters `params + update` pass through `clip` as its updates, and the
    returned update leads to the result. `clip` receives the old parameters as `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> weights_at_most_2 = optclip.clip_by_norm(2.0, name="weights")
      >>> tx = optclip.constrain(optax.sgd(1.0), weights_at_most_2)
      >>> params = jnp.array([1.0, 0.0])
      >>> updates, state = tx.update(jnp.array([-2.0, -4.0]), tx.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      [1.2 1.6]
      >>> print(optclip.metrics(state)["weights/norm"])
      5.0

    Args:
      inner: The whole optimizer, learning rate included.
      clip: The transformation that clips the new parameters, such as
        `clip_by(2.0, over=axes(0))`, or any other transformation that maps parameters
        to parameters.

    Returns:
      A transformation whose `update` requires `params`. Place it last in a chain;
      `skip` and `optax.MultiSteps` go outside. The metrics of `clip` are those of the
      new parameters before they are clipped; pass `name="weights"` to tell them from
      those of gradients.

    Raises:
      ValueError: In `init`: `clip` has `nonfinite="zero"` or `response="drop"`, or is
        inside `optax.apply_if_finite` or `MultiSteps`, which would set parameters to 0;
        or the two are exchanged.
        In `update`: `params` is missing.
      TypeError: An update is sparse.

    Guarantees:
      Elements that `clip` does not change get the update of `inner`, bit for bit. Other
      parameters are within one rounding of the clipped value, in the narrower of their
      dtype and the update's, at the larger of the old and the new modulus. The next
      step removes this difference. For exact bounds, clip the parameters themselves
      with `optclip.functional` after `optax.apply_updates`.

    Edge cases:
      - New parameters that are NaN or inf, and those that share their norm: the update
        of `inner` is returned, and rules do not learn from the norm.
      - Zero parameters stay 0 in `clip`, with `response="normalize"` too.
      - Fast and slow parameters of an `inner` optax.lookahead both count in the norm of
        the tree. Place `constrain` inside optax.lookahead to clip the fast ones alone.

    See Also:
      `thresholds.initial_norm`, to keep the norm of each parameter.

    References:
      Hinton et al., *Improving neural networks by preventing co-adaptation of feature
      detectors*, 2012, arXiv:1207.0580, for a maximum norm of weights.
    """
    first = transformation("inner", inner)
    second = transformation("clip", clip)

    def init_fn(params: PyTree) -> ConstrainState:
        with noting_engines() as noted:
            clip_state = second.init(_widened(params))
        for each in noted:
            _check_engine(each.engine)
        _check_wrappers(clip_state)
        inner_state = first.init(params)
        if isinstance(inner_state, ClipState) and not noted:
            _check_order(clip_state)
        return ConstrainState(inner_state, clip_state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ConstrainState]:
        check_state(state, ConstrainState)
        _validate.params_given(params, "which constrain clips")
        updates, inner_state = first.update(
            updates, state.constrain_inner, params, **extra_args
        )
        flat = _leaves.flatten_dense(updates, _SPARSE)
        old = flat.treedef.flatten_up_to(params)
        pairs = zip(old, flat.clippable(), strict=True)
        live = [is_live and _leaves.is_floating(p) for p, is_live in pairs]
        new = [
            _placement.computed(applied, jnp.asarray(p), jnp.asarray(u))
            if is_live
            else u
            for p, u, is_live in zip(old, flat.leaves, live, strict=True)
        ]
        clipped, clip_state = second.update(
            flat.rebuild(new), state.constrain_clip, params, **extra_args
        )
        leaves = [
            _placement.computed(_update, jnp.asarray(u), p, n, c) if is_live else u
            for p, u, n, c, is_live in zip(
                old, flat.leaves, new, flat.treedef.flatten_up_to(clipped), live,
                strict=True,
            )
        ]  # fmt: skip
        return flat.rebuild(leaves), ConstrainState(inner_state, clip_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _update(
    update: jax.Array, param: LeafLike, new: jax.Array, clipped: jax.Array
) -> jax.Array:
    """Return the update to the clipped parameter, or `update` if it is unchanged."""
    # The update itself is returned where nothing was clipped, since adding and
    # subtracting the parameter would round it, and where the clipped parameter is not
    # finite, since one bad element would make all that share its norm NaN.
    is_kept = (clipped == new) | ~jnp.isfinite(new) | ~jnp.isfinite(clipped)
    return jnp.where(is_kept, update, update_to(clipped, jnp.asarray(param), update))


def _widened(params: PyTree) -> PyTree:
    """Return the parameters in the dtypes in which `update` passes them to `clip`."""
    if is_placeholder(params):
        return params
    flat = _leaves.flatten_dense(params, _SPARSE)
    pairs = zip(flat.leaves, flat.clippable(), strict=True)
    return flat.rebuild(
        [_leaves.widen(jnp.asarray(x)) if is_live else x for x, is_live in pairs]
    )


def _check_engine(engine: Engine) -> None:
    """Raise if the clipping operation would set parameters to 0."""
    response = engine.clip.response
    while isinstance(response, responses.Detached):
        response = response.response
    if engine.clip.nonfinite == "zero":
        bad = 'nonfinite="zero"'
    elif isinstance(response, responses.Drop):
        bad = 'response="drop"'
    else:
        return
    raise ValueError(
        f"`clip` must not have {bad}, which would set parameters to 0. Remove it:"
        " constrain returns the update of `inner` where new parameters are not finite."
        " To skip bad steps, wrap the result: optclip.skip(optclip.constrain(...))."
    )


def _check_order(clip_state: PyTree) -> None:
    """Raise if `clip` has a state as an optimizer has, where `inner` only clips."""
    if jax.tree.leaves(clip_state):
        raise ValueError(
            "`inner` is a clipping transformation, and `clip` has the state of an"
            " optimizer. Exchange them: optclip.constrain(optimizer, clip)."
        )


def _check_wrappers(clip_state: PyTree) -> None:
    """Raise if a wrapper of optax returns zeros, not parameters, in some steps."""
    kinds = optax.ApplyIfFiniteState, optax.MultiStepsState
    for x in jax.tree.leaves(clip_state, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(x, kinds):
            name = type(x).__name__.removesuffix("State")
            raise ValueError(
                f"`clip` must not be inside a wrapper that returns zeros in some steps,"
                f" got a state of {name}. Wrap the result of constrain instead."
            )
