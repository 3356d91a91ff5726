"""Format results as text with three digits, independent of the machine."""

from typing import Any

import jax
import numpy as np


def text(value: Any) -> str:
    """Format numbers with three digits, flatten trees, and keep strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "; ".join(f"{key}: {text(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text(part) for part in value)
    if np.ndim(value):
        return f"[{', '.join(text(part) for part in np.asarray(value))}]"
    # Adding 0 turns -0 into 0.
    return f"{float(value) + 0:.3g}".replace("nan", "NaN")


def norm(tree: Any) -> str:
    """Format the norm of a result, computed in float64."""
    squares = [np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)]
    return f"norm {np.sqrt(sum(squares)):.3g}"


def above_one(norms: Any) -> str:
    return "some above 1" if np.any(norms > 1) else "none above 1"
