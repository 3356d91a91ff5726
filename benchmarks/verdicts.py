"""How a goal and what was measured are put side by side: ratios by round, worst first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.timing import Spread, ratio

Case = Mapping[str, Any]
Rows = Mapping[str, Any]

WRONG = 0.05  # an error that no rounding makes, not even of bfloat16 twice


class Verdict(NamedTuple):
    """One row: what, its goal if it has one, and what was measured."""

    what: str
    measured: Spread
    goal: float | None
    least: bool = False  # the goal is a lower bound
    strict: bool = False  # the goal itself is not enough
    note: str = ""

    @property
    def miss(self) -> float:
        """How far off the goal, as a factor: above 1 is a miss."""
        if self.goal is None:
            return 0.0
        if self.least:
            return self.goal / self.measured.median if self.measured.median else 1e9
        return self.measured.median / self.goal if self.goal else self.measured.median

    @property
    def short(self) -> bool:
        """Whether there is a goal, and it is missed."""
        return self.goal is not None and not (
            self.miss < 1 or (self.miss == 1 and not self.strict)
        )

    @property
    def near(self) -> bool:
        """Whether so few rounds cannot tell on which side of the goal the median is."""
        if self.goal is None or self.measured.sure is None:
            return False
        low, high = self.measured.sure
        return low <= self.goal <= high

    @property
    def met(self) -> str:
        """In words."""
        words = "" if self.goal is None else "**falls short**" if self.short else "met"
        words += ", within noise" if self.near else ""
        return "; ".join(each for each in (words, self.note) if each)


def worst_first(verdicts: Iterator[Verdict]) -> list[Verdict]:
    """By the factor off the goal; then rows without a goal, by what was measured."""

    def order(each: Verdict) -> tuple[bool, float, float]:
        median = each.measured.median
        return each.goal is None, -each.miss, median if each.least else -median

    return sorted(verdicts, key=order)


def on_gpu(data: Mapping[str, Any]) -> bool:
    """Whether a file is of a GPU; all its cases are of one kind of machine."""
    return data["machines"][0]["backend"] == "gpu"


def cases(data: Mapping[str, Any], part: str, **labels: str) -> list[Case]:
    """The cases of a part with these labels."""
    found = data["parts"].get(part, {}).values()
    return [c for c in found if all(c.get(k) == v for k, v in labels.items())]


def seconds(rows: Rows, name: str) -> Sequence[float] | None:
    """The samples of a contender, None if it did not run."""
    return rows.get(name, {}).get("seconds") or None


def named(case: Case) -> str:
    """A tree and a dtype in words."""
    return f"{case['title']}, {case['dtype']}"


def wrong(rows: Rows, *names: str) -> str:
    """What to say of a contender that is fast because its output is not right."""
    for name in names:
        error = float(rows.get(name, {}).get("error", 0))
        if not error <= WRONG:
            return f"{name}'s output is wrong: error {error:.2f}"
    return ""


def ratios(
    found: Sequence[Case],
    above: str,
    below: str,
    goal: Callable[[Case], float | None],
    least: bool = False,
    strict: bool = False,
    name: Callable[[Case], str] = named,
) -> Iterator[Verdict]:
    """One contender over another in each case that has both."""
    for case in found:
        a, b = seconds(case["rows"], above), seconds(case["rows"], below)
        if a and b:
            note = wrong(case["rows"], above, below)
            yield Verdict(name(case), ratio(a, b), goal(case), least, strict, note)
