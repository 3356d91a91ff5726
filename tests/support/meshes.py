"""Every transformation on every mesh, to compare with one device.

Under jit with Auto and Explicit axes, and inside shard_map; with all leaves split,
some, or none. Leaves have unequal norms, so that each device has another sum.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds
from tests.support import helpers, registry

# First the values of the cell in which most can go wrong: a covering array takes them
# where nothing else decides.
MESHES = {"2x4": (2, 4), "8": (8,), "2x2x2": (2, 2, 2)}
MODES = ("shard_map", "auto", "explicit")
PLACEMENTS = ("mixed", "split", "whole")


@dataclasses.dataclass(frozen=True)
class Clip:
    """A transformation that clips some of `gradients`.

    Attributes:
      id: what the tests call it.
      make: takes further options of the clip.
      traits: the kinds of what devices must agree on, each to be tried on every mesh.
      by_axis: whether shard_map must say how leaves are split: nothing else says it of
        a norm over some of their axes.
      roundings: by how many of 1 an element may differ besides.
      of_matrices: whether a matrix has to be whole on one of its sides in shard_map,
        and elsewhere XLA may gather it.
    """

    id: str
    make: Callable[..., Any]
    traits: tuple[str, ...]
    by_axis: bool = False
    roundings: int = 0
    of_matrices: bool = False

    def takes(self, shape: str, placement: str, mode: str) -> bool:
        """Whether it is not refused in shard_map for how matrices are split."""
        if not self.of_matrices or mode != "shard_map" or placement == "whole":
            return True
        # The power iteration wants both sides whole.
        return shape == "8" and self.id != "spectral-norm-by-iteration"


def _of(entry: registry.Entry) -> Clip:
    # Past its usual threshold is none of these leaves.
    threshold = 0.02 if entry.id == "average-norm" else None
    return Clip(
        entry.id,
        lambda **more: entry.make(threshold, **more),
        (entry.scope,),
        by_axis=entry.by_axis,
        roundings=entry.roundings,
        of_matrices=entry.of_matrices,
    )


def _masked(**more: Any) -> Any:
    counted = {"bias": True, "kernel": True, "out": False}
    clipped = {"bias": True, "kernel": False, "out": True}
    return optclip.clip_by(2.0, norm_mask=counted, clip_mask=clipped, **more)


def _skip(**more: Any) -> Any:
    clip = optclip.clip_by_global_norm(2.0, **more)
    return optclip.skip(clip, max_norm=thresholds.quantile(0.9, 8))


def _groups(**more: Any) -> Any:
    """Two leaves of one group are split over different axes if placed `mixed`."""
    groups = {"bias": "a", "kernel": "a", "out": "b"}
    return optclip.clip_by_group_norm({"a": 4.0, "b": 1.0}, groups, **more)


# The groups and the user's scope of the registry have one leaf per key here.
CLIPS = [
    *(_of(e) for e in registry.ENTRIES if e.id not in ("user-scope", "group-norm")),
    Clip("groups", _groups, ("leaf",)),
    Clip("masked", _masked, ("tree",)),
    Clip("skip", _skip, ("tree",)),
]


def _by_unit(rule: Any) -> Callable[..., Any]:
    return lambda **more: optclip.clip_by(rule, over=optclip.units(), **more)


def _by_element(rule: Any) -> Callable[..., Any]:
    return lambda **more: optclip.clip_by_value(rule, **more)


# What the second step depends on the first for. The kind is where the memory lies: per
# slice or element on many devices, or numbers that all devices share.
EMA = thresholds.ema(0.5, warmup=1)
LEARNED = [
    Clip("ema by unit", _by_unit(EMA), ("slices",), True),
    Clip("quantile by unit", _by_unit(thresholds.quantile(0.5, 4)), ("slices",), True),
    Clip(
        "share of parameters",
        lambda **more: optclip.recipes.agc(0.5, **more),
        ("slices",),
        True,
    ),
    Clip(
        "second moment",
        _by_element(thresholds.second_moment(0.5, warmup=0)),
        ("elements",),
    ),
    Clip("moment", _by_element(thresholds.moment(decay=0.5)), ("elements",)),
    Clip("ema of elements", _by_element(EMA), ("elements",)),
    Clip("largest element", _by_element(thresholds.ema_of_max(0.5)), ("numbers",)),
    Clip("skip", _skip, ("numbers",)),
]


class Found(NamedTuple):
    """What an update returned, what was recorded, and the program that did it."""

    updates: Any
    metrics: dict[str, Any]
    program: str


def gradients() -> Any:
    """Leaves that all meshes split evenly, of norms from far below 2 to far above."""
    rng = np.random.default_rng(0)
    shapes = {"bias": (8,), "kernel": (8, 16), "out": (16, 8)}
    sizes = {"bias": 0.01, "kernel": 1.0, "out": 5.0}
    return {
        key: jnp.asarray(rng.normal(size=shape) * sizes[key], jnp.float32)
        for key, shape in shapes.items()
    }


def mesh_of(shape: str, mode: str) -> Any:
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    sizes = MESHES[shape]
    names = ("data", "model", "stage")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def specs_of(placement: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Kernels are split both ways on two axes, their rows over two axes of three."""
    rows, columns = (names[0], *names[2:]), names[1] if len(names) > 1 else None
    return {
        "split": {
            "bias": P(names[0]),
            "kernel": P(rows, columns),
            "out": P(columns, rows),
        },
        "mixed": {"bias": P(), "kernel": P(rows, columns), "out": P(None, names[0])},
        "whole": {"bias": P(), "kernel": P(), "out": P()},
    }[placement]


