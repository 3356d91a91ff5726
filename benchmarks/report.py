"""The page of performance from saved measurements.

python -m benchmarks.report benchmarks/results/cpu.json [gpu.json] [--page PAGE]
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, plots, results
from benchmarks.goals import Verdict
from benchmarks.timing import spread

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"

# Title, what the numbers are, and how they come from the data.
TABLES: tuple[tuple[str, str, Callable[[Any], Iterator[Verdict]]], ...] = (
    ("Clip alone, over its floor", "Time of the donated clip over that of a plain norm and a plain scale, two executables on the same buffers.", goals.over_floor),
    ("Clip alone: optax", "Time of optax over that of optclip.", goals.over_optax),
    ("Clip alone: PyTorch", "Time of `clip_grad_norm_(foreach=True)` over that of optclip.", lambda d: goals.over_other(d, "PyTorch")),
    ("Clip alone: TensorFlow", "Time of a `tf.function` of `tf.clip_by_global_norm`, which cannot work in place, over that of optclip.", lambda d: goals.over_other(d, "TensorFlow")),
    ("Optimizer steps", "Time of the step clipped by optclip over that of the same step unclipped. *Made* gradients are computed in the step.", goals.steps),
    ("Optimizer steps: optax", "The same clipped by optax.", lambda d: goals.steps(d, "optax")),
    ("Optimizer steps: PyTorch", "`clip_grad_norm_` and its fused AdamW over this AdamW alone.", lambda d: goals.steps(d, "PyTorch")),
    ("A real train step", "Forward, backward and AdamW of a small GPT-2, clipped over unclipped.", goals.backprop),
    ("Compile time: optax", "Seconds to trace, lower and compile with optax over those with optclip.", goals.compiling),
    ("Compile time: growth", "Compile seconds at the most leaves over those at the fewest.", goals.growth),
    ("Many leaves, over a jitted identity", "Time of the donated clip over that of a function that returns its arguments: what JAX takes to pass so many.", goals.over_identity),
    ("Overflow safety", "Time of optclip's norm over that of the plain float32 norm, which overflows.", goals.safety),
    ("Recording", "Time of the transformation with its record over that with `record=False`.", goals.recording),
    ("Other scopes, over their floor", "As for the clip alone, with the norms of the scope. By value the floor is one `jnp.clip`.", goals.scopes),
    ("Other scopes: the nearest elsewhere", "Time of optax's `clip_by_block_rms`, `clip`, or `partition` of global clips, or TensorFlow's `clip_by_norm` (not in place), over that of optclip. Nothing elsewhere is nearer.", goals.scopes_nearest),
    ("Extra memory", "Temporary memory of the clip in percent of the gradients, by XLA's account. Small trees have no goal: a few kB are percents there.", goals.memory),
    ("Page faults", "Minor page faults of one clip.", goals.faults),
    ("Bandwidth", "Bytes that the clip must move (3 x the gradients) per second, over what `x + 1` in place moves.", goals.bandwidth),
    ("Kernels", "Fusions in the compiled clip; each is a kernel.", goals.kernels),
)  # fmt: skip


def page(files: Sequence[Mapping[str, Any]], images: Mapping[str, list[str]]) -> str:
    """The whole page; images are by backend."""
    parts = [
        "# How fast it is\n",
        "Made by `python -m benchmarks`, which measures all of this again; the samples are"
        " in `benchmarks/results`. Contenders take turns in random order on the same"
        " donated buffers of standard normal numbers, at a threshold of 0.4 of their norm."
        " A ratio is the median of ratios by round, with its quartiles; the first round is"
        " dropped. In each table the worst row comes first.\n",
    ]
    if not any(data["machine"]["backend"] == "gpu" for data in files):
        parts.append("**Not measured on GPU.**\n")
    for data in files:
        parts += _section(data, images.get(data["machine"]["backend"], []))
    return "\n".join(parts)


def _section(data: Mapping[str, Any], images: list[str]) -> Iterator[str]:
    """What was measured on one machine."""
    yield f"## On {data['machine']['backend'].upper()}\n"
    yield _machine(data)
    tables = [(t, text, goals.worst_first(make(data))) for t, text, make in TABLES]
    yield _misses(tables)
    for image in images:
        yield f"![{_caption(image)}]({image})\n"
    for title, text, verdicts in tables:
        if verdicts:
            yield f"### {title}\n\n{text}\n\n{_verdicts(verdicts)}\n"
    yield from _times(data)
    yield _errors(data)


def _caption(image: str) -> str:
    """What a picture shows."""
    return "seconds to compile" if "compile" in image else "clip, others over optclip"


def _machine(data: Mapping[str, Any]) -> str:
    """The machine, the versions, and how busy it was."""
    machine = data["machine"]
    known = {name: v for name, v in machine["versions"].items() if v}
    missing = [name for name, v in machine["versions"].items() if not v]
    found = [case for part in data["parts"].values() for case in part.values()]
    loads, dates = [c["load"] for c in found], sorted(c["date"] for c in found)
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; device:"
        f" {machine['device']}; {machine['platform']}; Python {machine['python']},"
        f" {', '.join(f'{name} {v}' for name, v in known.items())}."
        f" From {dates[0]} to {dates[-1]}, load average {min(loads)} to {max(loads)}.",
    ]
    if missing:
        lines.append(f"Not installed, so left out: {', '.join(missing)}.")
    if machine["backend"] == "gpu":
        lines.append("TensorFlow is compared on the CPU only.")
    if any(case["small"] for case in found):
        lines.append("**A smoke test on tiny trees: these numbers mean nothing.**")
    return "\n".join(lines) + "\n"


def _misses(tables: Sequence[tuple[str, str, list[Verdict]]]) -> str:
    """How many goals are met, and those that are not."""
    with_goal = [(t, v) for t, _, found in tables for v in found if v.goal is not None]
    short = sorted((x for x in with_goal if x[1].miss > 1), key=lambda x: -x[1].miss)
    text = f"{len(with_goal) - len(short)} of {len(with_goal)} goals are met."
    if not short:
        return text + "\n"
    lines = [
        f"| {t} | {v.what} | {_goal(v)} | {_number(v.measured.median)} |"
        for t, v in short
    ]
    head = "| table | row | goal | measured |\n|---|---|---|---|"
    return "\n".join([text + " Those that fall short:\n", head, *lines, ""])


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    """A table of goals and measurements."""
    lines = ["| | goal | median | quartiles | |", "|---|---|---|---|---|"]
    for each in verdicts:
        low, high = (_number(x) for x in each.measured[1:])
        lines.append(
            f"| {each.what} | {_goal(each)} | {_number(each.measured.median)} |"
            f" {low} to {high} | {each.met} |"
        )
    return "\n".join(lines)


def _goal(verdict: Verdict) -> str:
    """A goal with its direction."""
    if verdict.goal is None:
        return ""
    return f"{'≥' if verdict.least else '≤'} {_number(verdict.goal)}"


def _number(x: float) -> str:
    """Two decimals for ratios, none for counts."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.2f}"


