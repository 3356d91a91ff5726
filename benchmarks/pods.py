"""Clip and AdamW on pods of TPUs, compiled ahead of time: no TPU is there, none runs.

    .nox/tpu/bin/python -m benchmarks.pods            # minutes: the table of the page
    .nox/tpu/bin/python -m benchmarks.pods --saved    # the table again from the numbers

Shapes alone are given, of bfloat16 gradients and parameters, each leaf split over up to
256 chips (FSDP). What is told is of the compiled program, for one chip: its memory by
XLA's own account, its bytes counted from the text. Each row is a process of its own, so that no compile profits from another's.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import optax

import optclip
from benchmarks import ahead_of_time, machine, results, trees

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "pods.json"
PAGE = ROOT / "docs" / "at_scale.md"
BEGIN, END = "<!-- pods: made by python -m benchmarks.pods -->", "<!-- /pods -->"
CLIPS = {
    "none": optax.identity(),
    "optclip": optclip.clip_by_global_norm(1.0),
    "optax": optax.clip_by_global_norm(1.0),
}
TREES = {
    # A vocabulary that 256 chips divide, as is usual on them.
    "GPT-2 124M": trees.gpt2(768, 12, 50_432, 1024),
    "Llama 7B": trees.llama(4096, 32, 11_008, 32_000),
    "Llama 70B": trees.llama(8192, 80, 28_672, 32_000),
}
# 4, 16 and 256 chips and a whole pod, the largest that the compiler describes.
CHIPS = ("v5p:2x2x1", "v5p:2x2x4", "v5p:4x8x8", "v5p:16x20x28")
PLACES = [
    *((name, topology) for name in ("GPT-2 124M", "Llama 7B") for topology in CHIPS),
    ("Llama 70B", "v5p:4x8x8"),  # how it grows with leaves
]


def row(name: str, topology: str, clip: str) -> dict[str, Any]:
    """What the compiled step of one clip says of itself."""
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = ahead_of_time.mesh_of(topology)
    shapes = trees.typed(TREES[name], "bf16")
    starts = [time.perf_counter()]
    lowered = ahead_of_time.lowered(mesh, shapes, CLIPS[clip])
    starts.append(time.perf_counter())
    program = lowered.compile()
    starts.append(time.perf_counter())
    text = program.as_text()
    memory = program.memory_analysis()
    return {
        "tree": name,
        "leaves": len(jax.tree.leaves(shapes)),
        "topology": topology,
        "chips": mesh.size,
        "clip": clip,
        "collectives": Counter(kind for _, kind in ahead_of_time.collectives(text)),
        "branches": text.count(" conditional("),
        "moved": ahead_of_time.moved(program),
        "counted": ahead_of_time.accessed(program),
        "gradients": trees.nbytes(shapes) / mesh.shape["fsdp"],
        "temporaries": memory.temp_size_in_bytes,
        "traced": starts[1] - starts[0],
        "compiled": starts[2] - starts[1],
    }


def measured() -> dict[str, Any]:
    found = []
    for name, topology in PLACES:
        for clip in CLIPS:
            command = [sys.executable, "-m", "benchmarks.pods", "--row"]
            done = subprocess.run(
                [*command, name, topology, clip], check=True, stdout=subprocess.PIPE
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], flush=True)
    jax.config.update("jax_platforms", "cpu")
    return {**machine.moment(), "machine": machine.describe(), "rows": found}


def table(data: dict[str, Any]) -> str:
    """A line for each tree and number of chips: unclipped / optclip / optax."""
    lines = [
        "| leaves of | gradients on a chip | chips | all-reduces | bytes / unclipped"
        " | temporaries | compiled in |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, topology in PLACES:
        plain, ours, theirs = found = [
            r
            for clip in CLIPS
            for r in data["rows"]
            if (r["tree"], r["topology"], r["clip"]) == (name, topology, clip)
        ]
        assert {kind for r in found for kind in r["collectives"]} <= {"all-reduce"}
        counts = [str(r["collectives"].get("all-reduce", 0)) for r in found]
        shares = [f"{r['moved'] / plain['moved']:.3f}" for r in (ours, theirs)]
        rooms = [f"{r['temporaries'] / 1e6:.1f}" for r in found]
        times = [f"{r['compiled']:.0f}" for r in found]
        lines.append(
            f"| {name}, {plain['leaves']} | {plain['gradients'] / 1e6:,.1f} MB"
            f" | {plain['chips']:,} | {' / '.join(counts)} | {' / '.join(shares)}"
            f" | {' / '.join(rooms)} MB | {' / '.join(times)} s |"
        )
    told = data["machine"]
    versions = ", ".join(f"{k} {told['versions'][k]}" for k in ("jax", "optax"))
    where = f"{told['cpu']}, {told['cores']} cores, {versions}, {data['date']}"
    return "\n".join([*lines, "", f"Compiled on {where}; nothing was run."])


def write(data: dict[str, Any]) -> None:
    """Put the table between its marks on the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(data)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.pods")
    parser.add_argument("--saved", action="store_true", help="compile nothing")
    parser.add_argument("--row", nargs=3, help="one: tree, topology, clip")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(*options.row)))
        return
    if not options.saved:
        OUT.write_text(json.dumps(results.rounded(measured()), indent=1) + "\n")
    write(json.loads(OUT.read_text()))


if __name__ == "__main__":
    main()