def made(clip: Clip, specs: Any = None) -> Any:
    """The transformation, told by `specs` how leaves are split if it has to be."""
    return clip.make(**({"axis_name": specs} if specs and clip.by_axis else {}))


def update_of(tx: Any) -> Callable[[Any], Any]:
    """One update from `init` on, with what was recorded of it."""

    def update(tree: Any) -> Any:
        updates, state = tx.update(tree, tx.init(tree))
        return updates, optclip.metrics(state)

    return update


def run_of(tx: Any) -> Callable[[Any], Any]:
    """Three updates in a scan, the second of gradients that are ten times as large."""

    def run(tree: Any) -> Any:
        def step(state: Any, scale: Any) -> Any:
            scaled = jax.tree.map(lambda x: scale * x, tree)
            updates, state = tx.update(scaled, state, tree)
            return state, (updates, optclip.metrics(state))

        return jax.lax.scan(step, tx.init(tree), jnp.array([1.0, 10.0, 1.0]))[1]

    return run


def on_one_device(clip: Clip, of: Callable[[Any], Any]) -> Found:
    return Found(*helpers.quick_jit(of(made(clip)))(gradients()), "")


def on_a_mesh(
    clip: Clip, shape: str, placement: str, mode: str, of: Callable[[Any], Any]
) -> Found:
    """The same on a mesh, where the updates lie as the gradients do."""
    mesh = mesh_of(shape, mode)
    specs, tree = specs_of(placement, mesh.axis_names), gradients()
    out = {k: P(None, *s) for k, s in specs.items()} if of is run_of else specs
    if mode == "shard_map":
        function = jax.shard_map(
            of(made(clip, specs)), mesh=mesh, in_specs=(specs,), out_specs=(out, P())
        )
    else:
        function = of(made(clip))
        tree = jax.device_put(
            tree, {k: NamedSharding(mesh, s) for k, s in specs.items()}
        )
    compiled = helpers.quick_jit(function).lower(tree).compile()
    found = Found(*compiled(tree), compiled.as_text())
    for key, x in found.updates.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, out[key]), x.ndim)
    return found
