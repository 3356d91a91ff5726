"""Hold and print the result of `explain`, and its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from .._monitor import wrapped


class Slice(NamedTuple):
    """Hold the largest slice of a leaf.

    Attributes:
      axis: Axis of the leaf.
      at: Index on this axis.
      fraction: Fraction of the squared norm of the leaf.
      shape: Shape of the leaf.
    """

    axis: int
    at: int
    fraction: float
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return _words(self.axis, self.at, self.shape)


class Leaf(NamedTuple):
    """Hold the gradient of a leaf.

    Attributes:
      name: Path of the leaf.
      norm: Norm of its gradient.
      fraction: Fraction of the squared norm of the whole gradient.
      slice: Largest slice, or None if it has none.
      ratio: Norm divided by its median in the history, or None without one, and for
        norms below 1e-6 of the largest.
    """

    name: str
    norm: float
    fraction: float
    slice: Slice | None
    ratio: float | None

    def __str__(self) -> str:
        ratio = None if self.ratio is None else f"{self.ratio:.3g} times its median"
        part = self.slice and f"{self.slice} has {self.slice.fraction:.1%} of it"
        return ", ".join(filter(None, [self.name, ratio, part]))


class Contribution(NamedTuple):
    """Hold what an example, a position or a single loss contributes to the gradient.

    Attributes:
      example: Index of the example, or None for all.
      position: Index of the position, or None for all.
      fraction: Fraction of the gradient.
      loss: Loss, averaged over examples or positions.
    """

    example: int | None
    position: int | None
    fraction: float
    loss: float

    def __str__(self) -> str:
        example = None if self.example is None else f"example {self.example}"
        position = None if self.position is None else f"position {self.position}"
        return " of ".join(filter(None, [position, example]))


class Outlier(NamedTuple):
    """Hold parameters of unusual size.

    Attributes:
      name: Path of the leaf.
      shape: Its shape.
      axis: Axis of the slice, or None for the whole leaf.
      at: Index on this axis, or None for the whole leaf.
      ratio: Norm divided by the median of all slices of this axis; for a leaf, root
        mean square divided by the median of all leaves with two axes or more.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None
    at: int | None
    ratio: float

    def __str__(self) -> str:
        if self.axis is None or self.at is None:
            return named(self.name)
        return f"{_words(self.axis, self.at, self.shape)} of {named(self.name)}"


def named(name: str) -> str:
    """Return the name of a leaf in a sentence."""
    return f"`{name}`" if name else "the array"


def _words(axis: int, index: int, shape: tuple[int, ...]) -> str:
    """Return the words for a slice of a leaf."""
    if len(shape) <= 2:
        return f"{('row', 'column')[axis] if len(shape) == 2 else 'element'} {index}"
    return f"index {index} of axis {axis}"


def entries_of(
    fractions: np.ndarray | None, losses: np.ndarray
) -> tuple[list[Contribution], list[Contribution], list[Contribution]]:
    """Return single losses, examples and positions, largest first, if there are any.

    Args:
      fractions: Fractions of the losses, or of the examples alone, or None.
      losses: Losses, `(batch,)` or `(batch, positions)`.
    """
    if fractions is None:
        return [], [], []
    if fractions.ndim == 1:
        means = losses.reshape(len(losses), -1).mean(1)
        return [], _largest_first(fractions, means, lambda i: (i, None)), []
    width = fractions.shape[1]
    return (
        _largest_first(fractions.ravel(), losses.ravel(), lambda i: divmod(i, width)),
        _largest_first(fractions.sum(1), losses.mean(1), lambda i: (i, None)),
        _largest_first(fractions.sum(0), losses.mean(0), lambda i: (None, i)),
    )


def _largest_first(
    fractions: np.ndarray, losses: np.ndarray, place: Callable[[int], tuple[Any, Any]]
) -> list[Contribution]:
    order = np.argsort(-np.abs(fractions), kind="stable").tolist()
    return [
        Contribution(*place(i), float(fractions[i]), float(losses[i])) for i in order
    ]


