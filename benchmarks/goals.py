"""The goals, and what was measured beside each."""

from collections.abc import Iterator
from typing import Any

from benchmarks.timing import added, exactly, ratio, smaller, spread
from benchmarks.verdicts import Case, Verdict, cases, named, on_gpu, ratios, seconds

MEMORY_BOUND = ("gpt2", "one")  # trees whose clip is limited by memory alone
OVER_FLOOR = {"f32": 1.10, "bf16": 1.10, "mixed": 1.10, "f16": 1.15}
OVER_OPTAX = {"f32": 1.0, "bf16": 6.0, "f16": 6.0, "mixed": 5.0}
STEP = {"f32": 1.13, "bf16": 1.08, "f16": 1.15, "mixed": 1.20}
GPU_STEP = 1.08
COMPILE = {
    ("equal", "2000", "norm"): 15.0, ("equal", "2000", "clip"): 8.0,
    ("assorted", "4000", "norm"): 30.0, ("assorted", "4000", "clip"): 15.0,
}  # fmt: skip


def over_floor(data: Any) -> Iterator[Verdict]:
    """The clip over norm + scale, as two executables on the same buffers."""
    for case in cases(data, "clip", what="clip"):
        plain, own, scale, ours = (
            seconds(case["rows"], name)
            for name in ("norm only", "own norm", "scale only", "optclip")
        )
        if ours and own and scale:
            below = added(smaller(plain, own), scale)
            yield Verdict(named(case), ratio(ours, below), OVER_FLOOR[case["dtype"]])


def over_optax(data: Any) -> Iterator[Verdict]:
    """By how much optax is slower; of a miss also than the floor."""
    for case in cases(data, "clip", what="clip"):
        goal = OVER_OPTAX[case["dtype"]]
        for each in ratios([case], "optax", "optclip", lambda c, g=goal: g, least=True):
            yield _explained(each, _most(case))


def _explained(verdict: Verdict, why: str) -> Verdict:
    """With what explains it, if it is a miss."""
    notes = [why] if why and verdict.short else []
    return verdict._replace(note="; ".join([*notes, *filter(None, [verdict.note])]))


def _over(words: str, case: Case, above: str, below: str) -> str:
    """The ratio of two contenders in words, if both ran."""
    a, b = seconds(case["rows"], above), seconds(case["rows"], below)
    return f"{words} {ratio(a, b).median:.2f}" if a and b else ""


def _most(case: Case) -> str:
    """By how much optax is slower than the floor, or than passing many leaves."""
    names = ("optax", "norm only", "own norm", "scale only", "identity")
    optax, plain, own, scale, identity = (seconds(case["rows"], n) for n in names)
    if not (optax and own and scale and identity):
        return ""
    if case["tree"] in MEMORY_BOUND:
        floor = added(smaller(plain, own), scale)
        return f"over the floor {ratio(optax, floor).median:.2f}"
    return f"over a jitted identity {ratio(optax, identity).median:.2f}"


def over_other(data: Any, other: str) -> Iterator[Verdict]:
    """By how much another library is slower: to be beaten on the GPT-2 tree."""

    def goal(case: Case) -> float | None:
        return 1.0 if other == "PyTorch" and case["tree"] == "gpt2" else None

    found = cases(data, "clip", what="clip")
    return ratios(found, other, "optclip", goal, least=True, strict=True)


def over_identity(data: Any) -> Iterator[Verdict]:
    """Many leaves: the clip over a jitted identity, the cost of so many arguments."""
    found = [
        c for c in cases(data, "clip", what="clip") if c["tree"] not in MEMORY_BOUND
    ]
    return ratios(
        found, "optclip", "identity", lambda c: 1.15 if c["tree"] == "equal" else None
    )


def safety(data: Any) -> Iterator[Verdict]:
    """The norm over the same without its second sum, which float16 never needs."""
    found = [c for c in cases(data, "clip", what="norm") if c["dtype"] != "f16"]
    for case in found:
        names = ("optclip", "one pass")
        branches = [case["rows"].get(name, {}).get("branches") for name in names]
        for each in ratios([case], *names, lambda c: 1.03):
            yield each._replace(note=f"branches: {branches[0]} over {branches[1]}")


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
    gpu = on_gpu(data)

    def goal(case: Case) -> float | None:
        if contender != "optclip" or case["optimizer"] != "adamw":
            return None
        if gpu:
            return GPU_STEP
        if case["dtype"] == "bf16" and case["gradients"] == "arguments":
            return None
        return STEP[case["dtype"]]

    def name(case: Case) -> str:
        source = (
            "gradients as arguments" if case["gradients"] == "arguments" else "made"
        )
        return f"{case['optimizer']}, {named(case)}, {source}"

    below = "PyTorch, unclipped" if contender == "PyTorch" else "unclipped"
    for case in cases(data, "steps"):
        least = _over("our norm and a plain scale", case, "plain scale", "unclipped")
        for each in ratios([case], contender, below, goal, name=name):
            yield _explained(each, least)


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
            found = Verdict(compiled(case), measured, goal, least=True)
            yield _explained(found, _least_compiled(case, spread(theirs).median))


