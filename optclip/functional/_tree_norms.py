"""The pure clips of many leaves by a common norm, and that norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from optclip import responses, scopes
from optclip._arrays import _leaves, _validate
from optclip._arrays._batching import Batched
from optclip._clip._clip import ScalingClip
from optclip.functional._lift import run
from optclip.norms import _roots
from optclip.norms._norm import of_order
from optclip.typing import AxisName, Labels, Mask, Nonfinite, Number, PyTree


def global_norm(
    tree: PyTree,
    *,
    ord: float | None = None,
    axis_name: AxisName | None = None,
    norm_mask: Mask | None = None,
) -> jax.Array:
    r"""The norm of all leaves together, :math:`(\sum_i |x_i|^p)^{1/p}`.

    Args:
      tree: any pytree of arrays.
      ord: p, any number above 0 or inf; None is 2.
      axis_name: see `optclip.functional`.
      norm_mask: see `optclip.functional`.

    Returns:
      A scalar, float32, or float64 if a leaf is; 0 for a tree without numbers, inf
      where the norm is above the largest float, NaN or inf if an entry is.

    Guarantees:
      Right to 1e-6 for p = 1, 2 and inf, and to 1e-5 for others from 0.5 up, whatever
      the dtypes of the leaves; squares never overflow on the way. A norm below 2**-60
      counts as 0, and an element below 2**-63 in a norm. The derivative at zero is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import global_norm
      >>> half = {"w": jnp.array([300.0, 400.0], jnp.float16), "frozen": None}
      >>> print(global_norm(half))
      500.0
    """
    clip = ScalingClip(
        scopes.TREE, of_order(ord), responses.Hard(),
        norm_mask=norm_mask, axis_name=axis_name,
    )  # fmt: skip
    return clip.measure(clip.layout(tree)).entries()[0]


def clip_by_group_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    groups: Labels,
    *,
    ord: float | None = None,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, dict[str, jax.Array]]:
    r"""Clip each group of leaves by the norm of the group.

    Args:
      tree: any pytree of arrays.
      max_norm: a number for all groups, or a dict by label; None is unclipped.
      groups: a tree of strings with the structure of `tree` or a prefix of it, or a
        function from the tree to one (see `optclip.by_path`); None marks leaves in no
        group, which are left alone.
      ord: p of the norm, any number above 0 or inf; None is 2.
      eps, strict, nonfinite, norm_mask, clip_mask, axis_name: see `optclip.functional`.

    Returns:
      A tree like `tree`, and the norm of each group before the clip, by label.

    Raises:
      TypeError: a label is not a string.
      ValueError: `max_norm` is negative or NaN, or its labels are not the groups'.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_group_norm
      >>> w, b, head = jnp.array([3.0]), jnp.array([4.0]), jnp.array([0.5])
      >>> grads = {"w": w, "b": b, "head": head}
      >>> labels = {"w": "body", "b": "body", "head": "head"}
      >>> clipped, norms = clip_by_group_norm(grads, 1.0, labels)
      >>> print(clipped["w"], clipped["b"], clipped["head"], norms["body"])
      [0.6] [0.8] [0.5] 5.0
    """
    clip = ScalingClip(
        scopes.groups(groups), of_order(ord), responses.Hard(), eps, strict,
        nonfinite, norm_mask, clip_mask, axis_name,
    )  # fmt: skip
    return run(clip, tree, "max_norm", max_norm)


def clip_by_global_norm(
    tree: PyTree,
    max_norm: Number,
    *,
    norm: Number | None = None,
    ord: float | None = None,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, jax.Array]:
    r"""Clip all leaves by their common norm, :math:`x \min(1, c / \|tree\|)`.

    Args:
      tree: any pytree of arrays.
      max_norm: c, a scalar.
      norm: the norm, if you have it already; it is then not computed. One that reads
        inf counts as not finite: leave it out if only its squares overflowed.
      ord: p of the norm, any number above 0 or inf; None is 2.
      eps, strict, nonfinite, norm_mask, clip_mask, axis_name: see `optclip.functional`.

    Returns:
      A tree like `tree`, and the norm before the clip: scalar, float32 or wider.

    Raises:
      ValueError: `max_norm` is negative or NaN, or `norm` negative (a NaN is for
        `nonfinite`); or both `strict` and `norm` are given, since
        the rounding error of that norm is not known.

    Guarantees:
      Inside the norm (with `eps` added) every leaf is kept to the bit, with `strict`
      up to 1.3e-4 of `max_norm` below it. Else the true norm of the output is at most
      `max_norm * (1 + 2e-6)`, before each element is rounded to the dtype of its leaf,
      and with `strict` at most `max_norm` after that; all leaves are scaled by one
      factor, in float32 or wider. For other orders than 1, 2 and inf it is `1 + 2e-5`.

    ================ ================================================================
    edge             result
    ================ ================================================================
    max_norm 0       zeros
    max_norm inf     untouched, whatever the entries; the norm is still returned
    max_norm < 0     ValueError; counts as 0 when traced
    norm 0           untouched; the derivative is the identity
    a NaN or inf     by `nonfinite`
    norm > 3.4e38    inf: by `nonfinite`
    below 2**-60     a norm and a max_norm count as 0; with `strict` a max_norm below
                     2**-36
    ================ ================================================================

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_global_norm
      >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
      >>> clipped, norm = clip_by_global_norm(grads, 1.0)
      >>> print(clipped["w"], clipped["b"], norm)
      [0.6 0. ] [0.8] 5.0

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent
    Neural Networks", 2012, arXiv:1211.5063; `tf.clip_by_global_norm`.
    """
    clip = ScalingClip(
        scopes.TREE, of_order(ord), responses.Hard(), eps, strict, nonfinite,
        norm_mask, clip_mask, axis_name,
    )  # fmt: skip
    if norm is None:
        return run(clip, tree, "max_norm", max_norm)
    if strict:
        wanted = "None with strict=True: the rounding error of a given norm is unknown"
        advice = "Leave out norm= or strict=."
        raise ValueError(_validate.must_be("norm", wanted, norm, advice))
    given = jnp.asarray(_checked_norm(norm))
    given = given.astype(
        _leaves.real_dtype(jnp.promote_types(given.dtype, jnp.float16))
    )
    known = Batched([_roots.large_enough(given)])
    return run(clip, tree, "max_norm", max_norm, known)


def _checked_norm(norm: Number) -> Number:
    wanted = "the norm of the tree, a real scalar of 0 or more, or None to compute it"
    if not _validate.is_number(norm) or jnp.ndim(norm):
        raise TypeError(_validate.must_be("norm", wanted, norm))
    known = _validate.concrete(norm)
    if known is not None and known < 0:
        raise ValueError(_validate.must_be("norm", wanted, norm))
    return norm
