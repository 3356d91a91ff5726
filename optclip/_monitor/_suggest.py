"""Suggest a fixed threshold from the norms of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._arrays import _validate
from .._typing import History
from ._run import (
    Fields,
    chosen,
    clips_in,
    fields_by_name,
    has_run,
    loaded,
    outer_skip,
    read,
)
from ._text import wrapped

_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99)
# A norm this many times the median may have made the run diverge.
_MANY = 100
# Rounding the threshold may change the requested rate by this relative difference.
_TOLERANCE = 0.2
# Nine digits distinguish any two float32 numbers.
_MOST_DIGITS = 9


class Suggestion(NamedTuple):
    """Hold the result of `suggest`; prints as a table.

    Attributes:
      max_norm: Suggested threshold for `clip_by_global_norm`.
      rate: Fraction of the steps that it would have clipped.
      quantiles: Dict from q to the quantile of the norms.
      steps: Number of finite norms above 0.
      nonfinite: Number of NaN or inf norms, which are excluded.
      largest: Largest finite norm of all steps, including skipped ones.
      skipped: Number of steps skipped at the start.
      zeros: Number of zero norms, which are excluded.
    """

    max_norm: float
    rate: float
    quantiles: dict[float, float]
    steps: int
    nonfinite: int
    largest: float
    skipped: int
    zeros: int

    def __str__(self) -> str:
        lines = [
            f"{q:>8.0%} of the norms are at most {x:.4g}"
            for q, x in self.quantiles.items()
        ]
        nonfinite = f", {self.nonfinite} more not finite" if self.nonfinite else ""
        zeros = f", {self.zeros} more zero" if self.zeros else ""
        rate = f"{self.rate:.{1 if self.rate >= 0.01 else 2}%}"
        start = f" (first {self.skipped} skipped)" if self.skipped else ""
        lines.append(
            f"max_norm={self.max_norm:.9g} would have clipped {rate} of"
            f" {self.steps} steps{start}{zeros}{nonfinite}"
        )
        if self.largest > _MANY * self.quantiles[0.5]:
            lines.append(
                f"the largest norm of all is {self.largest:.2g}, over {_MANY} times the"
                " median: if this run did not train, record one that does"
            )
        return wrapped("\n".join(lines))


def suggest(
    norms: History | Sequence[Any] | np.ndarray | jax.Array,
    rate: float = 0.1,
    *,
    skip_first: float = 0.1,
    clip: str | None = None,
    part: str | None = None,
) -> Suggestion:
    """Suggest a fixed threshold that clips a fraction of the steps of a recorded run.

    Record `metrics(state)` of each step in a run that trains well with
    `clip_by_global_norm(inf)`, which clips nothing; or pass norms that another library
    logged. If the 99% quantile is many times the median, or a norm is over 100 times
    the median (the table reports this), the run may have diverged. Then record another
    with a loose threshold or a lower learning rate.

    Example:
      >>> import numpy as np, optclip
      >>> print(optclip.suggest(np.random.default_rng(0).gamma(4.0, size=1000)))
           50% of the norms are at most 3.76
           75% of the norms are at most 5.162
           90% of the norms are at most 6.613
           95% of the norms are at most 7.637
           99% of the norms are at most 10.33
      max_norm=6.7 would have clipped 9.6% of 900 steps (first 100 skipped)

    Args:
      norms: Norm of each step, in order: an array, or the output of `metrics` in a form
        that `optclip.plot` describes.
      rate: Fraction of the steps with a norm above 0 to clip, from 0 to 1. Default:
        0.1.
      skip_first: Fraction of the steps to exclude at the start, where norms are often
        larger. Default: 0.1.
      clip: Name of the transformation; for one inside `skip` the name of the `skip`,
        which records all steps. Default: the only one, or the only `skip`.
      part: Label of a group or path of a leaf. Default: the only one.

    Returns:
      A `Suggestion`. Its threshold has two digits, or more if rounding would change the
      rate by over 20%. With fewer than 3 steps to clip, or many equal norms, the rate
      may still differ from `rate`.

    Raises:
      ValueError: Fewer than 10 finite norms above 0 remain, or a norm is negative.
    """
    _validate.fraction("rate", rate)
    _validate.fraction("skip_first", skip_first)
    every = _as_array(norms, clip, part)
    skipped = int(len(every) * float(skip_first))
    considered = every[skipped:]
    is_finite = np.isfinite(considered)
    # A batch of equal rewards, or a masked one, has no gradient to clip.
    finite = np.sort(considered[is_finite & (considered > 0)])
    if len(finite) < 10:
        raise ValueError(
            "`norms` must have at least 10 finite numbers above 0 after the first"
            f" {float(skip_first):.0%}, got {len(finite)}. Pass the norms of a longer"
            " run, or a smaller skip_first."
        )
    threshold = _threshold(finite, float(rate))
    quantiles = {q: float(np.quantile(finite, q)) for q in _QUANTILES}
    fraction = float(np.mean(finite > threshold))
    largest = float(np.max(every[np.isfinite(every)]))
    return Suggestion(
        threshold, fraction, quantiles, len(finite), int(np.sum(~is_finite)), largest,
        skipped, int(np.sum(considered == 0)),
    )  # fmt: skip


def _threshold(norms: np.ndarray, rate: float) -> float:
    """Return the threshold of fewest digits that clips about `rate` of sorted norms."""
    count = round(rate * len(norms))
    # At a rate of 1 all norms are clipped, so the threshold is 0.
    exact = float(norms[-1 - count]) if count < len(norms) else 0.0
    # Equal norms, such as those logged in bfloat16, are all clipped or none. The next
    # smaller norm is the candidate that clips them.
    smaller = norms[norms < exact][-1:].tolist()
    candidates = [
        _rounded_up(x, digits)
        for digits in range(2, _MOST_DIGITS + 1)
        for x in (exact, *smaller)
    ]
    errors = [abs(float(np.mean(norms > x)) - rate) for x in candidates]
    for candidate, error in zip(candidates, errors, strict=True):
        if error <= _TOLERANCE * rate:
            return candidate
    return candidates[int(np.argmin(errors))]


def _as_array(norms: Any, clip: str | None, part: str | None) -> np.ndarray:
    norms = entries = loaded(norms)
    first = norms[0] if isinstance(norms, (list, tuple)) and norms else norms
    if isinstance(first, Mapping):
        names = fields_by_name(read(norms, "norms"))
        name, key = choice(names, clip, part, "norms")
        entries = names[name]["norm"][key][has_run(names, name)]
    try:
        array = np.asarray(entries, np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise TypeError(
            _validate.must_be(
                "norms",
                "an array of numbers, one per step, or the dicts of optclip.metrics",
                norms,
                'Pass metrics(state)["clip/norm"] of each step.',
            )
        ) from error
    if np.any(array < 0):
        raise ValueError(
            _validate.must_be("norms", "at least 0", float(np.nanmin(array)))
        )
    if entries is norms and (clip is not None or part is not None):
        raise ValueError(
            f"clip={clip!r} and part={part!r} choose a norm in the output of"
            " optclip.metrics, but `norms` is an array. Remove them."
        )
    return array


def choice(
    names: dict[str, Fields], clip: str | None, part: str | None, run: str = "history"
) -> tuple[str, str]:
    """Return the name and the part of the chosen norm, or of the only one.

    Raises:
      ValueError: The name does not exist, or there are several and none was passed.
    """
    clips = clips_in(names)
    name = chosen("clip", clip or outer_skip(names, clips), clips, run)
    parts = [label for label in names[name]["norm"] if label]
    if parts or part is not None:
        return name, chosen("part", part, parts, run)
    return name, ""


def _rounded_up(x: float, digits: int) -> float:
    """Return the smallest number with this many digits that is at least `x`."""
    if x == 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(x)) - (digits - 1))
    return float(f"{np.ceil(x / unit * (1 - 1e-12)) * unit:.{digits}g}")
