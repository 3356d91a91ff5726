"""Clip and AdamW on pods of TPUs, compiled ahead of time: no TPU is there, none runs.

    .venv-tpu/bin/python -m benchmarks.pods            # minutes: the tables of the page
    .venv-tpu/bin/python -m benchmarks.pods --saved    # the tables again from the numbers

Shapes alone are given: the trees of GPT-2 and of a Llama of 7B parameters, each leaf
split over all chips (FSDP), bfloat16 gradients and parameters, AdamW. What is told is
of the compiled program, by XLA's own account, for one chip.
"""

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optclip
from benchmarks import machine, trees

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "pods.json"
PAGE = ROOT / "docs" / "at_scale.md"
BEGIN, END = "<!-- pods: made by python -m benchmarks.pods -->", "<!-- /pods -->"
# 4, 16 and 256 chips, and the largest slice that was found to compile.
TOPOLOGIES = ("v5e:2x2", "v5e:4x4", "v5e:16x16", "v5p:16x16x16")
CLIPS = {
    "unclipped": optax.identity(),
    "optclip": optclip.clip_by_global_norm(1.0),
    "optax": optax.clip_by_global_norm(1.0),
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


def llama(width: int, blocks: int, hidden: int, vocabulary: int) -> Any:
    """The parameters of a Llama; (4096, 32, 11008, 32000) are the 291 leaves of 7B."""
    square, up = (width, width), (width, hidden)

    def block() -> Any:
        attention = dict.fromkeys(("wq", "wk", "wv", "wo"), square)
        feed_forward = {"w1": up, "w2": up[::-1], "w3": up}
        return attention | feed_forward | {"norm_1": (width,), "norm_2": (width,)}

    head = {"embed": (vocabulary, width), "head": (width, vocabulary), "norm": (width,)}
    return head | {"blocks": [block() for _ in range(blocks)]}


TREES = {
    # A vocabulary that 256 chips divide, as is usual on them.
    "GPT-2, 124M": trees.gpt2(768, 12, 50_432, 1024),
    "Llama, 7B": llama(4096, 32, 11_008, 32_000),
}


def placed(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Split over the first axis that all chips divide, if there is one."""
    found = [size % mesh.size == 0 and size > 0 for size in shape]
    first = found.index(True) if any(found) else None
    spec = P(*("chips" if i == first else None for i in range(len(shape))))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(mesh: Mesh, shapes: Any, clip: Any) -> tuple[Any, float]:
    """The program of a step, and the seconds that XLA took."""
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(updates: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        tree = jax.tree.map(
            lambda shape: placed(mesh, shape, jnp.bfloat16),
            shapes,
            is_leaf=trees.is_shape,
        )
        state = jax.tree.map(
            lambda x: placed(mesh, x.shape, x.dtype), jax.eval_shape(tx.init, tree)
        )
        lowered = jax.jit(step, donate_argnums=(1, 2)).lower(tree, state, tree)
        start = time.perf_counter()
        return lowered.compile(), time.perf_counter() - start


def row(topology: str, name: str, clip: str) -> dict[str, Any]:
    """What the compiled step of one clip says of itself."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = Mesh(np.array(found.devices), ("chips",), axis_types=(AxisType.Auto,))
    program, seconds = compiled(mesh, TREES[name], CLIPS[clip])
    calls = re.findall(
        rf"= (\S.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text()
    )
    memory = program.memory_analysis()
    return {
        "topology": topology,
        "chips": mesh.size,
        "tree": name,
        "clip": clip,
        "collectives": dict(Counter(kind for _, kind in calls)),
        "bytes": program.cost_analysis()["bytes accessed"],
        "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "seconds": seconds,
    }


def rows() -> Iterator[dict[str, Any]]:
    for topology in TOPOLOGIES:
        for name in TREES:
            for clip in CLIPS:
                found = row(topology, name, clip)
                print(json.dumps(found), flush=True)
                yield found


def table(data: dict[str, Any]) -> str:
    """A row for each topology, tree and clip; bytes over those of the step unclipped."""
    lines = [
        "| chips | tree | clip | collectives | bytes accessed | temporaries | compiled in |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = {
        (r["topology"], r["tree"]): r for r in data["rows"] if r["clip"] == "unclipped"
    }
    for r in data["rows"]:
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(r["collectives"].items()))
        share = r["bytes"] / plain[r["topology"], r["tree"]]["bytes"]
        size = (
            f"{r['bytes'] / 1e6:,.1f} MB"
            if r["clip"] == "unclipped"
            else f"x {share:.3f}"
        )
        lines.append(
            f"| {r['chips']}, {r['topology'].partition(':')[0]} | {r['tree']} | {r['clip']} | {calls or 'none'}"
            f" | {size} | {r['temporaries'] / 1e3:,.0f} kB | {r['seconds']:.1f} s |"
        )
    told = data["machine"]
    where = ", ".join(f"{k} {told['versions'][k]}" for k in ("jax", "optax"))
    lines.append(
        f"\nCompiled on {told['cpu']}, {told['cores']} cores, {where}, {data['date']}; nothing was run."
    )
    return "\n".join(lines)


def write(data: dict[str, Any]) -> None:
    """Put the table between its marks on the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(data)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.pods")
    parser.add_argument("--saved", action="store_true", help="compile nothing")
    if not parser.parse_args().saved:
        jax.config.update("jax_enable_compilation_cache", False)
        data = {**machine.moment(), "machine": machine.describe(), "rows": list(rows())}
        OUT.write_text(json.dumps(data, indent=1) + "\n")
    write(json.loads(OUT.read_text()))


if __name__ == "__main__":
    main()
