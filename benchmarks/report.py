"""The page of performance from saved measurements.

python -m benchmarks.report benchmarks/results/cpu.json [gpu.json] [--page PAGE]
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import brief, expected, goals, plots, provenance, results, verdicts
from benchmarks.expected import Tables
from benchmarks.timing import Spread, spread
from benchmarks.verdicts import Verdict, worst_first

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"

# Title, what the numbers are, and how they come from the data.
TABLES: tuple[tuple[str, str, Callable[[Any], Iterator[Verdict]]], ...] = (
    ("Many leaves, over a jitted identity", "Time of the donated clip over that of a function that returns its arguments: what JAX takes to pass so many. For these trees read this table rather than the next.", goals.over_identity),
    ("Clip alone, over its floor", "Time of the donated clip over that of the floor. Of many leaves the floor's two executables pay twice to pass their arguments, so it is generous there, and what is met there says little.", goals.over_floor),
    ("Clip alone: optax", "Time of optax over that of optclip, with one goal for all trees of a dtype. A miss also says what a clip as fast as its floor would reach, or, of many leaves, one that only passes them.", goals.over_optax),
    ("Clip alone: PyTorch", "Time of `clip_grad_norm_(foreach=True)` over that of optclip.", lambda d: goals.over_other(d, "PyTorch")),
    ("Clip alone: TensorFlow", "Time of a `tf.function` of `tf.clip_by_global_norm`, which cannot work in place, over that of optclip.", lambda d: goals.over_other(d, "TensorFlow")),
    ("Optimizer steps", "Time of the step clipped by optclip over that of the same step unclipped. *Made* gradients are computed in the step. A miss of few leaves also says what our norm and a plain scale would take in place of the clip.", goals.steps),
    ("Optimizer steps: optax", "The same clipped by optax.", lambda d: goals.steps(d, "optax")),
    ("Optimizer steps: PyTorch", "`clip_grad_norm_` and its fused AdamW over this AdamW alone: what the clip adds to PyTorch's own step. Its step itself may be the faster one: see the milliseconds below.", lambda d: goals.steps(d, "PyTorch")),
    ("A real train step", "Forward, backward and AdamW of a small GPT-2, clipped over unclipped.", goals.backprop),
    ("Compile time: optax", "Seconds to trace, lower and compile with optax over those with optclip: of the global norm, the clip by it, and the clip of each leaf by its root mean square (`rms`; optax has no clip by the norm of a leaf). On CPU it depends on the machine: of the norm of 2,000 leaves three of them gave 8.0, 9.8 and 14.7. A miss also says what our norm would reach unguarded, without the second sum that keeps it from overflow; and for the clip that and a plain scale by a constant, compiled apart.", goals.compiling),
    ("Compile time: growth", "Compile seconds at the most leaves over those at the fewest.", goals.growth),
    ("Overflow safety", "Time of optclip's norm over that of the same norm without the second sum that guards it; the branches in the HLO show which has one. Float16 alone needs none: its squares are in the range of float32.", goals.safety),
    ("Recording", "Time of the clip by global norm as a transformation, with its record over that with `record=False`.", goals.recording),
    ("Thresholds that learn", "Time of an AdamW step clipped by a learned threshold over that of the same step with a fixed one, for the whole tree or by leaf. Of GPT-2, whose leaves are large: what a rule by leaf takes on hundreds of small ones is not in this table.", goals.rules),
    ("Other scopes, over their floor", "As for the clip alone, the faster of plain norms of the scope and of optclip's, and a plain scale. By value the floor is one `jnp.clip`, which in float16 takes ten times as long, and so is none. Of 2,000 leaves, each with a norm of its own, optclip guards each against overflow. A miss of these also says what it is unguarded.", goals.scopes),
    ("Other scopes: zeros", "Time of the clip where the gradients of one leaf, or of one row, are all 0, over that where none are. Until 24 November 2026 a norm of 0 was told from that of numbers whose squares vanish by a second reading; a norm below 2^-60 counts as 0 since.", goals.zeros),
    ("Other scopes: the nearest elsewhere", "Time of optax's `clip_by_block_rms`, `clip`, or `partition` of global clips, or TensorFlow's `clip_by_norm` (not in place), over that of optclip. Nothing elsewhere is nearer.", goals.scopes_nearest),
    ("Extra memory", "Temporary memory of the clip by global norm alone in percent of the gradients, by XLA's account. Small leaves are joined before they are reduced, so that thousands compile to few reductions: where all are small, and no two of one shape, that is a copy of them, in float32 for bfloat16. Clips by leaf copy the leaves of fewer than 4,096 elements (of 16 bits: of up to 1,024) of which there are four or more of one type.", goals.memory),
    ("Page faults", "Minor page faults of one clip.", goals.faults),
    ("Bandwidth", "Bytes that the clip must move (3 x the gradients) per second, over what `x + 1` in place moves.", goals.bandwidth),
    ("Kernels", "Fusions in the compiled clip; each is a kernel.", goals.kernels),
)  # fmt: skip


INTRODUCTION = """
Made by `python -m benchmarks --long`, which measures all of this again, in half a day; the samples are in `benchmarks/results`. Contenders take turns in random order; the first round is dropped. Those in JAX work on the same buffers, donated where they give a tree back; PyTorch and TensorFlow have buffers of their own, filled with the same numbers. A median is of ratios by round, with its quartiles beside it; *within noise* is a goal inside the interval that holds the true median with 95 % confidence, so that these rounds cannot tell whether it is met. But compile times are of separate processes, over the median of what they are compared with, and bandwidth is over the median of the copy.

