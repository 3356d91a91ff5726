"""What a part is made of: cases, each measured by itself and saved as soon as it is."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks import trees

Row = dict[str, Any]
PARTS = {
    "clip": "benchmarks.clip",
    "steps": "benchmarks.steps",
    "compile": "benchmarks.compiling",
    "backprop": "benchmarks.backprop",
    "scopes": "benchmarks.scopes",
    "rules": "benchmarks.rules",
    "cpp": "benchmarks.bandwidth",
}


class Options(NamedTuple):
    """What the command line asked for."""

    rounds: int = 15
    small: bool = False
    long: bool = False
    gpu: bool = False

    def quick(self, workload: trees.Workload) -> bool:
        """Whether optax compiles in seconds for it, or all the time is ours."""
        return self.small or self.long or not workload.long

    def dtypes(self, workload: trees.Workload) -> list[str]:
        """The dtypes to measure a tree in; small runs take a few of all pairs."""
        if self.small:
            few = {"gpt2": ["f32"], "equal": ["mixed"], "one": ["f16"]}
            return few.get(workload.name, [])
        one = len(trees.leaves(workload.shapes)) == 1
        return [each for each in trees.DTYPES if not (one and each == "mixed")]

    def rounds_for(self, workload: trees.Workload) -> int:
        """Calls of a millisecond are noisier than those of ten, but can be repeated."""
        return self.rounds * (2 if workload.many and not self.small else 1)


class Case(NamedTuple):
    """One race: its labels, and how to run it."""

    labels: Mapping[str, str]
    run: Callable[[], Mapping[str, Row]]  # a row for each contender
    title: str = ""

    @property
    def name(self) -> str:
        """The labels in one line, by which a case is chosen and replaced."""
        return " ".join(self.labels.values())


def cases_of(part: str, options: Options) -> Iterable[Case]:
    """The cases of a part, of which only those needed are imported."""
    return importlib.import_module(PARTS[part]).cases(options)
