"""The pure clips of many leaves by a common norm, and that norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from optclip import responses, scopes
from optclip._arrays import _leaves, _validate
from optclip._arrays._batching import Batched
from optclip._clip import SCALE, Clip, layout_of
from optclip.functional._clip_by import clip_by, run
from optclip.norms._interface import flush_small, of_order
from optclip.responses._interface import resolve
from optclip.scopes._interface import TREE
from optclip.thresholds._interface import Named
from optclip.typing import (
    AxisName,
    Labels,
    Mask,
    Nonfinite,
    Number,
    PyTree,
    ResponseLike,
)


def global_norm(
    tree: PyTree,
    *,
    ord: float | None = None,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> jax.Array:
    r"""The norm of all leaves together, :math:`(\sum_i |x_i|^p)^{1/p}`.

    Args:
      tree: any pytree of arrays.
      ord: the order p of the norm, any number above 0, or inf for the largest modulus;
        None is 2.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.
      mask: which leaves are measured: a tree of bools, a prefix of one, or a function
        that makes one of the tree, such as `optclip.by_path(...)`; None is all leaves.

    Returns:
      A scalar, float32, or float64 if a leaf is; 0 for a tree without numbers, inf
      where the norm is above the largest float, NaN or inf if an entry is.

    Guarantees:
      Accurate to within 1e-5 for p = 2 and inf, and to within 1e-4 for others from 0.5
      up, whatever the dtypes of the leaves; squares never overflow on the way. A norm
      below 2**-60 counts as 0, and an element below 2**-63 in a norm. The derivative at
      zero is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import global_norm
      >>> half = {"w": jnp.array([300.0, 400.0], jnp.float16), "frozen": None}
      >>> print(global_norm(half))
      500.0
    """
    clip = Clip(
        TREE, of_order(ord), responses.Hard(), SCALE, mask=mask, axis_name=axis_name
    )
    measured = clip.norm.measure(layout_of(clip, tree).blocks)
    return measured.norms.entries()[0]


def clip_by_group_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    groups: Labels,
    *,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, dict[str, jax.Array]]:
    r"""Clip each group of leaves by the norm of the group.

    .. math:: x \leftarrow x \min(1, c_g / \|\text{all leaves of the group } g\|)

    Args:
      tree: any pytree of arrays.
      max_norm: the largest norm that is let through: a number for all groups, or a dict
        of numbers by label; None is unclipped.
      groups: the label of each leaf: a tree of strings with the structure of `tree`, a
        prefix of it, or a function that makes one of the tree, such as
        `optclip.by_path(...)`; None marks leaves in no group, which are left alone.
      ord: the order p of the norm, any number above 0, or inf for the largest modulus;
        None is 2.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      strict: whether the true norm of the output is never above the threshold, whatever
        is rounded on the way. It then clips inside a band of 1.3e-4 below the threshold
        and rounds towards zero.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.

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
    return clip_by(
        tree, Named("max_norm", max_norm), over=scopes.groups(groups),
        norm=of_order(ord), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip


def clip_by_global_norm(
    tree: PyTree,
    max_norm: Number,
    *,
    use_norm: Number | None = None,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, jax.Array]:
    r"""Clip all leaves by their common norm n, :math:`x \min(1, c / n)`.

    Args:
      tree: any pytree of arrays.
      max_norm: the largest norm that is let through, c in the formula: a number. 0
        clips to zero, inf clips nothing.
      use_norm: the norm of the tree, if you have it already; it is then not computed.
        One that reads inf counts as not finite: leave it out if only its squares
        overflowed.
      ord: the order p of the norm, any number above 0, or inf for the largest modulus;
        None is 2.
      response: what happens to a norm above its threshold: `"hard"` scales it to the
        threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. A name, an object with `coefficient(norm, threshold)`, or a
        function of those two.
      eps: a number of at least 0 that is added to the norm before the threshold is
        divided by it; PyTorch's formula has 1e-6.
      strict: whether the true norm of the output is never above the threshold, whatever
        is rounded on the way. It then clips inside a band of 1.3e-4 below the threshold
        and rounds towards zero.
      nonfinite: what a NaN or an inf does: `"propagate"` makes all that share its norm
        NaN; `"zero"` makes all that share it zero; `"raise"` raises an error under
        `checkify`.
      mask: which leaves are clipped; the others are left alone altogether, neither
        measured nor scaled. A tree of bools, a prefix of one, or a function that makes
        one of the tree, such as `optclip.by_path(...)`; None is all leaves.
      axis_name: the mapped axes that leaves are split over, which a norm then spans: a
        name, a tuple of names (`()` for none), a `PartitionSpec`, or a tree of these.
        None reads them off the type of each leaf, which `jax.shard_map` keeps.

    Returns:
      A tree like `tree`, and the norm before the clip: scalar, float32 or wider.

    Raises:
      ValueError: `max_norm` is negative or NaN, or `use_norm` negative (a NaN is for
        `nonfinite`); or both `strict` and `use_norm` are given: the rounding error of
        that norm is not known.

    Guarantees:
      Inside the norm (with `eps` added) every leaf is kept to the bit, with `strict`
      up to 1.3e-4 of `max_norm` below it. Else the true norm of the output is at most
      `max_norm * (1 + 2e-5)`, before each element is rounded to the dtype of its leaf,
      and with `strict` at most `max_norm` after that; all leaves are scaled by one
      factor, in float32 or wider. For orders other than 2 and inf it is `1 + 2e-4`.

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
    clip = Clip(
        TREE, of_order(ord), resolve(response), SCALE, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
    threshold = Named("max_norm", max_norm)
    return run(clip, tree, threshold, norms=_norm_argument(use_norm, strict=strict))


def _norm_argument(norm: Number | None, *, strict: bool) -> Batched | None:
    """Return the checked `use_norm`, None to compute the norm."""
    if norm is None:
        return None
    if strict:
        raise ValueError(
            "Only one of strict=True and use_norm= must be given, got both: the"
            " rounding error of a norm that is given is not known. Leave one out."
        )
    given = jnp.asarray(_checked_norm(norm))
    dtype = _leaves.real_dtype(jnp.promote_types(given.dtype, jnp.float16))
    return Batched([flush_small(given.astype(dtype))])


def _checked_norm(norm: Number) -> Number:
    wanted = "the norm of the tree, a real scalar of 0 or more, or None to compute it"
    if not _validate.is_number(norm) or jnp.ndim(norm):
        raise TypeError(_validate.must_be("use_norm", wanted, norm))
    concrete_norm = _validate.concrete(norm)
    if concrete_norm is not None and concrete_norm < 0:
        raise ValueError(_validate.must_be("use_norm", wanted, norm))
    return norm
