"""Bound the contribution of one example to a sum, and compute the sensitivity."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import _leaves, _numerics, _validate
from .._arrays._batching import Batched
from .._arrays._leaves import Flat
from .._arrays._types import PyTree
from .._clip import (
    SCALE,
    ByArgument,
    Clip,
    Decision,
    Layout,
    apply,
    coefficients_of,
    decide,
    layout_of,
)
from .._norms import L2, Measured, flush_small
from .._responses import (
    BY_NAME,
    BaseResponse,
    Hard,
    ResponseLike,
    without_schedules,
)
from .._scopes import LEAF, TREE, Groups, Scope, as_scope, declaring
from .._typing import is_cotangent_record
from ._ghost import _formulas
from ._ghost._formulas import Scaled

ExampleResponse = ResponseLike | Literal["auto_s", "unit"]
Relation = Literal["add_or_remove", "zero_out", "replace_one"]

_TINY, _LARGEST = (
    float(x) for x in (jnp.finfo("float32").tiny, jnp.finfo("float32").max)
)

# In strict clipping, a smaller weight counts as 0. With the smallest threshold, 2**-36,
# a product of 2**40 elements then loses less to subnormal numbers than the margin.
_LEAST_WEIGHT = {"float32": 2.0**-64, "float64": 2.0**-512}

# Distance of neighboring sums in bounds; the last two names are from dp_accounting.
_RELATIONS = {
    "add_or_remove": 1, "zero_out": 1, "replace_one": 2,
    "add_or_remove_one": 1, "replace_special": 1,
}  # fmt: skip

# The largest norm of 2**40 elements whose squares are flushed to zero. It is added to
# the measured norm, so that a response above 1 cannot enlarge such elements beyond C.
_FLUSHED = {"float32": 2.0**-43, "float64": 2.0**-480}


@dataclasses.dataclass(frozen=True)
class AutoS(BaseResponse):
    """Scale every gradient by `c / (n + gamma)`, as in AUTO-S."""

    gamma: float = 0.01

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        whole = threshold / (norm + self.gamma)
        return jnp.where(jnp.isinf(threshold), jnp.ones_like(norm), whole)


@dataclasses.dataclass(frozen=True)
class _Capped(BaseResponse):
    """Limit a response to `c / n`."""

    response: BaseResponse

    def coefficient(self, norm: jax.Array, threshold: jax.Array) -> jax.Array:
        uncapped = jnp.asarray(self.response.coefficient(norm, threshold), norm.dtype)
        least = jnp.asarray(_FLUSHED[norm.dtype.name], norm.dtype)
        largest = jnp.asarray(jnp.finfo(norm.dtype).max, norm.dtype)
        most = jnp.minimum(threshold / (norm + least), largest)
        return jnp.clip(uncapped, -most, most)


# Exclude "proportional", which compares norms. "unit" divides after the sum.
_BY_NAME = {name: how for name, how in BY_NAME.items() if not how.compares_norms}
_BY_NAME |= {"auto_s": AutoS(), "unit": Hard()}


def response_of(response: Any) -> BaseResponse:
    """Return the validated response of a `response` argument, limited to `c / n`."""
    how = without_schedules(response, "Per-example clipping counts no steps", _BY_NAME)
    _validate.require(
        "response",
        response,
        not how.compares_norms and not how.signed,
        "a response that depends on a single norm, which its threshold bounds",
        "Pass 'hard'.",
    )
    return how if type(how) is Hard else _Capped(how)


# The norms of one example, the coefficients, and whether the norms are non-finite, each
# in the scope's structure.
ClippedNorms = tuple[PyTree, PyTree, PyTree]


def _about(decision: Decision, coefficients: Batched) -> ClippedNorms:
    layout, norms = decision.layout, decision.norms
    nonfinite = norms.map(lambda norm: ~jnp.isfinite(norm))
    return (
        layout.tree(norms.entries()),
        layout.tree(coefficients.entries()),
        layout.tree(nonfinite.entries()),
    )


@dataclasses.dataclass(frozen=True)
class Bound:
    """Describe the clipping of one example, which bounds its contribution."""

    threshold: Any
    scope: Scope
    response: BaseResponse
    nonfinite: str
    strict: bool
    normalize_by: Any
    is_unit: bool
    max_weight: Any = None

    def clip(self, axis_name: PyTree = None) -> Clip:
        """Return the clip applied to the gradient of one example."""
        return Clip(
            self.scope, L2, self.response, SCALE, strict=self.strict,
            nonfinite=self.nonfinite, axis_name=axis_name,
        )  # fmt: skip

    def check_weights(self, weights: Any) -> None:
        """Raise unless the sensitivity covers the weights, and is not below 1 each."""
        most = self.max_weight
        if weights is not None and most is None:
            raise ValueError(
                "clipped_grad(..., max_weight=) must be passed with `weights`: the"
                " sensitivity is a multiple of it. Pass their largest magnitude, or inf"
                " without privacy."
            )
        _validate.require(
            "weights",
            weights,
            weights is not None or most is None,
            "passed with `max_weight`, which limits it",
            "Pass weights=, one number per example, or remove max_weight=.",
        )

    def one_clipped(
        self, clip: Clip, grads: PyTree, weight: Any
    ) -> tuple[PyTree, ClippedNorms]:
        """Return the clipped and weighted gradient of one example, and its norms."""
        layout = layout_of(clip, grads)
        self._check_all_bounded(layout)
        measured = clip.norm.measure(layout.blocks)
        decision = decide(clip, layout, measured, self._limits_of(layout))
        clipped, coefficients = apply(decision)
        return self._weighted(clipped, weight), _about(decision, coefficients)

    def norms_of_squares(self, clip: Clip, squares: PyTree) -> PyTree:
        """Return the norms of one example from `Scaled` squared norms of its leaves."""
        layout, norms = _laid_out(clip, squares)
        return layout.tree(norms)

    def of_squares(
        self, clip: Clip, squares: PyTree, weight: Any
    ) -> tuple[ClippedNorms, PyTree]:
        """Return the norms of one example, and the weighted coefficient per leaf."""
        layout, norms = _laid_out(clip, squares)
        self._check_all_bounded(layout)
        decision = decide(
            clip, layout, Measured(Batched(norms)), self._limits_of(layout)
        )
        coefficients = coefficients_of(clip, decision.norms, decision.thresholds)
        of_block = coefficients.entries()
        by_leaf = layout.rebuild({i: of_block[b] for i, _, b in layout.scaled})
        return _about(decision, coefficients), self._weighted(by_leaf, weight)

    def _limits_of(self, layout: Layout) -> ByArgument:
        return {"threshold": layout.fill("threshold", self.threshold)}

    def _weighted(self, tree: PyTree, weight: Any) -> PyTree:
        """Return a tree times a weight, zeros for a weight of 0 even if it has NaN."""
        if weight is None:
            return tree

        def product(x: jax.Array) -> jax.Array:
            real = jnp.dtype(_real(x))
            factor = weight
            if self.max_weight is not None:
                most = jnp.maximum(jnp.asarray(_wide(self.max_weight), factor.dtype), 0)
                factor = jnp.clip(factor, -most, most)
            factor = factor.astype(real)
            least = _LEAST_WEIGHT[real.name] if self.strict else 0.0
            return jnp.where(jnp.abs(factor) <= least, jnp.zeros_like(x), x * factor)

        return jax.tree.map(product, tree)

    def finished(self, clip: Clip, summed: PyTree) -> PyTree:
        """Divide a sum by `normalize_by` and, for `unit`, by its thresholds."""
        if self.is_unit:
            summed = self._in_units(clip, summed)
        by = self.normalize_by
        if isinstance(by, (int, float)) and by == 1:
            return summed
        return jax.tree.map(lambda x: x / jnp.asarray(by, _real(x)), summed)

    def sensitivity(self, relation: Any, params: PyTree) -> Any:
        """Return the largest L2 distance between sums of neighboring batches."""
        word = str(getattr(relation, "name", relation)).lower()
        _validate.require(
            "relation",
            relation,
            word in _RELATIONS,
            "'add_or_remove', 'zero_out' or 'replace_one'",
        )
        whole = _RELATIONS[word] * self._whole(params)
        if self.max_weight is not None:
            most = _wide(self.max_weight)
            # A negative traced limit makes weights zero.
            whole *= most if isinstance(most, float) else jnp.maximum(most, 0)
        return _or_inf(_or_inf(whole) / _wide(self.normalize_by))

    def _whole(self, params: PyTree) -> Any:
        """Return the root of the sum of squared thresholds, each 1 for `unit`."""
        limits = self._limits(params)
        if self.is_unit:
            return math.sqrt(len(limits))
        limits = [_wide(limit) for limit in limits]
        if all(isinstance(limit, float) for limit in limits):
            return math.hypot(*limits)
        # A negative traced threshold clips to zero, so it counts as 0.
        return jnp.sqrt(sum(jnp.square(jnp.maximum(limit, 0)) for limit in limits))

    def _limits(self, params: PyTree) -> list[Any]:
        if self.scope == TREE:
            return [self.threshold]
        if params is not None:
            # Scalars have the structure and the dtypes of the parameters.
            scalars = jax.tree.map(
                lambda x: np.zeros((), x.dtype) if hasattr(x, "dtype") else x, params
            )
            return layout_of(self.clip(()), scalars).fill("threshold", self.threshold)
        if isinstance(self.scope, Groups) and isinstance(self.threshold, dict):
            limits = jax.tree.leaves(self.threshold, is_leaf=lambda t: t is None)
            return [math.inf if t is None else t for t in limits]
        raise ValueError(
            _validate.must_be(
                "params",
                "the parameters, whose leaves or groups share one threshold",
                None,
                "Call f.sensitivity(relation, params=params).",
            )
        )

    def _in_units(self, clip: Clip, summed: PyTree) -> PyTree:
        layout = layout_of(clip, summed)
        limits = layout.fill("threshold", self.threshold)
        out = {}
        for i, leaf, block in layout.scaled:
            x = leaf.array
            limit = jnp.asarray(limits[block], _real(x))
            live = limit > 0
            one = jnp.ones_like(limit)
            out[i] = jnp.where(live, x / jnp.where(live, limit, one), jnp.zeros_like(x))
        return layout.rebuild(out)

    def _check_all_bounded(self, layout: Layout) -> None:
        check_floats(layout.flat)
        for path, owner in zip(layout.flat.paths, layout.owners, strict=True):
            if owner is None:
                raise ValueError(
                    "Each leaf must be in a group so that its gradient is bounded, got"
                    f" {_leaves.named(path)} without one. Label it, or"
                    " differentiate with respect to the other leaves only."
                )


def check_floats(flat: Flat, advice: str = "Remove it from the tree.") -> None:
    """Raise unless each leaf is a dense array of floats, whose gradient is bounded."""
    for x in jax.tree.leaves(flat.tree, is_leaf=is_cotangent_record):
        if is_cotangent_record(x):
            raise TypeError(
                "Parameters must not contain a cotangent_probe: its counts would be"
                " clipped as gradients. Pass it as another argument of the loss, and"
                " take its gradient in a separate call of jax.grad."
            )
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        _leaves.check_format(path, leaf)
        _leaves.check_is_ours(path, leaf)
        if _leaves.is_sparse(leaf) or not _leaves.is_floating(leaf):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(
                "Each leaf must be a dense array of floats so that its gradient is"
                f" bounded, got {_leaves.named(path)} of {kind}. {advice}"
            )


def _laid_out(clip: Clip, squares: PyTree) -> tuple[Layout, list[jax.Array]]:
    """Return the layout of the leaves and the norm of each block; inf on overflow."""
    leaves, treedef = jax.tree.flatten(squares, is_leaf=lambda x: isinstance(x, Scaled))
    layout = layout_of(clip, treedef.unflatten([x.square for x in leaves]))
    members: list[list[Scaled]] = [[] for _ in layout.blocks]
    for i, _, block in layout.scaled:
        members[block].append(leaves[i])
    norms = []
    for block_squares in members:
        if not block_squares:
            # The gradient of a group without leaves is empty.
            norms.append(jnp.zeros((), jnp.float32))
            continue
        most = functools.reduce(jnp.maximum, [x.exponent for x in block_squares])
        total = functools.reduce(jnp.add, [x.at(most) for x in block_squares])
        norms.append(flush_small(_formulas.shifted(_numerics.root(total), most)))
    return layout, norms


def _or_inf(bound: Any) -> Any:
    """Return a bound of sums, inf if a sum in float32 may be infinite."""
    return math.inf if isinstance(bound, float) and bound > _LARGEST else bound


def check_normal(name: str, value: Any, *, above: bool = False) -> None:
    """Raise unless a number is a normal float32 or, unless it must be `above`, 0."""
    known = _validate.concrete(_validate.plain(name, value, above=above))
    is_normal = known is None or bool(known == 0 or _TINY <= float(known) <= _LARGEST)
    _validate.require(
        name,
        value,
        is_normal,
        f"from {_TINY:.3g} to {_LARGEST:.3g}, a normal float32",
        "In float32 it would be 0 or inf.",
    )


def _wide(value: Any) -> Any:
    """Return a number in float64, or a traced one in float32 or wider."""
    concrete = _validate.concrete(value)
    return _numerics.as_array(value) if concrete is None else float(concrete)


def _real(x: jax.Array) -> Any:
    return _leaves.real_dtype(x.dtype)


def bound_of(
    threshold: Any,
    over: Any,
    response: Any,
    nonfinite: str,
    strict: bool,
    normalize_by: Any,
    max_weight: Any = None,
) -> Bound:
    """Return the validated bound that a user's arguments specify."""
    scope = declaring(_scope(over), threshold)
    _check_threshold(threshold, scope)
    check_normal("normalize_by", normalize_by, above=True)
    is_unit = isinstance(response, str) and response == "unit"
    how = response_of(response)
    if max_weight is not None:
        advice = "inf does not limit the weights."
        _validate.number("max_weight", max_weight, advice=advice)
        wanted = "one number for all examples"
        advice = "Pass the weights of the examples in the call, weights=."
        _validate.require(
            "max_weight", max_weight, not jnp.shape(max_weight), wanted, advice
        )
        if _validate.concrete(max_weight) != math.inf:
            check_normal("max_weight", max_weight)
    bound = Bound(
        threshold, scope, how, nonfinite, strict, normalize_by, is_unit, max_weight
    )
    bound.clip()
    return bound