def _least_compiled(case: Case, theirs: float) -> str:
    """By how much optax compiles slower than an unguarded norm, and a plain scale."""
    is_norm = case["what"] == "norm"
    names = ("one pass",) if is_norm else ("one pass", "scale only")
    parts = [seconds(case["rows"], name) for name in names]
    if not all(parts):
        return ""
    words = "unguarded" if is_norm else "unguarded and a plain scale"
    return f"{words} {theirs / sum(spread(p).median for p in parts if p):.2f}"


def growth(data: Any) -> Iterator[Verdict]:
    """Compile seconds at the largest over those at the smallest number of leaves."""
    for name in ("optclip", "optax"):
        for kind in ("equal", "assorted"):
            for what in ("norm", "clip", "rms"):
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


def rules(data: Any) -> Iterator[Verdict]:
    """A step whose threshold is learned over one with a fixed threshold."""
    for name, fixed, goal in (
        ("autoclip", "fixed", 1.02),
        ("mean_std_clip", "fixed", 1.02),
        ("zclip", "fixed", 1.02),
        ("adagc", "fixed, by leaf", None),
    ):
        for case in cases(data, "rules"):
            for each in ratios([case], name, fixed, lambda c, g=goal: g):
                size = case["rows"][name]["state_bytes"]
                note = f"state {size / 1000:.1f} kB"
                yield each._replace(what=f"{name}: {each.what}", note=note)


def scopes(data: Any) -> Iterator[Verdict]:
    """The other scopes over their own floor."""
    for case in cases(data, "scopes"):
        rows = case["rows"]
        ours = seconds(rows, "optclip")
        plain, own, scale, clip = (
            seconds(rows, name)
            for name in ("norms only", "own norms", "scale only", "plain clip")
        )
        by_norm = own and scale and added(smaller(plain, own), scale)
        below = clip if case["scope"] == "value" else by_norm
        if ours and below:
            title = f"{case['scope']}: {named(case)}"
            found = Verdict(title, ratio(ours, below), 1.15)
            unsafe = seconds(rows, "unguarded")
            why = f"unguarded {ratio(unsafe, below).median:.2f}" if unsafe else ""
            yield _explained(found, why)


def zeros(data: Any) -> Iterator[Verdict]:
    """The clip where one leaf or row is zero over that where none is."""
    yield from ratios(
        cases(data, "scopes"), "optclip, zeros", "optclip", lambda c: None,
        name=lambda c: f"{c['scope']}: {named(c)}",
    )  # fmt: skip


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
            note = f"{row['temp_bytes'] / 1e6:.2f} MB"
            yield Verdict(named(case), exactly(part), 1.0, note=note)


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
    if not copies or not on_gpu(data):
        return
    copy = copies[0]["rows"]["x + 1"]
    best = copy["moved_bytes"] / spread(copy["seconds"]).median
    for case in cases(data, "clip", what="clip"):
        if case["tree"] in MEMORY_BOUND:
            row = case["rows"]["optclip"]
            moved = 3 * row["gradient_bytes"]  # read, read again, write
            parts = [moved / each / best for each in row["seconds"]]
            note = f"{moved / spread(row['seconds']).median / 1e9:,.0f} GB/s"
            yield Verdict(named(case), spread(parts), 0.9, least=True, note=note)


def kernels(data: Any) -> Iterator[Verdict]:
    """Kernels of one clip over the leaves, on a GPU."""
    for case in cases(data, "clip", what="clip") if on_gpu(data) else ():
        if case["tree"] not in MEMORY_BOUND:
            count = float(case["rows"]["optclip"]["kernels"])
            goal = 2000.0 if case["tree"] == "equal" else None
            yield Verdict(named(case), exactly(count), goal, strict=True)