**The trees**: the 148 leaves of GPT-2 124M (`gpt2`), one array of as many numbers (`one`), 2,000 leaves of 64 (`equal`), 1,000 small leaves of distinct sizes (`distinct`), and 4,000 small leaves of 24 shapes (`assorted`). *Mixed* is float32, bfloat16 and float16 leaf by leaf in turn. **Goals** are those that we set ourselves; rows without one are for comparison. `python -m benchmarks --list` names all cases, `python -m benchmarks clip --only "clip gpt2 f32" --out here.json --page here.md` runs some of them by their words.

The numbers are standard normal. The clip and the steps have a threshold of 0.4 of the norm; other scopes half of the smallest norm that they see, or half the numbers' own size, and the real train step one so low that it always clips. In each table the row furthest off its goal comes first, and rows without a goal last, the worst of them first.

**The floor** is the cheapest norm known and a plain scale, two executables on the same buffers: in each round the faster of the norm as one writes it down in float32 (which XLA copies float16 for) and of optclip's own norm alone, which in float16 is always the faster: there the floor says what a clip costs beyond our norm, not what memory would allow. The plain norm and optax are left out on the tree of 4,000 leaves, where they take minutes to compile, unless the run is `--long`; where a cell below is empty, the contender was left out for that or cannot do it.
"""

APART = "Each row is a race of its own: compare along rows, not between them."
ERRORS = "Against float64: the relative error of the norm; of a clip the largest of an element, relative to it, among up to 16,384 of each leaf; of a step the largest in the sampled parameters and moments, relative to the largest there, against the same optimizer on gradients that NumPy clipped in float64. A run ends if optclip's is more than rounding explains. In bf16 and f16 a step of SGD is below their rounding, and its check says nothing. PyTorch's steps are not checked."


def page(files: Sequence[Mapping[str, Any]], images: Mapping[str, list[str]]) -> str:
    """The whole page; images are by backend."""
    parts = ["# How fast it is\n"]
    for data in files:
        parts += [f"## In short, on {data['machines'][0]['backend'].upper()}\n"]
        parts += brief.lines(data)
    parts += ["## How it is measured\n", INTRODUCTION.lstrip()]
    if not any(data["machines"][0]["backend"] == "gpu" for data in files):
        parts.append("**Not measured on GPU.**\n")
    for data in files:
        parts += _section(data, images.get(data["machines"][0]["backend"], []))
    return "\n".join(parts)


def _section(data: Mapping[str, Any], images: list[str]) -> Iterator[str]:
    """What was measured on one machine."""
    yield f"## On {data['machines'][0]['backend'].upper()}\n"
    yield provenance.lines(data)
    tables, whole = judged(data), judged(expected.as_if_measured(data))
    yield _goals(tables, expected.missing(tables, whole))
    yield from _not_run(expected.not_run(data))
    for image in images:
        yield f"![{_caption(image)}]({image})\n"
    for (title, text, _), (_, found) in zip(TABLES, tables, strict=True):
        if found:
            yield f"### {title}\n\n{text}\n\n{_verdicts(found)}\n"
    yield from _times(data)
    yield _errors(data)


def judged(data: Mapping[str, Any]) -> list[tuple[str, list[Verdict]]]:
    """Each table's title and verdicts, the worst first."""
    return [(title, worst_first(make(data))) for title, _, make in TABLES]


def _caption(image: str) -> str:
    """What a picture shows."""
    return "seconds to compile" if "compile" in image else "clip, others over optclip"


def _goals(tables: Tables, lacking: Mapping[str, list[str]]) -> str:
    """How many goals are met, those that are not, and those that were not measured."""
    with_goal = [(t, v) for t, found in tables for v in found if v.goal is not None]
    short = sorted((x for x in with_goal if x[1].short), key=lambda x: -x[1].miss)
    unknown = sum(len(rows) for rows in lacking.values())
    near = [sum(v.near for _, v in with_goal if v.short is x) for x in (False, True)]
    text = (
        f"{len(with_goal) - len(short)} of {len(with_goal) + unknown} goals are met"
        f" ({near[False]} within noise), {len(short)} fall short ({near[True]} within"
        f" noise), {unknown} not measured."
    )
    return "\n".join(
        [text, "", *_misses(short), *_faster(tables), *_unmeasured(lacking)]
    )


