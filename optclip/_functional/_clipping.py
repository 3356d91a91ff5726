"""Clipping as pure functions: `clip_by`, and one function for each of its uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from .. import _scopes as scopes
from .._arrays import _axis_names, _validate
from .._arrays._batching import Batched
from .._arrays._call_errors import explains_call
from .._arrays._numerics import as_array
from .._clip import MOVE, SCALE, Clip, apply, clip_of, decide, lay_out, layout_of
from .._norms import L2, Measured, NormLike, as_norm, flush_small, of_order
from .._responses import Hard, signs, without_schedules
from .._scopes import ELEMENT, TREE, ScopeLike, as_scope, declaring
from .._thresholds import Named, as_named
from .._typing import AxisName, Labels, Mask, Nonfinite, Number, PyTree, ResponseLike
from ._integers import clip_integers, is_data, raise_if_data

_STEPLESS = "A pure function has no step count"

P = ParamSpec("P")
T = TypeVar("T")

_NEEDS_STATE = (
    "Rules and schedules need a state: pass them to the transformation, such as"
    " optclip.clip_by_global_norm(rule), in the optimizer."
)


def run(
    clip: Clip,
    tree: PyTree,
    threshold: Number | PyTree,
    norms: Batched | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the clipped tree and its norms, computed unless `norms` are passed."""
    named = as_named(threshold)
    name, limits = named.name, named.value
    _validate.threshold_given(name, limits)
    raise_if_exchanged(name, tree, limits)
    check_bound(name, limits, **signs(clip.response))
    layout = layout_of(clip, tree)
    raise_if_data(tree)
    measured = clip.norm.measure(layout.blocks) if norms is None else Measured(norms)
    decision = decide(clip, layout, measured, {name: layout.fill(name, limits)})
    clipped, _ = apply(decision)
    return clipped, layout.tree(decision.norms.entries())


def raise_if_exchanged(name: str, tree: PyTree, threshold: PyTree) -> None:
    """Raise if the tree is a number and the threshold is a tree."""
    is_number = _validate.is_number(tree) and not jnp.ndim(tree)
    is_tree = threshold is not None and not jax.tree_util.all_leaves([threshold])
    if is_number and (is_tree or getattr(threshold, "ndim", 0)):
        raise TypeError(
            f"The tree must come before `{name}`, got the number"
            f" {_validate.shown(tree)} and then a tree. Exchange the two arguments."
        )


def passed_norm(norm: Number | None, *, strict: bool) -> Batched | None:
    """Return the checked `use_norm`, None to compute the norm."""
    if norm is None:
        return None
    if strict:
        raise ValueError(
            "strict=True cannot be combined with use_norm=, since the rounding error"
            " of the passed norm is unknown. Remove one of them."
        )
    _validate.passed_norm(
        "use_norm",
        norm,
        "a real scalar of at least 0, the norm of the tree, or None to compute it",
    )
    return Batched([flush_small(as_array(norm))])


def check_bound(name: str, bound: PyTree, **how: Any) -> None:
    """Raise unless the entries of a threshold argument are numbers."""
    for value in jax.tree.leaves(bound):
        _validate.number(name, value, rule_advice=_NEEDS_STATE, **how)


