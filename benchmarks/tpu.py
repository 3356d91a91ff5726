"""Benchmark `tpu`: compile clipping and AdamW for TPUs, without a TPU.

Gradients and parameters are bfloat16, with each leaf sharded over up to 256 chips
(FSDP). Figures are per chip: XLA's memory analysis, and bytes counted in the program
text. Each row has a process of its own, so that no compilation benefits from another.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from benchmarks import results, trees
from benchmarks.timing import Row

KIND = "tpu"
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# Operations that move no data. The branches of a conditional are not counted.
UNMOVED = ("parameter", "get-tuple-element", "tuple", "bitcast", "copy", "conditional")
CLIPS = {
    "none": optax.identity(),
    "optclip": optclip.clip_by_global_norm(1.0),
    "optax": optax.clip_by_global_norm(1.0),
}
TREES = {
    # The vocabulary is padded to a multiple of 256 chips, as usual on TPUs.
    "GPT-2 124M": trees.gpt2(768, 12, 50_432, 1024),
    "Llama 7B": trees.llama(4096, 32, 11_008, 32_000),
    "Llama 70B": trees.llama(8192, 80, 28_672, 32_000),
}
# 4, 16 and 256 chips, and a whole pod, the largest topology that the compiler supports.
CHIPS = ("v5p:2x2x1", "v5p:2x2x4", "v5p:4x8x8", "v5p:16x20x28")
PLACES = [
    *((name, topology) for name in ("GPT-2 124M", "Llama 7B") for topology in CHIPS),
    ("Llama 70B", "v5p:4x8x8"),  # more leaves
]


def mesh_of(topology: str, kind: AxisType = AxisType.Auto, most: int = 256) -> Mesh:
    """Return a mesh of all chips that shards over at most `most`, else replicates."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    devices = np.array(chips).reshape(-1, min(most, len(chips)))
    return Mesh(devices, ("replica", "fsdp"), axis_types=(kind, kind))


def placed(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shard the first axis that divides evenly, as in FSDP, or replicate."""
    chips = mesh.shape["fsdp"]
    first = next((i for i, n in enumerate(shape) if n and n % chips == 0), None)
    spec = P(*("fsdp" if i == first else None for i in range(len(shape))))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def lowered(mesh: Mesh, shapes: Any, clip: optax.GradientTransformation) -> Any:
    """Lower a clipped AdamW step with donated state; `shapes` are the gradients'."""
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(updates: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        tree, state = (
            jax.tree.map(lambda x: placed(mesh, x.shape, x.dtype), unplaced)
            for unplaced in (shapes, jax.eval_shape(tx.init, shapes))
        )
        return jax.jit(step, donate_argnums=(1, 2)).lower(tree, state, tree)


def moved(program: Any) -> int:
    """Return the bytes that the operations of a step read and write on one chip.

    Excludes branches, and copies into on-chip memory: XLA inserts such a copy before an
    operation that reads its result, and would count both.
    """
    text = program.as_text()
    sizes: dict[str, int] = {}
    total = 0
    for line in text[text.index("ENTRY ") :].splitlines():
        operation = re.match(r"\s*(?:ROOT )?%?(\S+) = (.*?) ([a-z\-]+)\((.*)", line)
        if operation is None:
            continue
        name, shapes, kind, rest = operation.groups()
        sizes[name] = _nbytes(shapes)
        if kind not in UNMOVED and not kind.endswith(("-start", "-done")):
            read = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
            total += sizes[name] + sum(sizes.get(each, 0) for each in read)
    return total


def _nbytes(shapes: str) -> int:
    """Return the bytes of all arrays in the type of an operation's result."""
    arrays = re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", shapes)
    return sum(
        max(int(bits or 8) // 8, 1) * math.prod(map(int, filter(None, dims.split(","))))
        for bits, dims in arrays
    )


def collectives(text: str) -> list[tuple[str, str]]:
    """Return the result type and the kind of each collective operation."""
    return re.findall(rf"= (\S.*?) ({COLLECTIVES})(?:-start)?\(", text)


def rows(tiny: bool) -> Iterator[Row]:
    # Keeps this process from searching for a TPU.
    jax.config.update("jax_platforms", "cpu")
    for place in PLACES[:1] if tiny else PLACES:
        for clip in CLIPS:
            command = [sys.executable, "-m", "benchmarks.tpu", *place, clip]
            output = subprocess.check_output(command, text=True)
            yield json.loads(output.splitlines()[-1])


def row(tree: str, topology: str, clip: str) -> Row:
    """Measure the compiled step with one clipping transformation."""
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = mesh_of(topology)
    shapes = trees.typed(TREES[tree], "bfloat16")
    traced = lowered(mesh, shapes, CLIPS[clip])
    start = time.perf_counter()
    program = traced.compile()
    seconds = time.perf_counter() - start
    text = program.as_text()
    return {
        "tree": tree,
        "leaves": len(jax.tree.leaves(shapes)),
        "topology": topology,
        "chips": mesh.size,
        "clip": clip,
        "collectives": Counter(kind for _, kind in collectives(text)),
        "moved": moved(program),
        "gradients": trees.nbytes(shapes) / mesh.shape["fsdp"],
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "compiled": seconds,
    }


def table(rows: Sequence[Row]) -> str:
    """Format a line per tree and number of chips: unclipped / optclip / optax."""
    starts = range(0, len(rows), len(CLIPS))
    return results.table([_line(rows[i : i + len(CLIPS)]) for i in starts])


def _line(rows: Sequence[Row]) -> Row:
    plain, *clipped = rows
    cells = {
        "all-reduces": [str(r["collectives"].get("all-reduce", 0)) for r in rows],
        "bytes / unclipped": [f"{r['moved'] / plain['moved']:.3f}" for r in clipped],
        "temporary memory, MB": [f"{r['temporaries'] / 1e6:.1f}" for r in rows],
        "compile time, s": [f"{r['compiled']:.0f}" for r in rows],
    }
    return {
        "model": f"{plain['tree']}, {plain['leaves']} leaves",
        "gradients per chip": f"{plain['gradients'] / 1e6:,.1f} MB",
        "chips": f"{plain['chips']:,}",
        **{key: " / ".join(each) for key, each in cells.items()},
    }


if __name__ == "__main__":
    print(json.dumps(row(*sys.argv[1:])))
