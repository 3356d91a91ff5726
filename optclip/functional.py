"""The pure layer: a tree and a threshold in, a clipped tree out. No state, no optax.

Every function takes any pytree or a bare array and works under jit, grad, vmap, scan
and shard_map. None stays None; integers, bools, float0 and PRNG keys pass untouched
and enter no norm; a `jax.experimental.sparse.BCOO` leaf stands for its dense gradient.
Structure, shapes, dtypes and weak types of the output are those of the input.

Arguments that all clips share:

========== =====================================================================
nonfinite  ``"propagate"`` a NaN or inf norm makes all that share it NaN, a value
           clip sends inf to the bound and keeps NaN; ``"zero"`` all that share
           the norm becomes zero; ``"drop"`` the bad entries become zero and the
           rest is clipped; ``"raise"`` an error under `checkify`, else propagate
eps        added to the norm before the division; PyTorch's formula has 1e-6
strict     the true norm of the output is never above the threshold, whatever the
           roundings: clips inside a band of 1e-6 below it (1e-4 for unusual ord)
norm_mask  tree of bools, a prefix of one, or a function tree -> tree: which leaves
           enter the norm
clip_mask  likewise: which leaves are scaled
axis_name  mapped axes to combine the norm over, `()` for none; None reads them off
           the type of each leaf, which `jax.shard_map` keeps
========== =====================================================================

A threshold is 0 or more, a number or array, traced or not: 0 clips to zero, inf
touches nothing. A concrete negative or NaN raises ValueError, a traced negative
counts as 0. A prefix tree may hold None for 'unclipped'.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optclip import _clip, _leaves, _trees, _validate, norms, responses, scopes
from optclip._clip import Clip, Limits
from optclip.norms import Measured


def global_norm(
    tree: Any, *, ord: float | None = None, axis_name: Any = None, norm_mask: Any = None
) -> jax.Array:
    r"""The norm of all leaves together, :math:`(\sum_i |x_i|^p)^{1/p}`.

    Args:
      tree: any pytree of arrays.
      ord: p, any number above 0 or inf; None is 2.
      axis_name: see the module.
      norm_mask: see the module.

    Returns:
      A scalar, float32, or float64 if a leaf is; 0 for a tree without numbers, inf
      where the norm is above the largest float, NaN or inf if an entry is.

    Guarantees:
      Summed in float32 or wider whatever the leaves are; no finite input overflows
      or underflows on the way. The derivative at zero is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import global_norm
      >>> half = {"w": jnp.array([300.0, 400.0], jnp.float16), "frozen": None}
      >>> print(global_norm(half))
      500.0
    """
    clip = Clip(
        scopes.TREE, norms.of_order(ord), responses.hard,
        norm_mask=norm_mask, axis_name=axis_name,
    )  # fmt: skip
    return clip.measure(clip.open(tree)).measured[0].norm


def clip_by_value(
    tree: Any,
    lower: Any,
    upper: Any,
    *,
    nonfinite: str = "propagate",
    strict: bool = False,
    clip_mask: Any = None,
) -> Any:
    r"""Clip each element to bounds, :math:`\max(\min(x, upper), lower)`.

    Args:
      tree: any pytree of arrays. Complex elements are clipped by their modulus.
      lower: a number, an array that broadcasts to each leaf without growing it, or a
        prefix tree of these. None, here or in the tree, is no bound.
      upper: likewise.
      nonfinite: see the module; `zero` and `drop` both put zero for NaN and inf.
      strict: round bounds that the dtype does not have towards zero.
      clip_mask: see the module.

    Returns:
      A tree like `tree`. Elements inside the bounds are kept to the bit.

    Raises:
      TypeError: a bound is no number.
      ValueError: a bound is NaN or does not broadcast; or both are concrete numbers
        and `lower > upper`. (Where an array `lower > upper`, the result is `lower`.)

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_value
      >>> print(clip_by_value(jnp.array([-5.0, 2.0, 3.0]), -4.4, 2.5))
      [-4.4  2.   2.5]

    Source: `tf.clip_by_value`; Mikolov, "Statistical Language Models Based on Neural
    Networks", PhD thesis, Brno University of Technology, 2012.
    """
    clip = Clip(
        scopes.ELEMENT, norms.L2, responses.hard,
        strict=strict, nonfinite=nonfinite, clip_mask=clip_mask,
    )  # fmt: skip
    for name, bound in (("lower", lower), ("upper", upper)):
        for value in jax.tree.leaves(bound):
            _validate.number(name, value, negative=True)
    _validate.ordered(lower, upper)
    opened = clip.open(tree)
    index = opened.tree(list(range(len(opened.blocks))))
    low = _trees.fill("lower", lower, index, none=-jnp.inf)
    high = _trees.fill("upper", upper, index)
    pairs = zip(_flat(opened, low), _flat(opened, high), strict=True)
    return clip.apply(opened, [], [Limits(a, b) for a, b in pairs])[0]


def clip_by_norm(
    tree: Any,
    max_norm: Any,
    *,
    axis: int | tuple[int, ...] | None = None,
    ord: float | None = None,
    eps: Any = 0.0,
    strict: bool = False,
    nonfinite: str = "propagate",
    clip_mask: Any = None,
    axis_name: Any = None,
) -> Any:
    r"""Clip each leaf by its own norm, :math:`x \min(1, c / \|x\|)`.

    Args:
      tree: any pytree of arrays.
      max_norm: c, a number or array that broadcasts to the norms (the leaf's shape
        with 1 at `axis`, or a scalar), or a prefix tree of these.
      axis: the axes that each norm is taken over; None is all.
      ord: p of the norm, any number above 0 or inf; None is 2.
      eps, strict, nonfinite, clip_mask, axis_name: see the module.

    Returns:
      A tree like `tree`. Leaves, or slices, inside the norm are kept to the bit.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: `max_norm` is negative or NaN, or fits no norm; a leaf lacks `axis`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_norm
      >>> print(clip_by_norm(jnp.array([[3.0, 0.1], [4.0, 0.2]]), 1.0, axis=0))
      [[0.6 0.1]
       [0.8 0.2]]

    Source: `tf.clip_by_norm`.
    """
    scope = scopes.LEAF if axis is None else scopes.axes(axis)
    clip = Clip(
        scope, norms.of_order(ord), responses.hard, eps, strict, nonfinite,
        clip_mask=clip_mask, axis_name=axis_name,
    )  # fmt: skip
    return _run(clip, tree, "max_norm", max_norm)[0]


def clip_by_average_norm(
    tree: Any,
    max_norm: Any,
    *,
    eps: Any = 0.0,
    strict: bool = False,
    nonfinite: str = "propagate",
    clip_mask: Any = None,
    axis_name: Any = None,
) -> Any:
    r"""Clip each leaf by its average norm, :math:`x \min(1, c\,n / \|x\|_2)`.

    The average norm is the L2 norm over the number n of elements, as TensorFlow
    defined it; for the root mean square see `clip_by_rms`.

    Args:
      tree: any pytree of arrays.
      max_norm: c, a number, or a prefix tree of numbers.
      eps, strict, nonfinite, clip_mask, axis_name: see the module.

    Returns:
      A tree like `tree`.

    Raises:
      ValueError: `max_norm` is negative or NaN, or fits no norm.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_average_norm
      >>> print(clip_by_average_norm(jnp.array([3.0, 4.0]), 0.5))
      [0.6 0.8]

    Source: `tf.compat.v1.clip_by_average_norm`.
    """
    clip = Clip(
        scopes.LEAF, norms.AVERAGE, responses.hard, eps, strict, nonfinite,
        clip_mask=clip_mask, axis_name=axis_name,
    )  # fmt: skip
    return _run(clip, tree, "max_norm", max_norm)[0]


def clip_by_rms(
    tree: Any,
    max_rms: Any,
    *,
    axis: int | tuple[int, ...] | None = None,
    eps: Any = 0.0,
    strict: bool = False,
    nonfinite: str = "propagate",
    clip_mask: Any = None,
    axis_name: Any = None,
) -> Any:
    r"""Clip each leaf by its root mean square, :math:`x \min(1, c / RMS(x))`.

    Args:
      tree: any pytree of arrays.
      max_rms: c, a number or array that broadcasts to the norms, or a prefix tree.
      axis: the axes that each mean is taken over; None is all.
      eps, strict, nonfinite, clip_mask, axis_name: see the module.

    Returns:
      A tree like `tree`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: `max_rms` is negative or NaN, or fits no norm; a leaf lacks `axis`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_rms
      >>> print(clip_by_rms(jnp.array([3.0, -3.0, 3.0, 3.0]), 1.0))
      [ 1. -1.  1.  1.]

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear
    Memory Cost", 2018, arXiv:1804.04235; `optax.clip_by_block_rms`.
    """
    scope = scopes.LEAF if axis is None else scopes.axes(axis)
    clip = Clip(
        scope, norms.RMS, responses.hard, eps, strict, nonfinite,
        clip_mask=clip_mask, axis_name=axis_name,
    )  # fmt: skip
    return _run(clip, tree, "max_rms", max_rms)[0]


def clip_by_group_norm(
    tree: Any,
    max_norm: Any,
    groups: Any,
    *,
    ord: float | None = None,
    eps: Any = 0.0,
    strict: bool = False,
    nonfinite: str = "propagate",
    norm_mask: Any = None,
    clip_mask: Any = None,
    axis_name: Any = None,
) -> tuple[Any, dict[str, jax.Array]]:
    r"""Clip each group of leaves by the norm of the group.

    Args:
      tree: any pytree of arrays.
      max_norm: a number for all groups, or a dict by label; None is unclipped.
      groups: a tree of strings with the structure of `tree` or a prefix of it, or a
        function from the tree to one (see `optclip.by_path`); None marks leaves in no
        group, which are left alone.
      ord: p of the norm, any number above 0 or inf; None is 2.
      eps, strict, nonfinite, norm_mask, clip_mask, axis_name: see the module.

    Returns:
      A tree like `tree`, and the norm of each group before the clip, by label.

    Raises:
      TypeError: a label is no string.
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
    clip = Clip(
        scopes.groups(groups), norms.of_order(ord), responses.hard, eps, strict,
        nonfinite, norm_mask, clip_mask, axis_name,
    )  # fmt: skip
    return _run(clip, tree, "max_norm", max_norm)