def checks_limit(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` reject `limit=` together with `upper`.

    By position, the same argument is the lower bound, as in `tf.clip_by_value`.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        limit, upper = kwargs.get("limit"), kwargs.get("upper")
        if limit is not None and upper is not None:
            _validate.is_two_sided(limit, kwargs.get("lower"), upper)
        return function(*args, **kwargs)

    return checked


@explains_call
def clip_by(
    tree: PyTree,
    threshold: Number | PyTree,
    *,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, PyTree]:
    """Clip by any scope, norm and response.

    Each norm `n` of the tree is compared with its threshold `c`, and the elements that
    share the norm are multiplied by `response(n, c)`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> from optclip.functional import clip_by
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> clipped, norms = clip_by(kernel, 1.0, over=optclip.axes(0), norm="l1")
      >>> print(norms)
      [[7. 1.]]

    Args:
      tree: Pytree of arrays.
      threshold: A number, an array that broadcasts to the norms, or a prefix tree of
        these with None for unclipped.
      over: Which elements share a norm: `"tree"` (default), `"leaf"`, `"element"`,
        `optclip.axes(...)`, `units(...)`, `groups(...)`, or another scope.
      norm: `"l2"` (default), `"l1"`, `"inf"`, `"rms"`, `"average"`, an order p above 0,
        or an `optclip.norms.Norm`.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree, and the norms before clipping, which are a scalar for the tree,
      a dict by label for groups, otherwise a tree.

    Raises:
      ValueError: `threshold` is negative or NaN, or does not broadcast to the norms;
        `response` contains a schedule; or `norm` keeps a state.
      TypeError: The tree has integers or bools, but no floats.
    """
    how = without_schedules(response, _STEPLESS)
    measurement = as_norm(norm)
    _validate.require(
        "norm",
        norm,
        not measurement.remembers,
        "a norm with method='exact'",
        "A pure function cannot keep the power-iteration vector between steps.",
    )
    scope = declaring(as_scope(over), as_named(threshold).value)
    clip = clip_of(
        scope, measurement, how, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
    return run(clip, tree, threshold)


@explains_call
def global_norm(
    tree: PyTree,
    *,
    ord: float | None = None,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> jax.Array:
    """Compute the norm of all leaves together.

    The norm is `(sum(abs(x) ** p)) ** (1 / p)` over all elements, in float32 or wider.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import global_norm
      >>> half = {"w": jnp.array([300.0, 400.0], jnp.float16), "frozen": None}
      >>> print(global_norm(half))
      500.0

    Args:
      tree: Pytree of arrays.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      axis_name: Mapped axes that split the leaves. Default: read from their types.
      mask: Leaves to measure: a tree of bools or a function. Default: all.

    Returns:
      A float32 scalar, or float64 if a leaf is float64. It is 0 for a tree without
      numbers, inf above the largest float, and NaN or inf if an element is.

    Guarantees:
      The relative error is at most 1e-5 for p = 2 and inf, and 1e-4 for other orders
      from 0.5 up, in every dtype. Squares do not overflow. The derivative at zero is 0.
    """
    norm = of_order(ord)
    _axis_names.check(axis_name)
    layout = lay_out(TREE, tree, (mask, None, None), axis_name)
    raise_if_data(tree)
    return norm.measure(layout.blocks).norms.entries()[0]


@explains_call
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
    """Clip all leaves by their common norm.

    All leaves are multiplied by `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_global_norm
      >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
      >>> clipped, norm = clip_by_global_norm(grads, 1.0)
      >>> print(clipped["w"], clipped["b"], norm)
      [0.6 0. ] [0.8] 5.0

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number. 0 clips to zero, inf clips nothing.
      use_norm: Norm of the tree, if already computed. An infinite norm counts as
        non-finite. Default: None, compute it.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree, and the norm before clipping, a scalar, float32 or wider.

    Raises:
      ValueError: `strict` is combined with `use_norm`, whose rounding error is unknown.

    Guarantees:
      Within the threshold every leaf is bit-identical. Otherwise all leaves are
      multiplied by one factor in float32 or wider, and the norm is at most
      `max_norm * (1 + 2e-5)`, or `(1 + 2e-4)` for orders other than 2 and inf, before
      the cast to each dtype. With `strict=True` it is at most `max_norm` after the
      cast, and norms within 1.3e-4 below the threshold are clipped too. A norm above
      3.4e38 reads inf and follows `nonfinite`. The derivative at norm 0 is the
      identity.

    References:
      Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural
      Networks", 2012, arXiv:1211.5063; `tf.clip_by_global_norm`.
    """
    how = without_schedules(response, _STEPLESS)
    clip = Clip(
        TREE, of_order(ord), how, SCALE, eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
    threshold = Named("max_norm", max_norm)
    return run(clip, tree, threshold, norms=passed_norm(use_norm, strict=strict))


@explains_call
def clip_by_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    ord: float | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each leaf by its own norm.

    Each leaf, or each slice of it along `axis`, is multiplied by
    `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_norm
      >>> print(clip_by_norm(jnp.array([[3.0, 0.1], [4.0, 0.2]]), 1.0, axis=0))
      [[0.6 0.1]
       [0.8 0.2]]

    Args:
      tree: Pytree of arrays. A list of numbers is a tree with one leaf per number.
      max_norm: Threshold: a number, array that broadcasts to the norms (shape of the
        leaf with 1 at `axis`), or prefix tree of these with None for unclipped.
      axis: Axes that a norm covers. Default: all, one norm per leaf.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree. Leaves or slices within the threshold are bit-identical.

    References:
      `tf.clip_by_norm`.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), norm=of_order(ord),
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip


@explains_call
@checks_limit
def clip_by_value(
    tree: PyTree,
    limit: Number | PyTree | None = None,
    upper: Number | PyTree | None = None,
    *,
    lower: Number | PyTree | None = None,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
) -> PyTree:
    """Clip each element to `[-limit, limit]`, or to `[lower, upper]`.

    `clip_by_value(x, 1.0)` has symmetric bounds. `clip_by_value(x, -1.0, 2.0)` has a
    lower and an upper one, as in `tf.clip_by_value` and `jnp.clip`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_value
      >>> print(clip_by_value(jnp.array([-5.0, 2.0, 3.0]), -4.4, 2.5))
      [-4.4  2.   2.5]
      >>> print(clip_by_value(jnp.array([-5, 3, 300]), 0, 255))
      [  0   3 255]

    Args:
      tree: Pytree of arrays. Integer leaves are clipped to integer bounds if no leaf
        is floating-point or complex, and unchanged otherwise.
      limit: Symmetric bound, or the lower bound if passed by position with `upper`: a
        number, an array that broadcasts to each leaf, or a prefix tree of these with
        None for unbounded. Complex elements are clipped by their modulus.
      upper: Upper bound of any sign, in the same forms; for complex elements at least
        0; a traced negative one counts as 0. Default: None, unbounded.
      lower: Lower bound of any sign, in the same forms. Default: None, unbounded.
      strict: Whether bounds are rounded toward zero in the dtype of each leaf.
      nonfinite: `"propagate"` moves inf to its bound and keeps NaN, `"zero"` zeros
        both, `"raise"` raises under `jax.experimental.checkify`.
      mask: Leaves to clip: a tree of bools or a function. Default: all.

    Returns:
      The clipped tree. Elements within the bounds are bit-identical. Where an array
      `lower` exceeds `upper`, the result is `lower`. Integers keep their dtype; bounds
      outside its range count as its nearest number. Bools are unchanged.

    Raises:
      TypeError: No bound is passed, `limit` is combined with `lower`, or `limit=` with
        `upper=`; or a bound of integers is not an integer.
      ValueError: A bound is NaN or does not broadcast, `limit` is negative, or
        `lower > upper` where both are numbers.

    References:
      `tf.clip_by_value`; Mikolov, "Statistical Language Models Based on Neural
      Networks", PhD thesis, Brno University of Technology, 2012.
    """
    raise_if_exchanged("limit", tree, limit)
    if upper is not None and lower is None:
        limit, lower = None, limit
    clip = Clip(
        ELEMENT, L2, Hard(), MOVE,
        strict=strict, nonfinite=nonfinite, mask=mask,
    )  # fmt: skip
    if _validate.is_two_sided(limit, lower, upper):
        bounds = {"lower": lower, "upper": upper}
        for name, bound in bounds.items():
            check_bound(name, bound, negative=True)
        _validate.ordered(lower, upper)
    else:
        bounds = {"limit": limit}
        check_bound("limit", limit)
    if is_data(tree):
        return clip_integers(tree, bounds, mask)
    layout = layout_of(clip, tree)
    # Moving elements reads the shape and dtype of a norm only, so none is computed.
    leaves = [jnp.real(block.leaves[0].array) for block in layout.blocks]
    measured = Measured(Batched(leaves))
    limits = {name: layout.fill(name, bound) for name, bound in bounds.items()}
    return apply(decide(clip, layout, measured, limits))[0]


@explains_call
def clip_by_rms(
    tree: PyTree,
    max_rms: Number | PyTree,
    *,
    axis: int | tuple[int, ...] | None = None,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each leaf by its root mean square.

    Each leaf, or each slice of it along `axis`, is multiplied by
    `min(1, max_rms / rms)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_rms
      >>> print(clip_by_rms(jnp.array([3.0, -3.0, 3.0, 3.0]), 1.0))
      [ 1. -1.  1.  1.]

    Args:
      tree: Pytree of arrays. A list of numbers is a tree with one leaf per number.
      max_rms: Threshold: a number, an array that broadcasts to the means, or a prefix
        tree of these with None for unclipped.
      axis: Axes that a mean covers. Default: all, one per leaf.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree. Leaves or slices within the threshold are bit-identical.

    References:
      Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
      Cost", 2018, arXiv:1804.04235; `optax.clip_by_block_rms`.
    """
    return clip_by(
        tree, Named("max_rms", max_rms), norm="rms",
        over="leaf" if axis is None else scopes.axes(axis), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip


@explains_call
def clip_by_average_norm(
    tree: PyTree,
    max_norm: Number | PyTree,
    *,
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Clip each leaf by its average norm.

    The average norm is the L2 norm divided by the number of elements, as TensorFlow
    defines it. Each leaf is multiplied by `min(1, max_norm / average_norm)`.
    `clip_by_rms` uses the root mean square.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_average_norm
      >>> print(clip_by_average_norm(jnp.array([3.0, 4.0]), 0.5))
      [0.6 0.8]

    Args:
      tree: Pytree of arrays. A list of numbers is a tree with one leaf per number.
      max_norm: Threshold: a number, or a prefix tree of numbers with None for
        unclipped.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree. Leaves within the threshold are bit-identical.

    References:
      `tf.compat.v1.clip_by_average_norm`.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), over="leaf", norm="average",
        response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )[0]  # fmt: skip


@explains_call
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
    """Clip each group of leaves by the norm of the group.

    Each group is multiplied by `min(1, max_norm / norm)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optclip.functional import clip_by_group_norm
      >>> w, b, head = jnp.array([3.0]), jnp.array([4.0]), jnp.array([0.5])
      >>> grads = {"w": w, "b": b, "head": head}
      >>> labels = {"w": "body", "b": "body", "head": "head"}
      >>> clipped, norms = clip_by_group_norm(grads, 1.0, labels)
      >>> print(clipped["w"], clipped["b"], clipped["head"], norms["body"])
      [0.6] [0.8] [0.5] 5.0

    Args:
      tree: Pytree of arrays.
      max_norm: Threshold: a number, or a dict of numbers by label with None for
        unclipped.
      groups: Label of each leaf: a tree of strings or a function such as
        `optclip.by_path(...)`. Leaves labeled None are unclipped.
      ord: Order p of the norm, above 0, or inf. Default: 2.
      response: What happens above the threshold; see `optclip.responses`.
      eps: Number added to each norm.
      strict: Whether the norm after rounding never exceeds the threshold.
      nonfinite: `"propagate"`, `"zero"` or `"raise"` for NaN and inf.
      mask: Leaves to clip: a tree of bools or a function. Default: all.
      axis_name: Mapped axes that split the leaves. Default: read from their types.

    Returns:
      The clipped tree, and a dict with the norm of each group before clipping.
    """
    return clip_by(
        tree, Named("max_norm", max_norm), over=scopes.groups(groups),
        norm=of_order(ord), response=response, eps=eps,
        strict=strict, nonfinite=nonfinite, mask=mask, axis_name=axis_name,
    )  # fmt: skip
