"""A fixed threshold, from the norms of a run that was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optclip._arrays import _validate

_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99)
# A norm this many times the median may have made the run diverge.
_MANY = 100


class Suggestion(NamedTuple):
    """What `suggest` found. Printed, it is a table.

    Attributes:
      max_norm: the suggested threshold for `clip_by_global_norm`.
      rate: the fraction of the steps that it would have clipped.
      quantiles: a dict from q to that quantile of the norms.
      steps: the number of finite norms.
      nonfinite: the number of norms that were NaN or inf, left out of all this.
      largest: the largest finite norm of all steps, the first included.
    """

    max_norm: float
    rate: float
    quantiles: dict[float, float]
    steps: int
    nonfinite: int
    largest: float

    def __str__(self) -> str:
        lines = [
            f"{q:>8.0%} of the norms are at most {x:.4g}"
            for q, x in self.quantiles.items()
        ]
        bad = f", {self.nonfinite} more not finite" if self.nonfinite else ""
        last = f"max_norm={self.max_norm:.4g} would have clipped {self.rate:.1%} of"
        lines.append(f"{last} {self.steps} steps{bad}")
        if self.largest > _MANY * self.quantiles[0.5]:
            lines.append(
                f"the largest norm of all is {self.largest:.2g}, over {_MANY} times the"
                " median: if this run did not train, record one that does"
            )
        return "\n".join(lines)


def suggest(
    norms: Mapping[str, Any] | Sequence[Any] | np.ndarray | jax.Array,
    rate: float = 0.1,
    *,
    skip_first: float = 0.1,
) -> Suggestion:
    """A fixed threshold for a run like one whose norms are known.

    Record them with a clip that touches nothing, `clip_by_global_norm(inf)`, and
    `metrics(state)["clip/norm"]` of each step; or give what another library logged.
    Record where training works: but for the step that lost it, the norms of a lost run
    look like any other's. If the 99 % quantile is many times the median, or one norm
    100 times (the table says so), record again behind a loose clip or at a lower
    learning rate, and see that it falls.

    Args:
      norms: the norm of each step in order, an array of any shape; or what `metrics`
        returns: a list of such dicts, or one of arrays, as `jax.lax.scan` stacks them.
      rate: the fraction of the steps that may be clipped, from 0 to 1.
      skip_first: the fraction of the steps, at the start, that is not looked at: norms
        are larger there than they will be.

    Returns:
      A `Suggestion`: the threshold is the quantile that clips that many, rounded up to
      two digits.

    Raises:
      TypeError: `norms` is not made of numbers.
      ValueError: fewer than 10 norms are finite after the start; an argument is out of
        range; a norm is negative.

    Example:
      >>> import numpy as np, optclip
      >>> print(optclip.suggest(np.random.default_rng(0).gamma(4.0, size=1000)))
           50% of the norms are at most 3.76
           75% of the norms are at most 5.162
           90% of the norms are at most 6.613
           95% of the norms are at most 7.637
           99% of the norms are at most 10.33
      max_norm=6.7 would have clipped 9.6% of 900 steps
    """
    _validate.fraction("rate", rate)
    _validate.fraction("skip_first", skip_first)
    every = _as_array(norms)
    considered = every[int(len(every) * float(skip_first)) :]
    finite = considered[np.isfinite(considered)]
    if len(finite) < 10:
        raise ValueError(
            "`norms` must have at least 10 finite numbers after the first"
            f" {float(skip_first):.0%}, got {len(finite)}. Give those of a longer run,"
            " or a smaller skip_first."
        )
    threshold = _rounded_up(float(np.quantile(finite, 1 - float(rate))))
    quantiles = {q: float(np.quantile(finite, q)) for q in _QUANTILES}
    fraction = float(np.mean(finite > threshold))
    largest = float(np.max(every[np.isfinite(every)]))
    nonfinite = len(considered) - len(finite)
    return Suggestion(threshold, fraction, quantiles, len(finite), nonfinite, largest)


def _as_array(norms: Any) -> np.ndarray:
    entries = norms
    if isinstance(norms, dict):
        entries = _norm_in(norms)
    if isinstance(norms, (list, tuple)) and norms and isinstance(norms[0], dict):
        entries = [_norm_in(entry) for entry in norms]
    try:
        array = np.asarray(entries, np.float64).ravel()
    except (TypeError, ValueError) as error:
        wanted = (
            "an array of numbers, one a step, or dicts as optclip.metrics returns them"
        )
        advice = 'Give metrics(state)["clip/norm"] of each step.'
        raise TypeError(_validate.must_be("norms", wanted, norms, advice)) from error
    if np.any(array < 0):
        raise ValueError(
            _validate.must_be("norms", "0 or more", float(np.nanmin(array)))
        )
    return array


def _norm_in(entry: dict[str, Any]) -> Any:
    """The one norm in a dict of metrics."""
    keys = [key for key in entry if key.endswith("/norm")]
    if len(keys) != 1:
        all_keys = [key for key in entry if "/norm" in str(key)] or list(entry)
        raise ValueError(
            "`norms` must have the one norm of a tree, got a dict with"
            f" {_validate.shown(all_keys)}. Give the numbers of one, such as"
            f" {_access_to(all_keys)}: of a group its own, and of a clip inside skip"
            " those of the skip."
        )
    return entry[keys[0]]


def _access_to(keys: list[str]) -> str:
    """How a user would take the numbers of one key, the skip's if there is one."""
    norms = [key for key in keys if "/norm" in str(key)] or ["clip/norm"]
    key = next((key for key in norms if key.startswith("skip")), norms[0])
    return f"history[{key!r}] or [m[{key!r}] for m in history]"


def _rounded_up(x: float) -> float:
    """`x` with two digits, not smaller."""
    if x == 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(x)) - 1)
    return float(f"{np.ceil(x / unit * (1 - 1e-12)) * unit:.2g}")
