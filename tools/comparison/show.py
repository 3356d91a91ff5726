"""What to show of what came out, and its text: three digits, no names of machines."""

from typing import Any

import jax
import numpy as np

# Of the page; a test that compares it with a run asks for more.
DIGITS = 3


def text(value: Any) -> str:
    """Numbers in `DIGITS` digits, words as they are, trees flat."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "; ".join(f"{key}: {text(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text(part) for part in value)
    if np.ndim(value):
        return f"[{', '.join(text(part) for part in np.asarray(value))}]"
    if np.asarray(value).dtype == jax.dtypes.float0:
        return "float0"
    # Adding 0 turns -0 into 0.
    if np.iscomplexobj(value):
        return f"{complex(value) + 0:.{DIGITS}g}"
    return f"{float(value) + 0:.{DIGITS}g}".replace("nan", "NaN")


def _each_way(show):
    """For what was done in several ways: `show` of each."""

    def shown(found):
        if isinstance(found, dict):
            return {key: show(part) for key, part in found.items()}
        return show(found)

    return shown


@_each_way
def norm(tree: Any) -> str:
    """The norm of what came out, summed in float64."""
    squares = [np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)]
    return f"norm {np.sqrt(sum(squares)):.{DIGITS}g}"


@_each_way
def dtypes(tree: Any) -> list[str]:
    return [x.dtype.name for x in jax.tree.leaves(tree)]


def with_dtypes(tree: Any) -> list[Any]:
    return [*dtypes(tree), tree]


def flat(tree: Any) -> list[Any]:
    return [np.ravel(x) for x in jax.tree.leaves(tree)]


def agreement(units: dict[str, Any]) -> dict[str, str]:
    """Distances, of which one may be 1 on this machine and 2 on the next, as words."""
    return {
        "unclipped": "equal" if units["unclipped"] == 0 else "not equal",
        "clipped": "within 8" if units["clipped"] <= 8 else "further apart",
    }


def above_one(norms: Any) -> str:
    return "some above 1" if np.any(norms > 1) else "none above 1"
