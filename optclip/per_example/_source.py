"""Where the gradients of examples come from, and how they lie on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optclip._arrays import _validate
from optclip._arrays._axis_names import Axes
from optclip._arrays._types import PyTree
from optclip.per_example import _microbatches


class Source(NamedTuple):
    """The gradients of examples, or what they are derived of.

    `of_one(example)` returns the value of an example, its aux and its gradient; `split`
    has the mapped axes that each leaf is split over; over `axes` examples are. `loss`
    returns the value and aux for parameters and an example, None where gradients were
    given.
    """

    of_one: Callable[[PyTree], tuple[Any, Any, PyTree]]
    examples: PyTree
    split: PyTree = None
    axes: Axes = ()
    loss: Any = None
    params: PyTree = None


def padding_of(padding: Any, examples: PyTree) -> jax.Array:
    """Which places of the batch are padding, one bool an example."""
    number = _microbatches.batch_size(examples)
    if padding is None:
        return jnp.zeros(number, bool)
    wanted = f"an array of {number} bools, one an example, or None"
    if getattr(padding, "dtype", None) != np.bool_:
        raise TypeError(_validate.must_be("padding", wanted, padding))
    if jnp.shape(padding) != (number,):
        advice = f"Its shape is {jnp.shape(padding)}."
        raise ValueError(_validate.must_be("padding", wanted, padding, advice))
    return jnp.asarray(padding)


def without_padding(tree: Any, is_padding: jax.Array) -> Any:
    """Zeros in place of what an example has that is padding."""
    return jax.tree.map(lambda x: jnp.where(is_padding, jnp.zeros_like(x), x), tree)