def clip_by_global_norm(
    tree: Any,
    max_norm: Any,
    *,
    norm: Any = None,
    ord: float | None = None,
    eps: Any = 0.0,
    strict: bool = False,
    nonfinite: str = "propagate",
    norm_mask: Any = None,
    clip_mask: Any = None,
    axis_name: Any = None,
) -> tuple[Any, jax.Array]:
    r"""Clip all leaves by their common norm, :math:`x \min(1, c / \|tree\|)`.

    Args:
      tree: any pytree of arrays.
      max_norm: c, a scalar.
      norm: the norm, if it is in hand already; it is then not computed.
      ord: p of the norm, any number above 0 or inf; None is 2.
      eps, strict, nonfinite, norm_mask, clip_mask, axis_name: see the module.

    Returns:
      A tree like `tree`, and the norm before the clip: scalar, float32 or wider.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: `max_norm` or `norm` is negative or NaN; or `strict` with a `norm`,
        whose error nobody knows.

    Guarantees:
      Inside the norm every leaf is kept to the bit. Else the true norm of the output
      is at most `max_norm * (1 + 2 eps)` of the leaf dtype, and with `strict` at most
      `max_norm`; all leaves are scaled by one factor, in float32 or wider.

    ================ ================================================================
    edge             result
    ================ ================================================================
    max_norm 0       zeros
    max_norm inf     untouched, whatever the entries; the norm is still returned
    max_norm < 0     ValueError; counts as 0 when traced
    norm 0           untouched; the derivative is the identity
    a NaN or inf     by `nonfinite`
    norm > 3.4e38    returned as inf; the output is right all the same
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
        scopes.TREE, norms.of_order(ord), responses.hard, eps, strict, nonfinite,
        norm_mask, clip_mask, axis_name,
    )  # fmt: skip
    if norm is None:
        return _run(clip, tree, "max_norm", max_norm)
    if strict:
        raise ValueError(
            "strict=True cannot be had with a norm that the caller supplies, because"
            " its error is not known. Leave out norm= or strict=."
        )
    given = jnp.asarray(_checked_norm(norm))
    given = given.astype(
        _leaves.real_dtype(jnp.promote_types(given.dtype, jnp.float16))
    )
    return _run(
        clip, tree, "max_norm", max_norm, [Measured(given, jnp.ones_like(given))]
    )


def _run(
    clip: Clip,
    tree: Any,
    name: str,
    threshold: Any,
    in_hand: list[Measured] | None = None,
) -> tuple[Any, Any]:
    for value in jax.tree.leaves(threshold):
        _validate.number(name, value)
    opened = clip.open(tree)
    measured = clip.measure(opened).measured if in_hand is None else in_hand
    spread = _trees.fill(name, threshold, opened.tree([m.root for m in measured]))
    limits = [
        clip.fit(name, limit, m.root)
        for limit, m in zip(_flat(opened, spread), measured, strict=True)
    ]
    clipped, _ = clip.apply(opened, measured, limits)
    return clipped, opened.tree([m.norm for m in measured])


def _flat(opened: _clip.Opened, spread: Any) -> list[Any]:
    return opened.treedef.flatten_up_to(spread)


def _checked_norm(norm: Any) -> Any:
    if not _validate.is_number(norm) or jnp.ndim(norm):
        raise TypeError(
            f"norm={norm!r} ({type(norm).__name__}) is not accepted. Give the norm of"
            " the tree as a real scalar, or None to have it computed."
        )
    known = _validate.concrete(norm)
    if known is not None and known < 0:
        raise ValueError(
            f"norm={norm} is negative. Give the norm of the tree, or None."
        )
    return norm
