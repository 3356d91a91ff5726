"""Reject transformations that do more than clip, which Keras would apply wrongly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._arrays._types import PyTree
from .._typing import ConstrainState, SkipState
from .._wrappers import transformation

_SKIPS = (
    "a transformation that does not skip steps",
    "The Keras optimizer would move the parameters by its moments in a skipped step."
    ' Pass the clipping inside with nonfinite="zero", or use `skip` with an optax'
    " optimizer in a custom training loop.",
)
_LIMITS = (
    "a transformation that does not limit parameters",
    "Pass only the clipping of gradients, and layers a `kernel_constraint` such as"
    " keras.constraints.MaxNorm.",
)
_WRONG = {
    SkipState: _SKIPS,
    optax.ApplyIfFiniteState: _SKIPS,
    ConstrainState: _LIMITS,
}


def clipping(clip: Any) -> optax.GradientTransformationExtraArgs:
    """Return `clip` as a transformation with extra arguments, or raise."""
    advice = "Pass one that clips, such as optclip.clip_by_global_norm(1.0)."
    return transformation("clip", clip, advice)


def check_clip(
    clip: optax.GradientTransformationExtraArgs, state: PyTree, params: PyTree
) -> None:
    """Raise if `clip`, with this first state, is no transformation that only clips."""
    kinds = tuple(_WRONG)
    for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(part, kinds):
            wanted, advice = _WRONG[type(part)]
            got = type(part).__name__
            raise ValueError(f"`clip` must be {wanted}, got {got}. {advice}")
    if _negates(clip, state, params):
        raise ValueError(
            "`clip` must be a transformation that does not negate the gradients, got"
            " one that does, as optax optimizers do. The Keras optimizer negates them"
            " too, so the loss would grow. Pass only the clipping, such as"
            " optclip.clip_by_global_norm(1.0), without optax.sgd or optax.adam; the"
            " Keras optimizer takes the step."
        )


def _negates(
    clip: optax.GradientTransformationExtraArgs, state: PyTree, params: PyTree
) -> bool:
    @jax.jit
    def product(state: PyTree, params: PyTree) -> jax.Array:
        # Entries that differ, since some transformations subtract the mean.
        grads = jax.tree.map(_waves, params)
        opposite = jax.tree.map(jnp.negative, grads)
        # A schedule of learning rates may begin with zero.
        state = clip.update(grads, state, params)[1]
        # The difference of two updates has no noise and no weight decay.
        up, down = (clip.update(g, state, params)[0] for g in (grads, opposite))
        products = jax.tree.map(lambda u, d, g: jnp.sum((u - d) * g), up, down, grads)
        return jnp.sum(jnp.stack(jax.tree.leaves(products)))

    try:
        # Only a scalar is returned, so the updates need not be stored.
        return bool(product(state, params) < 0)
    except Exception:
        # An error of `clip` itself is raised by the first step too, and Keras may build
        # with abstract arrays, on which nothing can be compared.
        return False


def _waves(x: jax.Array) -> jax.Array:
    return jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)
