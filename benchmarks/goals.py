"""The goals, and what was measured beside each: ratios by round, worst first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.timing import Spread, added, ratio, spread

Case = Mapping[str, Any]
Rows = Mapping[str, Any]

MEMORY_BOUND = ("gpt2", "one")  # trees whose clip is limited by memory alone
OVER_FLOOR = {"f32": 1.10, "bf16": 1.10, "mixed": 1.10, "f16": 1.15}
OVER_OPTAX = {"f32": 1.0, "bf16": 6.0, "f16": 6.0, "mixed": 5.0}
STEP = {"f32": 1.13, "bf16": 1.08, "f16": 1.15, "mixed": 1.20}
GPU_STEP = 1.08
COMPILE = {
    ("equal", "2000", "norm"): 15.0, ("equal", "2000", "clip"): 8.0,
    ("assorted", "4000", "norm"): 30.0, ("assorted", "4000", "clip"): 15.0,
}  # fmt: skip


class Verdict(NamedTuple):
    """One row: what, its goal if it has one, and what was measured."""

    what: str
    measured: Spread
    goal: float | None
    least: bool = False  # the goal is a lower bound

    @property
    def miss(self) -> float:
        """How far off the goal, as a factor: above 1 is a miss."""
        if self.goal is None:
            return 0.0
        if self.least:
            return self.goal / self.measured.median if self.measured.median else 1e9
        return self.measured.median / self.goal if self.goal else self.measured.median

    @property
    def met(self) -> str:
        """In words."""
        if self.goal is None:
            return ""
        return "met" if self.miss <= 1 else "**falls short**"


def worst_first(verdicts: Iterator[Verdict]) -> list[Verdict]:
    """By the factor off the goal; rows without a goal last."""
    return sorted(verdicts, key=lambda each: (each.goal is None, -each.miss))


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


def ratios(
    found: Sequence[Case],
    above: str,
    below: str,
    goal: Callable[[Case], float | None],
    least: bool = False,
    name: Callable[[Case], str] = named,
) -> Iterator[Verdict]:
    """One contender over another in each case that has both."""
    for case in found:
        a, b = seconds(case["rows"], above), seconds(case["rows"], below)
        if a and b:
            yield Verdict(name(case), ratio(a, b), goal(case), least)


def over_floor(data: Any) -> Iterator[Verdict]:
    """The clip over norm + scale, as two executables on the same buffers."""
    for case in cases(data, "clip", what="clip"):
        rows = case["rows"]
        ours, *parts = (
            seconds(rows, n) for n in ("optclip", "norm only", "scale only")
        )
        if ours and all(parts):
            yield Verdict(
                named(case), ratio(ours, added(*parts)), OVER_FLOOR[case["dtype"]]
            )


def over_optax(data: Any) -> Iterator[Verdict]:
    """By how much optax is slower."""

    def goal(case: Case) -> float:
        return OVER_OPTAX[case["dtype"]] if case["tree"] in MEMORY_BOUND else 1.0

    return ratios(
        cases(data, "clip", what="clip"), "optax", "optclip", goal, least=True
    )


def over_other(data: Any, other: str) -> Iterator[Verdict]:
    """By how much another library is slower: to be beaten on the GPT-2 tree."""

    def goal(case: Case) -> float | None:
        return 1.0 if other == "PyTorch" and case["tree"] == "gpt2" else None

    return ratios(cases(data, "clip", what="clip"), other, "optclip", goal, least=True)


def over_identity(data: Any) -> Iterator[Verdict]:
    """Many leaves: the clip over a jitted identity, the cost of so many arguments."""
    found = [
        c for c in cases(data, "clip", what="clip") if c["tree"] not in MEMORY_BOUND
    ]
    return ratios(
        found, "optclip", "identity", lambda c: 1.15 if c["tree"] == "equal" else None
    )


def safety(data: Any) -> Iterator[Verdict]:
    """The norm that cannot overflow over the plain one that can."""
    return ratios(
        cases(data, "clip", what="norm"), "optclip", "plain norm", lambda c: 1.03
    )


def recording(data: Any) -> Iterator[Verdict]:
    """The transformation with its record over the same without."""
    return ratios(
        cases(data, "clip", what="clip"),
        "transformation, recording",
        "transformation, silent",
        lambda c: 1.01,
    )


def steps(data: Any, contender: str = "optclip") -> Iterator[Verdict]:
    """An optimizer step clipped over the same unclipped."""
    gpu = data["machine"]["backend"] == "gpu"

    def goal(case: Case) -> float | None:
        if contender != "optclip" or case["optimizer"] != "adamw":
            return None
        if case["dtype"] == "bf16" and case["gradients"] == "arguments":
            return None
        return GPU_STEP if gpu else STEP[case["dtype"]]

    def name(case: Case) -> str:
        source = (
            "gradients as arguments" if case["gradients"] == "arguments" else "made"
        )
        return f"{case['optimizer']}, {named(case)}, {source}"

    found = cases(data, "steps")
    below = "PyTorch, unclipped" if contender == "PyTorch" else "unclipped"
    return ratios(found, contender, below, goal, name=name)


def backprop(data: Any) -> Iterator[Verdict]:
    """A real train step, clipped over unclipped."""
    for contender in ("optclip", "optax"):
        goal = 1.03 if contender == "optclip" else None
        yield from ratios(
            cases(data, "backprop"), contender, "unclipped", lambda c, g=goal: g,
            name=lambda c, n=contender: f"{n}: {named(c)}",
        )  # fmt: skip


def compiling(data: Any) -> Iterator[Verdict]:
    """By how much optax compiles slower."""
    for case in cases(data, "compile"):
        ours, theirs = (seconds(case["rows"], n) for n in ("optclip", "optax"))
        if ours and theirs:
            # A slow contender is compiled fewer times, so these are no rounds.
            middle = spread(ours).median
            labels = (case["tree"], case["leaves"], case["what"])
            goal = COMPILE.get(labels) if case["dtype"] == "f32" else None
            measured = spread([each / middle for each in theirs])
            yield Verdict(compiled(case), measured, goal, least=True)


def growth(data: Any) -> Iterator[Verdict]:
    """Compile seconds at the largest over those at the smallest number of leaves."""
    for name in ("optclip", "optax"):
        for kind in ("equal", "assorted"):
            for what in ("norm", "clip"):
                found = cases(data, "compile", tree=kind, what=what, dtype="f32")
                found = [case for case in found if seconds(case["rows"], name)]
                found.sort(key=lambda case: int(case["leaves"]))
                if len(found) > 1:
                    first, last = (found[i]["rows"][name]["seconds"] for i in (0, -1))
                    middle = spread(first).median
                    full = (found[0]["leaves"], found[-1]["leaves"]) == ("500", "4000")
                    yield Verdict(
                        f"{name}, {what}, {kind}: from {found[0]['leaves']} to"
                        f" {found[-1]['leaves']} leaves",
                        spread([each / middle for each in last]),
                        10.0 if name == "optclip" and full else None,
                    )


def compiled(case: Case) -> str:
    """A case of compilation in words."""
    return f"{case['what']}, {case['leaves']} leaves, {case['tree']}, {case['dtype']}"


def scopes(data: Any) -> Iterator[Verdict]:
    """The other scopes over their own floor."""
    for case in cases(data, "scopes"):
        rows = case["rows"]
        ours = seconds(rows, "optclip")
        parts = [seconds(rows, n) for n in ("norms only", "scale only", "plain clip")]
        below = [each for each in parts if each]
        if ours and below:
            what = f"{case['scope']}: {named(case)}"
            yield Verdict(what, ratio(ours, added(*below)), 1.15)


def scopes_nearest(data: Any) -> Iterator[Verdict]:
    """By how much the nearest clip elsewhere is slower."""
    for other in ("optax", "TensorFlow"):
        yield from ratios(
            cases(data, "scopes"), other, "optclip", lambda c: None, least=True,
            name=lambda c, o=other: f"{o}, {c['scope']}: {named(c)}",
        )  # fmt: skip


def memory(data: Any) -> Iterator[Verdict]:
    """Temporary memory of the clip in percent of the gradients, by XLA's own account."""
    for case in cases(data, "clip", what="clip"):
        row = case["rows"]["optclip"]
        if "temp_bytes" in row:
            part = 100 * row["temp_bytes"] / row["gradient_bytes"]
            goal = 1.0 if case["tree"] in MEMORY_BOUND else None
            yield Verdict(named(case), Spread(part, part, part), goal)


