"""SPECTRA: the singular values of each step, and of gradients, kept below a limit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from optclip import scopes
from optclip._arrays import _leaves, _validate
from optclip._arrays._types import PyTree
from optclip.recipes._recipe_options import (
    build,
    refuse_behind_moments,
    scheduled,
    unwrapped,
)
from optclip.spectral._interface import Method, scale_by_shape
from optclip.thresholds._interface import Named
from optclip.transforms._interface import clip_by
from optclip.typing import MomentClipOptions, NumberOrSchedule
from optclip.wrappers._interface import transformation

# What the authors divide by at a learning rate below it.
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
    r"""SPECTRA: the singular values of each step softly capped, behind any optimizer.

    .. math:: u \leftarrow \sqrt{\max(1, outputs / inputs)}\; H_{c_t}(u), \qquad
        H_c(u) = (I + u u^* / c^2)^{-1/2} u, \qquad
        c_t = c\,\eta_w / \eta_t \text{ while } t < w

    Args:
      inner: the optimizer, without learning rate and weight decay; None is
        `optax.scale_by_adam()`.
      max_value: c, what a singular value of a step is softly capped at: a number of at
        least 0 or an optax schedule.
      max_gradient: the same of a gradient, before `inner`; the authors have 0.1 for it,
        and advise None, which leaves gradients alone.
      learning_rate: :math:`\eta`, the schedule of the learning rate, an optax schedule.
        In the warm-up both caps are divided by it, so that cap times learning rate
        stays what it is at the end of the warm-up. None for none.
      warmup: w, the number of first steps in which `learning_rate` does so; 0 for none.
      matrix_axes: the axes of the inputs and of the outputs of a kernel, of which
        negative ones count from the end; a leaf with more of them is a batch.
      transposed: a function of the path of a leaf that returns whether its outputs are
        on the first of these axes. To the authors those of an embedding `(vocabulary,
        features)` are: `lambda path: "embed" in path`.
      method: how singular values are capped: `"newton_schulz"` by matrix products
        alone, `"eigh"` by a decomposition; `optclip.clip_by_singular_value` says what
        each is good for.
      options: further arguments of `optclip.clip_by_singular_value`: `mask`,
        `axis_name`, `nonfinite`, `record` and `name`.

    Returns:
      A transformation in place of Adam: weight decay and learning rate follow. Matrices
      are batched over axes that are not `matrix_axes`. A vector is a matrix of one
      singular value, its norm, in `max_value`, and left alone by `max_gradient`. Unlike
      there its norm is capped below c, too, so that it does not fall from c to
      :math:`c / \sqrt 2` at c; to leave vectors alone, their `apply_to="2d"`, give
      `mask=lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)`. Their decay of c at
      the end of the training is an optax schedule for `max_value`. The record of
      `max_gradient` is named `"gradient"`.

    Raises:
      ValueError: one of `learning_rate` and `warmup` is given without the other.

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

    Source: Jiang, Semenov and Stich, *Enhancing LLM Training via Spectral Clipping*,
    2026, arXiv:2603.14315; numbers and warm-up from its code.
    """
    _check_schedule(learning_rate, warmup)
    wanted = "a function of the path of a leaf, or None"
    _validate.kind("transposed", transposed, (Callable, type(None)), wanted)
    refuse_behind_moments("spectra", options)
    chosen = unwrapped(options)

    def capped(argument: str, value: NumberOrSchedule, **named: str) -> Any:
        if not callable(value):
            _validate.number(argument, value)
        limit = Named(argument, _warmed_up(value, learning_rate, warmup))
        return build(
            clip_by, named | chosen, limit, norm="l2", response="smooth", eps=0.0,
            over=scopes.singular_values(matrix_axes, method=method),
            norm_mask=None, clip_mask=None,
        )  # fmt: skip

    before = optax.identity()
    if max_gradient is not None:
        before = optax.masked(
            capped("max_gradient", max_gradient, name="gradient"), _are_matrices
        )
    return optax.with_extra_args_support(
        optax.chain(
            before,
            transformation("inner", optax.scale_by_adam() if inner is None else inner),
            capped("max_value", max_value),
            scale_by_shape(
                scopes.matrices(matrix_axes), transposed,
                chosen.get("mask"), chosen.get("axis_name"),
            ),
        )
    )  # fmt: skip


def _check_schedule(learning_rate: Any, warmup: Any) -> None:
    wanted, static = "an optax schedule, or None", _validate.static("learning_rate")
    kinds = (Callable, type(None))
    _validate.kind("learning_rate", learning_rate, kinds, wanted, static)
    _validate.length("warmup", warmup, least=0)
    if (learning_rate is None) == (warmup > 0):
        raise ValueError(
            "`learning_rate` and `warmup` must be given together, got"
            f" learning_rate={learning_rate!r} and warmup={warmup}. Give both to raise"
            " the caps in the warm-up, or neither."
        )


def _warmed_up(
    value: NumberOrSchedule,
    learning_rate: Callable[[jax.Array], Any] | None,
    warmup: int,
) -> NumberOrSchedule:
    """What a cap is in the warm-up, such that cap times learning rate stays."""
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