def _scope(over: Any) -> Scope:
    wanted = "'tree', 'leaf' or optclip.groups(...)"
    try:
        scope = as_scope(over)
    except TypeError:
        raise TypeError(_validate.must_be("over", wanted, over)) from None
    _validate.require(
        "over", over, scope in (TREE, LEAF) or isinstance(scope, Groups), wanted
    )
    return scope


_RULE_ADVICE = (
    "For a threshold that follows the norms, pass `threshold` of the state of"
    " per_example.QuantileThreshold. In clipped_grad, the loss comes first."
)


def _check_threshold(threshold: Any, scope: Scope) -> None:
    _validate.threshold_given("threshold", threshold)
    for value in jax.tree.leaves(threshold):
        _validate.number("threshold", value, rule_advice=_RULE_ADVICE)
        wanted = "one number for each norm"
        advice = (
            f"Its shape is {jnp.shape(value)}. For one per example, map"
            " optclip.functional.clip_by_global_norm with jax.vmap over gradients"
            " and thresholds."
        )
        _validate.require("threshold", value, not jnp.shape(value), wanted, advice)
    is_right = scope != TREE or _validate.is_number(threshold)
    advice = "Pass over='leaf' or over=optclip.groups(...) for several."
    _validate.require(
        "threshold", threshold, is_right, "one number for over='tree'", advice
    )