def faults(data: Any) -> Iterator[Verdict]:
    """Minor page faults per clip of the GPT-2 tree."""
    for case in cases(data, "clip", what="clip", tree="gpt2"):
        for name, goal in (("optclip", 100.0), ("optax", None)):
            row = case["rows"].get(name, {})
            if row.get("faults"):
                yield Verdict(f"{name}: {named(case)}", spread(row["faults"]), goal)


def bandwidth(data: Any) -> Iterator[Verdict]:
    """What the clip moves per second over what a copy does, on a GPU."""
    copies = cases(data, "cpp", what="copy")
    if not copies or data["machine"]["backend"] != "gpu":
        return
    copy = copies[0]["rows"]["x + 1"]
    best = copy["moved_bytes"] / spread(copy["seconds"]).median
    for case in cases(data, "clip", what="clip"):
        if case["tree"] in MEMORY_BOUND:
            row = case["rows"]["optclip"]
            moved = 3 * row["gradient_bytes"]  # read, read again, write
            parts = [moved / each / best for each in row["seconds"]]
            what = f"{named(case)} ({moved / spread(row['seconds']).median / 1e9:,.0f} GB/s)"
            yield Verdict(what, spread(parts), 0.9, least=True)


def kernels(data: Any) -> Iterator[Verdict]:
    """Kernels of one clip over the leaves, on a GPU."""
    for case in cases(data, "clip", what="clip"):
        row = case["rows"]["optclip"]
        if "kernels" in row and case["tree"] not in MEMORY_BOUND:
            count = float(row["kernels"])
            goal = 2000.0 if case["tree"] == "equal" else None
            yield Verdict(named(case), Spread(count, count, count), goal)