def _misses(short: Sequence[tuple[str, Verdict]]) -> Iterator[str]:
    """The goals that are not met."""
    if short:
        yield "Those that fall short:\n\n| table | row | goal | measured |\n|---|---|---|---|"
        for title, v in short:
            measured = _number(v.measured.median)
            noisy = ", within noise" if v.near else ""
            yield f"| {title} | {v.what} | {_goal(v)} | {measured}{noisy} |"
        yield ""


def _faster(tables: Tables) -> Iterator[str]:
    """What others do faster, where no goal says that they must not."""
    found = [
        (title, v)
        for title, verdicts in tables
        for v in verdicts
        if v.least and v.goal is None and v.measured.median < 1
    ]
    if found:
        yield "Without a goal, but faster elsewhere (time of the other over ours):\n\n| table | row | measured |\n|---|---|---|"
        for title, v in sorted(found, key=lambda each: each[1].measured.median):
            yield f"| {title} | {v.what} | {_number(v.measured.median)} |"
        yield ""


def _unmeasured(lacking: Mapping[str, list[str]]) -> Iterator[str]:
    """The goals without a row, because a case did not run or a contender refused."""
    if lacking:
        yield "Not measured:\n\n| table | rows |\n|---|---|"
        for title, rows in lacking.items():
            yield f"| {title} | {'; '.join(rows)} |"
        yield ""


def _not_run(missing_cases: Mapping[str, list[str]]) -> Iterator[str]:
    """The cases of a whole run that are not there, with goals or without."""
    if missing_cases:
        count = sum(len(names) for names in missing_cases.values())
        yield f"{count} cases of a whole run were not run:\n"
        for part, names in missing_cases.items():
            yield f"- `{part}`: {', '.join(names)}"
        yield ""


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    """A table of goals and measurements."""
    lines = ["| | goal | median | quartiles | |", "|---|---|---|---|---|"]
    for each in verdicts:
        lines.append(
            f"| {each.what} | {_goal(each)} | {_number(each.measured.median)} |"
            f" {_quartiles(each.measured)} | {each.met} |"
        )
    return "\n".join(lines)


def _quartiles(measured: Spread) -> str:
    """What lies between them, if there were so many samples."""
    if measured.num_samples < 3:
        return ("counted", "one run", "two runs")[measured.num_samples]
    return f"{_number(measured.low)} to {_number(measured.high)}"


def _goal(verdict: Verdict) -> str:
    """A goal with its direction."""
    if verdict.goal is None:
        return ""
    sign = ("<", ">") if verdict.strict else ("≤", "≥")
    return f"{sign[verdict.least]} {_number(verdict.goal)}"


def _number(x: float) -> str:
    """Two decimals for ratios, none for counts."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.2f}"


def _times(data: Mapping[str, Any]) -> Iterator[str]:
    """The medians themselves, in milliseconds."""
    for part, title in (
        ("clip", "Norm and clip"), ("steps", "Steps"), ("backprop", "Train steps"),
        ("scopes", "Scopes"), ("cpp", "Memory"), ("compile", "Compilation"),
    ):  # fmt: skip
        found = verdicts.cases(data, part)
        names = list(dict.fromkeys(name for case in found for name in case["rows"]))
        if found:
            lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            for case_name, case in data["parts"][part].items():
                cells = " | ".join(_cell(case["rows"].get(name)) for name in names)
                lines.append(f"| {case_name} | {cells} |")
            text = "\n".join(lines)
            yield f"### {title}, milliseconds\n\n{APART}\n\n{text}\n"


def _cell(row: Mapping[str, Any] | None) -> str:
    """The median of a contender, or that it refused."""
    if row is None or not row.get("seconds"):
        return "refuses" if row and "refuses" in row else ""
    return f"{1e3 * spread(row['seconds']).median:.4g}"


def _errors(data: Mapping[str, Any]) -> str:
    """The relative errors against float64."""
    lines = []
    names = ("optclip", "optax", "PyTorch", "TensorFlow")
    for part in ("clip", "scopes", "steps", "backprop"):
        for case_name, case in data["parts"].get(part, {}).items():
            cells = [case["rows"].get(name, {}).get("error", "") for name in names]
            texts = [f"{float(x):.1e}" if x != "" else "" for x in cells]
            lines.append(f"| {case_name} | {' | '.join(texts)} |")
    if not lines:
        return ""
    head = f"| | {' | '.join(names)} |\n{'|---' * 5}|"
    return "\n".join([f"### Errors\n\n{ERRORS}\n", head, *lines, ""])


def write(files: Sequence[Path], path: Path) -> None:
    """Make the page and its pictures."""
    datas = [results.read(file) for file in files]
    images = {
        data["machines"][0]["backend"]: [
            str(each.relative_to(path.parent))
            for each in plots.save(data, path.parent / "images")
        ]
        for data in datas
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(datas, images))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    write(arguments.files, arguments.page)


if __name__ == "__main__":
    main()
