"""What was compared: how many cases, how far apart, how many really clipped."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .cases import Case, eps, wide


class Tally:
    """The cases of one test. `finish` fails it if any differs, or if none clipped."""

    def __init__(self, library: str, record_property):
        self.library = library
        self.record = record_property
        self.cases = 0
        self.clipped = 0
        self.mismatches: dict[int, str] = {}
        self.worst: dict[str, float] = {}

    def close(
        self,
        case: Case,
        ours: Sequence[Any],
        theirs: Sequence[Any],
        ulps: float,
        scale: Sequence[Any] | None = None,
        what: str = "",
    ) -> None:
        """Each number within `ulps` of theirs, of its own size or of `scale`."""
        limit = ulps * eps(case.dtype)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            found = difference(a, b, None if scale is None else scale[i])
            name = str(case.dtype)
            self.worst[name] = max(self.worst.get(name, 0.0), found)
            if not found <= limit:
                text = f"{case}: {what}[{i}] {found:.1e}: {a} != {b}"
                self.mismatches.setdefault(case.seed, text)

    def same(self, case: Case, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
        """Equal to the bit but for the sign of zero, NaN to NaN."""
        self.close(case, ours, theirs, 0)

    def count(self, case: Case, ours: Sequence[Any], before: Sequence[Any]) -> None:
        """One case more, clipped if it changed; inside it must not, to the bit."""
        changed = not all(
            np.array_equal(wide(a), wide(b), equal_nan=True)
            for a, b in zip(ours, before, strict=True)
        )
        self.cases += 1
        self.clipped += changed
        if changed and case.where == "inside":
            text = f"{case}: inside the threshold, yet changed"
            self.mismatches.setdefault(case.seed, text)

    def finish(self, *, clipped: float, untouched: float) -> None:
        """Fail on a mismatch, or if smaller shares than these were clipped or not."""
        self.record(
            "parity", [self.library, self.cases, len(self.mismatches), self.worst]
        )
        shown = "\n".join(list(self.mismatches.values())[:5])
        assert not self.mismatches, f"{len(self.mismatches)} of {self.cases}:\n{shown}"
        share = self.clipped / self.cases
        assert share >= clipped, f"only {share:.0%} of the cases were clipped"
        assert 1 - share >= untouched, f"only {1 - share:.0%} were left alone"


def difference(a: Any, b: Any, scale: Any = None) -> float:
    """The largest difference, relative to the larger of the two or to `scale`."""
    a, b = wide(a), wide(b)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    size = np.maximum(np.abs(a), np.abs(b)) if scale is None else wide(scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.where(alike, 0.0, np.abs(a - b) / size)
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))
