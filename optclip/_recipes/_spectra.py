"""SPECTRA: smooth caps on the singular values of updates and of gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from .._arrays import _leaves, _validate
from .._arrays._types import PyTree
from .._spectral import Method, matrices, scale_by_shape, singular_values
from .._thresholds import Named
from .._transforms import clip_by
from .._typing import MomentClipOptions, NumberOrSchedule
from .._wrappers import transformation
from ._recipe_options import (
    build,
    for_record,
    masked,
    reject_zero_after_moments,
    scheduled,
    unwrapped,
)

# Smaller learning rates count as this one, as in the authors' code.
_LEAST_RATE = 1e-10


def spectra(
    inner: optax.GradientTransformation | None = None,
    max_value: NumberOrSchedule = 10.0,
    *,
    max_gradient: NumberOrSchedule | None = None,
    learning_rate: Callable[[jax.Array], Any] | None = None,
    warmup: int = 0,
    matrix_axes: tuple[int, int] = (-2, -1),
    transposed: Callable[[str], bool] | None = None,
    method: Method = "newton_schulz",
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Cap the singular values of an optimizer's updates smoothly (SPECTRA).

    Each matrix `u` becomes `sqrt(max(1, outputs / inputs)) * H(u)`, where `H` replaces
    each singular value `s` by `s / sqrt(1 + s**2 / c**2)`. The cap `c` is `max_value`,
    multiplied during the warm-up by `learning_rate(warmup) / learning_rate(step)`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> rate = optax.warmup_constant_schedule(0.0, 0.1, warmup_steps=100)
      >>> tx = optax.chain(
      ...     optclip.recipes.spectra(max_value=1.0, learning_rate=rate, warmup=100),
      ...     optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(rate),
      ... )
      >>> kernel = jnp.eye(4, 16)
      >>> updates, state = tx.update(kernel, tx.init(kernel), kernel)
      >>> clip = optclip.recipes.spectra(optax.identity(), max_value=1.0)
      >>> print(f"{clip.update(3 * kernel, clip.init(kernel))[0][0, 0]:.2f}")
      1.90

    Args:
      inner: The optimizer to wrap, without learning rate and weight decay. Default:
        `optax.scale_by_adam()`.
      max_value: Smooth cap of the updates' singular values: a number or a schedule.
      max_gradient: The same for gradients, before `inner`. Default: None, as the
        authors recommend; their code has 0.1.
      learning_rate: Schedule of the learning rate; requires `warmup`. Default: None.
      warmup: Number of first steps that scale both caps by `learning_rate`.
      matrix_axes: Axes of a kernel's inputs and outputs. Other axes are batch axes.
      transposed: Function of a leaf's path that returns whether the outputs are on the
        first of these axes, as for the authors' embeddings `(vocabulary, features)`:
        `lambda path: "embed" in path`. Default: none.
      method: `"newton_schulz"` or `"eigh"`; see `optclip.clip_by_singular_value`.
      options: `mask`, `axis_name`, `nonfinite`, `record` and `name`, as in
        `optclip.clip_by_singular_value`.

    Returns:
      A transformation that replaces Adam; add weight decay and learning rate after it.
      The record of `max_gradient` is named `gradient`; with `name="x"`, `x_gradient`.

    Raises:
      ValueError: Only one of `learning_rate` and `warmup` is passed, or
        `nonfinite="zero"` is passed, which would hide NaN moments.

    Differences from the authors' code:
      - A vector's singular value is its norm, which `max_value` also scales below `c`,
        so that the output is continuous; `max_gradient` excludes vectors.
      - `apply_to="2d"`, which excludes all vectors, is
        `mask=lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)`.
      - For a cap that decays at the end of training, pass a schedule as `max_value`.

    References:
      Jiang, Semenov and Stich, *Enhancing LLM Training via Spectral Clipping*, 2026,
      arXiv:2603.14315; defaults and warm-up from its code.
    """
    warmup = _checked_warmup(learning_rate, warmup)
    wanted = "a function of a leaf's path, or None"
    _validate.kind("transposed", transposed, (Callable, type(None)), wanted)
    reject_zero_after_moments("spectra", options)
    chosen = unwrapped(options)

    def capped(argument: str, value: NumberOrSchedule, options: dict[str, Any]) -> Any:
        if not callable(value):
            _validate.number(argument, value)
        limit = Named(argument, _warmed_up(value, learning_rate, warmup))
        return build(
            clip_by, options, limit, norm="l2", response="smooth", eps=0.0,
            over=singular_values(matrix_axes, method=method),
        )  # fmt: skip

    before = optax.identity()
    if max_gradient is not None:
        of_gradients = for_record("gradient", options)
        cap = capped("max_gradient", max_gradient, of_gradients)
        before = masked(cap, _are_matrices)
    return optax.chain(
        before,
        transformation("inner", optax.scale_by_adam() if inner is None else inner),
        capped("max_value", max_value, chosen),
        scale_by_shape(
            matrices(matrix_axes), transposed,
            chosen.get("mask"), chosen.get("axis_name"),
        ),
    )  # fmt: skip


def _checked_warmup(learning_rate: Any, warmup: Any) -> int:
    wanted = "an optax schedule, or None"
    static = _validate.static("learning_rate", learning_rate)
    kinds = (Callable, type(None))
    _validate.kind("learning_rate", learning_rate, kinds, wanted, static)
    warmup = _validate.length("warmup", warmup, least=0)
    if (learning_rate is None) == (warmup > 0):
        raise ValueError(
            "`learning_rate` and `warmup` must be passed together, got"
            f" learning_rate={learning_rate!r} and warmup={warmup}. Pass both to raise"
            " the caps during the warm-up, or neither."
        )
    return warmup


def _warmed_up(
    value: NumberOrSchedule,
    learning_rate: Callable[[jax.Array], Any] | None,
    warmup: int,
) -> NumberOrSchedule:
    """Return the cap, scaled in the warm-up to keep cap times learning rate fixed."""
    if learning_rate is None:
        return value

    def factor(step: jax.Array) -> jax.Array:
        last = learning_rate(jnp.asarray(warmup, step.dtype))
        rate = jnp.maximum(learning_rate(step), _LEAST_RATE)
        return jnp.where(step < warmup, last / rate, 1.0)

    return scheduled(operator.mul, value, factor)


def _are_matrices(tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: len(getattr(x, "shape", ())) > 1, tree, is_leaf=_leaves.is_sparse
    )
