"""A clip and AdamW compiled for TPUs that need not be there: the compiler alone runs."""

import math
import os
import re
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

# What only names a thing, and the branch: what is in it is not run.
UNMOVED = ("parameter", "get-tuple-element", "tuple", "bitcast", "copy", "conditional")


def mesh_of(topology: str, kind: AxisType = AxisType.Auto, most: int = 256) -> Mesh:
    """All chips of a topology: leaves split over `most` of them, the rest replicas."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    split = min(most, len(found.devices))
    devices = np.array(found.devices).reshape(-1, split)
    return Mesh(devices, ("replica", "fsdp"), axis_types=(kind, kind))


def placed(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Split over the first axis that divides evenly, as FSDP does; else whole."""
    chips = mesh.shape["fsdp"]
    first = next((i for i, n in enumerate(shape) if n and n % chips == 0), None)
    spec = P(*("fsdp" if i == first else None for i in range(len(shape))))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def lowered(mesh: Mesh, shapes: Any, clip: optax.GradientTransformation) -> Any:
    """A donated step of AdamW behind the clip; `shapes` are those of the gradients."""
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(updates: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        tree, state = (
            jax.tree.map(lambda x: placed(mesh, x.shape, x.dtype), found)
            for found in (shapes, jax.eval_shape(tx.init, shapes))
        )
        return jax.jit(step, donate_argnums=(1, 2)).lower(tree, state, tree)


def accessed(program: Any) -> float:
    """The bytes that a step reads and writes on one chip, by XLA's own account."""
    return program.cost_analysis()["bytes accessed"]


def moved(program: Any) -> int:
    """Bytes that the operations of a step read and write on one chip, where it is run.

    Neither the branch for norms out of range, which is not, nor copies into the memory
    on the chip: XLA makes them ahead of a reading, in its place, and counts both.
    """
    text = program.as_text()
    sizes: dict[str, int] = {}
    total = 0
    for line in text[text.index("ENTRY ") :].splitlines():
        found = re.match(r"\s*(?:ROOT )?%?(\S+) = (.*?) ([a-z\-]+)\((.*)", line)
        if found is None:
            continue
        name, shapes, kind, rest = found.groups()
        sizes[name] = _nbytes(shapes)
        if kind not in UNMOVED and not kind.endswith(("-start", "-done")):
            read = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
            total += sizes[name] + sum(sizes.get(each, 0) for each in read)
    return total


def _nbytes(shapes: str) -> int:
    """Of all arrays in the type of an operation's result."""
    arrays = re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", shapes)
    return sum(
        max(int(bits or 8) // 8, 1) * math.prod(map(int, filter(None, dims.split(","))))
        for bits, dims in arrays
    )


def collectives(text: str) -> list[tuple[str, str]]:
    """What the devices say to each other: the shapes of each result, and the kind."""
    names = "|".join(COLLECTIVES)
    return re.findall(rf"= (\S.*?) ({names})(?:-start)?\(", text)