def _times(data: Mapping[str, Any]) -> Iterator[str]:
    """The medians themselves, in milliseconds."""
    for part, title in (
        ("clip", "Norm and clip"), ("steps", "Steps"), ("backprop", "Train steps"),
        ("scopes", "Scopes"), ("cpp", "Memory"), ("compile", "Compilation"),
    ):  # fmt: skip
        found = goals.cases(data, part)
        names = list(dict.fromkeys(name for case in found for name in case["rows"]))
        if found:
            lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            for case_name, case in data["parts"][part].items():
                cells = " | ".join(_cell(case["rows"].get(name)) for name in names)
                lines.append(f"| {case_name} | {cells} |")
            yield f"### {title}, milliseconds\n\n" + "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any] | None) -> str:
    """The median of a contender, or that it refused."""
    if row is None or not row.get("seconds"):
        return "refuses" if row and "refuses" in row else ""
    return f"{1e3 * spread(row['seconds']).median:.4g}"


def _errors(data: Mapping[str, Any]) -> str:
    """The relative errors against float64."""
    lines = []
    names = ("optclip", "optax", "PyTorch", "TensorFlow")
    for case_name, case in _checked(data):
        key = "norm_error" if case.get("what") == "norm" else "clipped_error"
        cells = [case["rows"].get(name, {}).get(key, "") for name in names]
        texts = [x if isinstance(x, str) else f"{x:.1e}" for x in cells]
        lines.append(f"| {case_name} | {' | '.join(texts)} |")
    if not lines:
        return ""
    head = f"| | {' | '.join(names)} |\n{'|---' * 5}|"
    text = (
        "Relative error of the norm, and of the norm of the clipped tree, by float64."
    )
    return "\n".join([f"### Errors\n\n{text}\n", head, *lines, ""])


def _checked(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The cases whose output was judged."""
    parts = data["parts"]
    return [case for part in ("clip", "scopes") for case in parts.get(part, {}).items()]


def write(files: Sequence[Path], path: Path) -> None:
    """Make the page and its pictures."""
    datas = [results.read(file) for file in files]
    images = {
        data["machine"]["backend"]: [
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
