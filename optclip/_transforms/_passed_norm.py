"""Read a global norm that the caller of `update` has computed."""

from __future__ import annotations

from typing import Any

import jax

from .._arrays import _axis_names, _numerics, _validate
from .._clip import Layout
from .._norms import L2, accumulator, flush_small, of_order
from .._typing import Mask, Record

_OF_UPDATE = ("updates", "state", "params")


def check(
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
        "ord=": of_order(ord) != L2,
        "strict=": strict,
        "mask=": mask is not None,
        "record='leaves'": isinstance(record, str) and record == "leaves",
    }
    for option, is_needed in needs_another.items():
        if is_needed:
            raise ValueError(
                f"`use_norm` cannot be combined with {option}, which measures another"
                f" norm. Remove {option} or use_norm=."
            )


def norm_in(extra: dict[str, Any], name: str, layout: Layout) -> jax.Array:
    """Return the extra argument of `update` that is the norm, as if measured."""
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
    arrays = [jax.typeof(leaf.array) for leaf in layout.used()]
    return flush_small(scalar.astype(accumulator(arrays)))
