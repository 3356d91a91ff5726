"""Clip by a global norm that the caller of `update` has computed."""

from __future__ import annotations

from typing import Any

import jax
import optax

from .._arrays import _axis_names, _numerics, _validate
from .._arrays._batching import Batched
from .._arrays._types import PyTree
from .._clip import Layout, clip_of
from .._norms import (
    L2,
    Measured,
    accumulator,
    flush_small,
    of_order,
)
from .._responses import as_response
from .._scopes import TREE
from .._thresholds import Named
from .._typing import (
    AxisName,
    ClipState,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    Threshold,
)
from ._engine import Engine, Step, transformation_of
from ._rules import rules_of

_OF_UPDATE = ("updates", "state", "params")


def clip_by_passed_norm(
    use_norm: str,
    max_norm: Threshold,
    *,
    ord: float | None,
    response: ResponseLike,
    eps: Number,
    strict: bool,
    nonfinite: Nonfinite,
    mask: Mask | None,
    axis_name: AxisName | None,
    record: Record,
    name: str,
) -> optax.GradientTransformationExtraArgs:
    """Build the transformation from the arguments that the user passed.

    `use_norm` is the name of the extra argument of `update` that is the norm.

    Raises:
      TypeError: `use_norm` is not a name.
      ValueError: `ord`, `strict`, `mask` or `record` requires another norm.
    """
    _check(use_norm, ord=ord, strict=strict, mask=mask, record=record)
    clip = clip_of(
        TREE, L2, as_response(response),
        eps=eps, nonfinite=nonfinite, axis_name=axis_name,
    )  # fmt: skip
    threshold = Named("max_norm", max_norm, "clip_by_global_norm")
    engine = Engine(clip, rules_of(threshold, clip), record, name)

    def decide(
        updates: PyTree, state: ClipState, params: PyTree, extra: dict[str, Any]
    ) -> Step:
        norm = _norm_in(extra, use_norm)

        def measure(layout: Layout) -> Measured:
            return Measured(Batched([_as_measured(norm, layout)]), (), ())

        return engine.decide(updates, state, params, extra, measure=measure)

    return transformation_of(engine, decide)


def _check(
    use_norm: str, *, ord: float | None, strict: bool, mask: Mask | None, record: Record
) -> None:
    """Raise unless this names an argument, and no option needs another norm."""
    is_name = isinstance(use_norm, str) and use_norm.isidentifier()
    if not is_name or use_norm in _OF_UPDATE:
        wanted = "the name of an extra argument of update, such as 'grad_norm'"
        advice = "Pass the norm itself to update(..., grad_norm=norm)."
        raise TypeError(_validate.must_be("use_norm", wanted, use_norm, advice))
    _validate.flag("strict", strict)
    needs_another = {
        "ord": of_order(ord) != L2,
        "strict": strict,
        "mask": mask is not None,
        "record": isinstance(record, str) and record == "leaves",
    }
    for option, is_needed in needs_another.items():
        if is_needed:
            raise ValueError(
                f"`use_norm` cannot be combined with {_shown(option)}, which measures"
                f" another norm. Remove {_shown(option)} or use_norm=."
            )


def _shown(option: str) -> str:
    return "record='leaves'" if option == "record" else f"{option}="


def _norm_in(extra: dict[str, Any], name: str) -> jax.Array:
    """Return the extra argument of `update` that is the norm."""
    norm = extra.get(name)
    wanted = "a real scalar of at least 0, the global norm of the updates"
    advice = (
        f"Pass it: tx.update(updates, state, params, {name}=norm). Flax's"
        " TrainState.apply_gradients does not pass it on."
    )
    if norm is None:
        raise ValueError(_validate.must_be(name, wanted, norm, advice))
    _validate.passed_norm(name, norm, wanted, advice)
    scalar = _numerics.as_array(norm)
    _axis_names.check_one(name, scalar)
    return scalar


def _as_measured(norm: jax.Array, layout: Layout) -> jax.Array:
    """Return the norm in the dtype and range of measured norms."""
    arrays = [jax.typeof(leaf.array) for leaf in layout.used()]
    return flush_small(norm.astype(accumulator(arrays)))