def standing_out(entries: list[Contribution], least: float) -> Contribution | None:
    """Return the first entry, the largest, if it has over this fraction of the total.

    It must also have over twice its equal part, since one of two entries always has
    half. Opposing entries count by their size.
    """
    sizes = np.abs([entry.fraction for entry in entries])
    if not len(sizes) or not np.all(np.isfinite(sizes)):
        return None
    return entries[0] if sizes[0] > max(least, 2 / len(sizes)) * np.sum(sizes) else None


class Explanation(NamedTuple):
    """Hold the result of `explain`; prints as a text.

    All lists are in order of size, and have at most `top` entries unless stated.

    Attributes:
      findings: Sentences for entries that stand out; empty if none does.
      norm: Norm of the gradient of the mean loss.
      leaves: Largest leaves of the gradient, `(name, norm, fraction, slice, ratio)`.
        `fraction` is of the squared norm. `slice` is the largest row, column or other
        slice, `(axis, at, fraction of the leaf, shape of the leaf)`, or None.
        `ratio` is the norm divided by its median in the history, or None.
      examples: Examples, `(example, None, fraction, loss)`. The fractions of all
        examples sum to 1; one that opposes the gradient has a negative fraction.
      positions: Positions, `(None, position, fraction, loss)`, summed over the
        examples; empty for losses of shape `(batch,)`.
      losses: Single losses, `(example, position, fraction, loss)`; empty for losses of
        shape `(batch,)`.
      method: How the fractions of examples were computed: `"derivative"` along the
        gradient or, if JAX has no such derivative of the loss, `"norms"`, their
        fraction of the sum of squared gradient norms of the examples. Without
        derivatives, a batch that cannot be split has no examples here.
      outliers: Parameters of unusual size, `(name, shape, axis, at, ratio)`: slices
        with over 30 times the median norm, and leaves with over 100 times the median
        root mean square of matrices, whose `axis` and `at` are None.
      nonfinite_losses: Indices of all losses that are NaN or inf.
      nonfinite_examples: All examples with a NaN or inf in their loss or gradient; by
        their loss alone if the batch cannot be split.
      nonfinite_leaves: Names of all leaves with a NaN or inf in the gradient.
      nonfinite_params: Names of all leaves with a NaN or inf in the parameters.
      loss: Mean loss.
      reproduced: Whether the recorded norms of `step`, or else its loss, are equal to
        the recomputed ones, up to rounding; None without `step`.
    """

    findings: list[str]
    norm: float
    leaves: list[Leaf]
    examples: list[Contribution]
    positions: list[Contribution]
    losses: list[Contribution]
    method: Literal["derivative", "norms"]
    outliers: list[Outlier]
    nonfinite_losses: list[tuple[int, ...]]
    nonfinite_examples: list[int]
    nonfinite_leaves: list[str]
    nonfinite_params: list[str]
    loss: float = float("nan")
    reproduced: bool | None = None

    def __str__(self) -> str:
        # The first finding on a recorded step is whether it is reproduced.
        is_sound = len(self.findings) == 1 and self.reproduced is True
        nothing = (
            f"Nothing {'else ' if is_sound else ''}stands out: no example, position,"
            " row or leaf."
        )
        lines = [*self.findings, nothing] if is_sound else self.findings or [nothing]
        texts = [_line(x.fraction, f"{x.norm:<9.4g} {x}") for x in self.leaves]
        lines = [*lines, f"gradient: norm {self.norm:.4g}", *texts]
        for title in ("examples", "positions", "losses"):
            entries = getattr(self, title)
            texts = [_line(x.fraction, f"loss {x.loss:<8.3g} {x}") for x in entries]
            lines += [f"{title}:", *texts] if entries else []
        return wrapped("\n".join(lines))


def _line(fraction: float, text: str) -> str:
    return f"  {fraction:>7.1%}  {text}".rstrip()
