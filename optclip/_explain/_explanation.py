"""Hold and print the result of `explain`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ._entries import Contribution, Leaf, Outlier


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

    def __str__(self) -> str:
        nothing = "Nothing stands out: no example, position, row or leaf."
        lines = self.findings or [nothing]
        lines = [*lines, f"gradient: norm {self.norm:.4g}"]
        for leaf in self.leaves:
            lines.append(_line(leaf.fraction, f"{leaf.norm:<9.4g} {_words(leaf)}"))
        for title, entries in (
            ("examples", self.examples),
            ("positions", self.positions),
            ("losses", self.losses),
        ):
            lines += [f"{title}:"] if entries else []
            for entry in entries:
                text = f"loss {entry.loss:<8.3g} {entry}"
                lines.append(_line(entry.fraction, text))
        return "\n".join(lines)


def _line(fraction: float, text: str) -> str:
    return f"  {fraction:>7.1%}  {text}".rstrip()


def _words(leaf: Leaf) -> str:
    words = [leaf.name]
    if leaf.ratio is not None:
        words.append(f"{leaf.ratio:.3g} times its median")
    if leaf.slice is not None:
        words.append(f"{leaf.slice} has {leaf.slice.fraction:.1%} of it")
    return ", ".join(filter(None, words))
