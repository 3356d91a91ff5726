"""Of what a norm is taken, when it is not of the updates themselves."""

from typing import Any

import jax

from optclip import _leaves
from optclip._clip import Clip
from optclip._opened import Opened


def check(of: Any, clip: Clip) -> None:
    """Raise unless `of` is None or a function, for a clip that has a norm."""
    if of is None:
        return
    if not callable(of):
        raise TypeError(
            f"of={of!r} ({type(of).__name__}) cannot be called. Give a function"
            " (updates, params, extra_args) that returns a tree like the updates, or"
            " None; under optax.inject_hyperparams name it in static_args=('of',)."
        )
    if clip.moves_elements:
        raise ValueError(
            "of= gives another tree to measure, but single elements are moved to their"
            " bound by what they are. Give a response that multiplies, such as"
            " optclip.responses.detached('hard'), or another scope."
        )


def tree(of: Any, updates: Any, params: Any, extra: dict[str, Any]) -> Any:
    """What is measured in place of the updates, checked to be like them."""
    found = of(updates, params, extra)
    expected, given = (jax.tree.structure(t) for t in (updates, found))
    if expected != given:
        raise ValueError(
            f"of(updates, params, extra_args) returned the structure {given}, not the"
            f" {expected} of the updates. Return a tree like the updates."
        )
    return found


def matched(scaled: Opened, measured: Opened) -> Opened:
    """The updates laid out for a clip whose norms are those of another tree."""
    for path, a, b in zip(
        scaled.flat.paths, scaled.leaves, measured.leaves, strict=True
    ):
        shapes = [getattr(x, "shape", ()) for x in (a, b)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "of(updates, params, extra_args) returned an array of shape"
                f" {shapes[1]} for the leaf '{_leaves.path_str(path)}' of shape"
                f" {shapes[0]}. Return a tree of the shapes of the updates."
            )
    return scaled
