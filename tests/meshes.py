"""Every transformation on every mesh, beside one device: what they differ by.

    python -m tests.meshes    # all of them, minutes: a table

Under jit with Auto and Explicit axes, and inside shard_map; with all leaves split, some,
and none. Leaves have unequal norms, so that a sum over one device alone is another one.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from tests import registry

MESHES = {"8": (8,), "2x4": (2, 4), "2x2x2": (2, 2, 2)}
MODES = ("auto", "explicit", "shard_map")
PLACEMENTS = ("split", "mixed", "whole")
# A user's scope need not work here: the one of the registry has keys of one leaf each.
ENTRIES = {entry.id: entry for entry in registry.ENTRIES if entry.id != "user-scope"}
# A norm over axes must be told in shard_map how leaves are split: nothing else says it.
BY_AXIS = ("norm-axis", "rms-axis", "units")
# Where the usual threshold clips nothing of these leaves.
THRESHOLDS = {"average-norm": 0.02}


class Case(NamedTuple):
    """One cell of the matrix."""

    entry: str
    shape: str
    placement: str
    mode: str


class Found(NamedTuple):
    """What an update returned, what was recorded, and how often devices talked."""

    updates: Any
    metrics: dict[str, Any]
    collectives: int


def every_case() -> list[Case]:
    return list(
        itertools.starmap(Case, itertools.product(ENTRIES, MESHES, PLACEMENTS, MODES))
    )


def a_quarter() -> list[Case]:
    """All of the mesh of two axes with some leaves split, of the others one in seven."""
    found = every_case()
    usual = [case for case in found if (case.shape, case.placement) == ("2x4", "mixed")]
    rest = [case for case in found if case not in usual]
    # Seven is prime to the number of cases an entry has, so that all kinds come up.
    return usual + rest[::7]


def gradients() -> Any:
    """Leaves that all meshes split evenly, of norms from far below 2 to far above."""
    rng = np.random.default_rng(0)
    shapes = {"bias": (8,), "kernel": (8, 16), "out": (16, 8)}
    sizes = {"bias": 0.01, "kernel": 1.0, "out": 5.0}
    return {
        key: jnp.asarray(rng.normal(size=shape) * sizes[key], jnp.float32)
        for key, shape in shapes.items()
    }


def mesh_of(case: Case) -> Any:
    kind = AxisType.Explicit if case.mode == "explicit" else AxisType.Auto
    shape = MESHES[case.shape]
    names = ("data", "model", "stage")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def specs_of(case: Case, names: tuple[str, ...]) -> dict[str, Any]:
    """Kernels split both ways where the mesh has two axes, the first over two of three."""
    rows, columns = (names[0], *names[2:]), names[1] if len(names) > 1 else None
    return {
        "split": {
            "bias": P(names[0]),
            "kernel": P(rows, columns),
            "out": P(columns, rows),
        },
        "mixed": {"bias": P(), "kernel": P(rows, columns), "out": P(None, names[0])},
        "whole": {"bias": P(), "kernel": P(), "out": P()},
    }[case.placement]


def make(name: str, **more: Any) -> Any:
    return ENTRIES[name].make(THRESHOLDS.get(name), **more)


def update_of(tx: Any) -> Any:
    def update(tree: Any) -> Any:
        updates, state = tx.update(tree, tx.init(tree))
        return updates, optclip.metrics(state)

    return update


def on_one_device(name: str) -> Found:
    return Found(*jax.jit(update_of(make(name)))(gradients()), 0)


def on_a_mesh(case: Case) -> Found:
    mesh = mesh_of(case)
    specs, tree = specs_of(case, mesh.axis_names), gradients()
    if case.mode == "shard_map":
        more = {"axis_name": specs} if case.entry in BY_AXIS else {}
        update = jax.jit(
            jax.shard_map(
                update_of(make(case.entry, **more)),
                mesh=mesh, in_specs=(specs,), out_specs=(specs, P()),
            )
        )  # fmt: skip
    else:
        update = jax.jit(update_of(make(case.entry)))
        places = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
        tree = jax.device_put(tree, places)
    compiled = update.lower(tree).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    return Found(*compiled(tree), text.count(" all-reduce("))


def is_placed_as_told(case: Case, updates: Any) -> bool:
    mesh = mesh_of(case)
    specs = specs_of(case, mesh.axis_names)
    return all(
        x.sharding.is_equivalent_to(NamedSharding(mesh, specs[key]), x.ndim)
        for key, x in updates.items()
    )


def ulps_between(found: Any, expected: Any) -> float:
    """The largest distance, in units of the last place of each expected number."""
    worst = 0.0
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        unit = np.spacing(np.abs(np.asarray(b, np.float32))).astype(np.float64)
        apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / unit
        worst = max(worst, float(np.max(apart, initial=0)))
    return worst


def main() -> None:
    print(
        "| transformation | mesh | mode | worst ULP of updates | of metrics | all-reduces |"
    )
    print("|---|---|---|---|---|---|")
    for name in ENTRIES:
        alone = on_one_device(name)
        for shape, mode in itertools.product(MESHES, MODES):
            found = [on_a_mesh(Case(name, shape, each, mode)) for each in PLACEMENTS]
            updates = max(ulps_between(f.updates, alone.updates) for f in found)
            metrics = max(ulps_between(f.metrics, alone.metrics) for f in found)
            counts = " / ".join(str(f.collectives) for f in found)
            print(
                f"| {name} | {shape} | {mode} | {updates:.0f} | {metrics:.0f} | {counts} |",
                flush=True,
            )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
