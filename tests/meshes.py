"""Every transformation on every mesh, beside one device: what they differ by.

    python -m tests.meshes    # all of them, minutes: a table

Under jit with Auto and Explicit axes, and inside shard_map; with all leaves split, some,
and none. Leaves have unequal norms, so that a sum over one device alone is another one.
"""

import functools
import itertools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds
from tests import registry

MESHES = {"8": (8,), "2x4": (2, 4), "2x2x2": (2, 2, 2)}
MODES = ("auto", "explicit", "shard_map")
PLACEMENTS = ("split", "mixed", "whole")
# A user's scope need not work here: the one of the registry has keys of one leaf each.
REGISTRY = {entry.id: entry for entry in registry.ENTRIES if entry.id != "user-scope"}
# Where the usual threshold clips nothing of these leaves.
THRESHOLDS = {"average-norm": 0.02}


def _masked(**more: Any) -> Any:
    counted = {"bias": True, "kernel": True, "out": False}
    clipped = {"bias": True, "kernel": False, "out": True}
    return optclip.clip_by_global_norm(
        2.0, norm_mask=counted, clip_mask=clipped, **more
    )


def _skip(**more: Any) -> Any:
    clip = optclip.clip_by_global_norm(2.0, **more)
    return optclip.skip(clip, when=thresholds.quantile(0.9, 8))


CLIPS: dict[str, Any] = {
    **{
        name: functools.partial(entry.make, THRESHOLDS.get(name))
        for name, entry in REGISTRY.items()
    },
    "masked": _masked,
    "drop": functools.partial(optclip.clip_by_global_norm, 2.0, nonfinite="drop"),
    "skip": _skip,
}
# What the second step depends on the first for.
LEARNED: dict[str, Any] = {
    "ema by unit": functools.partial(
        optclip.clip_by, thresholds.ema(0.5, warmup=1), over=optclip.units()
    ),
    "quantile by unit": functools.partial(
        optclip.clip_by, thresholds.quantile(0.5, 4), over=optclip.units()
    ),
    "share of parameters": functools.partial(optclip.recipes.agc, 0.5),
    "second moment": functools.partial(
        optclip.clip_by_value, thresholds.second_moment(0.5, warmup=0)
    ),
    "largest element": functools.partial(
        optclip.clip_by_value, thresholds.ema_of_max(0.5)
    ),
    "moment": functools.partial(optclip.clip_by_value, thresholds.moment(decay=0.5)),
    "skip": _skip,
}
# A norm over axes must be told in shard_map how leaves are split: nothing else says it.
BY_AXIS = (
    "norm-axis",
    "rms-axis",
    "units",
    "ema by unit",
    "quantile by unit",
    "share of parameters",
)


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


def room(case: Case) -> int:
    """How far from one device it may be, in units in the last place.

    Under jit XLA on CPU adds small leaves one by one, in an order that depends on the
    CPU: 4 were seen. A plain sum, without the root that halves its error, costs one more.
    """
    if case.mode != "shard_map":
        return 8
    return 3 if case.entry == "norm-l1" else 2


def every_case() -> list[Case]:
    return list(
        itertools.starmap(Case, itertools.product(CLIPS, MESHES, PLACEMENTS, MODES))
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


def make(name: str, specs: Any = None) -> Any:
    """The transformation, told by `specs` how leaves are split if it has to be."""
    more = {"axis_name": specs} if specs and name in BY_AXIS else {}
    return (CLIPS | LEARNED)[name](**more)


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
        update = jax.jit(
            jax.shard_map(
                update_of(make(case.entry, specs)),
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
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(all="ignore"):
            apart = np.abs(np.float64(a) - np.float64(b)) / np.spacing(np.abs(b))
        apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
        worst = max(worst, float(np.max(apart, initial=0)))
    return worst


def main() -> int:
    """Print the table; 1 if anything is further off than it may be."""
    print(
        "| transformation | mesh | mode | worst ULP of updates | of metrics | all-reduces |"
    )
    print("|---|---|---|---|---|---|")
    far = 0.0
    for name in CLIPS:
        alone = on_one_device(name)
        for shape, mode in itertools.product(MESHES, MODES):
            cases = [Case(name, shape, each, mode) for each in PLACEMENTS]
            found = [on_a_mesh(case) for case in cases]
            updates = max(ulps_between(f.updates, alone.updates) for f in found)
            metrics = max(ulps_between(f.metrics, alone.metrics) for f in found)
            far = max(far, max(updates, metrics) - room(cases[0]))
            counts = " / ".join(str(f.collectives) for f in found)
            print(
                f"| {name} | {shape} | {mode} | {updates:.0f} | {metrics:.0f} | {counts} |",
                flush=True,
            )
    return int(far > 0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
