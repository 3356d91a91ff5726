"""What most readers of the page want to know, before its tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.timing import ratio, spread
from benchmarks.verdicts import cases, seconds

SOURCES = ("made", "arguments")
CLIPS = ("optclip", "optax")
STEPS = """
How much longer an AdamW step of GPT-2 (124M) takes with a clip by global norm than without. Gradients *in the step* are computed in the same `jax.jit`, the usual case; *as arguments* they come from another one and have to be read from memory anew.
""".strip()
COMPILATION = "Seconds until a clip alone is compiled, float32: by global norm, and of each leaf by its root mean square. Each pair is of one machine. From machine to machine seconds differ by two to three and their ratio by up to two, so compare along rows only."


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """The two short tables, of what was measured."""
    for text, head, rows in (
        (STEPS, _STEPS_HEAD, list(_steps(data))),
        (COMPILATION, _COMPILATION_HEAD, list(_compilation(data))),
    ):
        if rows:
            yield "\n".join([f"{text}\n", head, *rows, ""])


_STEPS_HEAD = (
    "| | in the step: optclip | optax | as arguments: optclip | optax |\n"
    "|---|---|---|---|---|"
)
_COMPILATION_HEAD = (
    "| | global: optclip | optax | by leaf: optclip | optax |\n|---|---|---|---|---|"
)


def _steps(data: Mapping[str, Any]) -> Iterator[str]:
    """A row for each dtype."""
    for dtype in ("f32", "bf16", "f16", "mixed"):
        cells = []
        for source in SOURCES:
            labels = {"optimizer": "adamw", "tree": "gpt2", "gradients": source}
            found = cases(data, "steps", dtype=dtype, **labels)
            cells += [_longer(found, clip) for clip in CLIPS]
        if any(cells):
            yield f"| {dtype} | {' | '.join(cells)} |"


def _longer(found: list[Any], clip: str) -> str:
    """The median ratio of the clipped step to the same step unclipped, in percent."""
    for case in found:
        ours, plain = (seconds(case["rows"], name) for name in (clip, "unclipped"))
        if ours and plain:
            return f"{round(100 * (ratio(ours, plain).median - 1)):+d} %"
    return ""


def _compilation(data: Mapping[str, Any]) -> Iterator[str]:
    """A row for each tree and number of leaves."""
    found = cases(data, "compile", what="clip", dtype="f32")
    for case in sorted(found, key=lambda c: (int(c["leaves"]), c["tree"])):
        tree = {"tree": case["tree"], "leaves": case["leaves"], "dtype": "f32"}
        both = [case, *cases(data, "compile", what="rms", **tree)]
        cells = [_median(each, name) for each in both for name in CLIPS]
        cells += [""] * (4 - len(cells))
        yield f"| {case['leaves']} leaves, {case['tree']} | {' | '.join(cells)} |"


def _median(case: Any, name: str) -> str:
    samples = seconds(case["rows"], name)
    return f"{spread(samples).median:.1f}" if samples else ""
