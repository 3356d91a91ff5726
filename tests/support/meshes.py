"""Run every transformation on every mesh, to compare with one device.

Meshes run under jit with Auto and Explicit axes and in shard_map, with all, some or no
leaves sharded. Leaves have unequal norms, so that devices have different sums.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import _thresholds, thresholds
from tests.support import helpers, registry

# The first values are the most error-prone: a covering array prefers them.
MESHES = {"2x4": (2, 4), "8": (8,), "2x2x2": (2, 2, 2)}
MODES = ("shard_map", "auto", "explicit")
PLACEMENTS = ("mixed", "split", "whole")


@dataclasses.dataclass(frozen=True)
class Clip:
    """Hold a transformation that clips some of `gradients`.

    Attributes:
      id: Name in test ids.
      make: Factory; takes further options.
      traits: Kinds of values that devices must agree on, each tried on every mesh.
      by_axis: Whether `axis_name` must specify the sharding of leaves in shard_map, as
        for norms over some of their axes.
      roundings: Further eps by which an element may differ.
      of_matrices: Whether one side of a matrix must be unsharded in shard_map;
        elsewhere XLA may gather it.
    """

    id: str
    make: Callable[..., Any]
    traits: tuple[str, ...]
    by_axis: bool = False
    roundings: int = 0
    of_matrices: bool = False

    def takes(self, shape: str, placement: str, mode: str) -> bool:
        """Return whether shard_map supports the sharding of matrices."""
        if not self.of_matrices or mode != "shard_map" or placement == "whole":
            return True
        # The power iteration requires both sides unsharded.
        return shape == "8" and self.id != "spectral-norm-by-iteration"


def _of(entry: registry.Entry) -> Clip:
    # Its usual threshold clips none of these leaves.
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
    return optclip.skip(clip, max_norm=thresholds.quantile(0.9, 8), **more)


def _groups(**more: Any) -> Any:
    """Clip groups; if `mixed`, two leaves of one group use different mesh axes."""
    groups = {"bias": "a", "kernel": "a", "out": "b"}
    return optclip.clip_by_group_norm({"a": 4.0, "b": 1.0}, groups, **more)


# The groups and the user's scope of the registry have a single leaf per key here. Each
# kind of norm has its own collectives.
KINDS = ("norm", "global-norm", "global-norm-inf", "global-norm-3")
CLIPS = [
    *(
        _of(entry)
        for entry in registry.ENTRIES
        if entry.id not in ("user-scope", "group-norm")
        and (entry in registry.by_trait() or entry.id in KINDS or entry.of_matrices)
    ),
    Clip("groups", _groups, ("leaf",)),
    Clip("masked", _masked, ("tree",)),
    Clip("skip", _skip, ("tree",)),
]


def _constrained(**more: Any) -> Any:
    """Constrain parameters, here by the same tree, after a step."""
    clip = optclip.clip_by(2.0, over=optclip.axes(-1), **more)
    return optclip.constrain(optax.sgd(0.1), clip)


def chained(**more: Any) -> Any:
    """Keep a history of skipped steps, learned thresholds and limited parameters."""
    scaled = thresholds.scaled(thresholds.quantile(0.5, 3), 2.0)
    clip = optclip.clip_by_norm(thresholds.ema(), record="leaves", **more)
    tx = optclip.skip(optax.chain(clip, optax.adam(0.1)), max_norm=scaled, **more)
    limit = optclip.clip_by_norm(thresholds.initial_norm(), name="limit", **more)
    return optclip.with_history(optclip.constrain(tx, limit), 2)


def _by_unit(rule: Any) -> Callable[..., Any]:
    return lambda **more: optclip.clip_by(rule, over=optclip.units(), **more)


def _by_element(rule: Any) -> Callable[..., Any]:
    return lambda **more: optclip.clip_by_value(rule, **more)


# Transformations with a memory. The trait is its layout: per slice or element, sharded
# over devices, or numbers that all devices share.
EMA = thresholds.ema(0.5, warmup=1)
LEARNED = [
    Clip("ema by unit", _by_unit(EMA), ("slices",), True),
    Clip("quantile by unit", _by_unit(thresholds.quantile(0.5, 4)), ("slices",), True),
    Clip(
        "fraction of parameters",
        lambda **more: optclip.recipes.agc(0.5, **more),
        ("slices",),
        True,
    ),
    Clip(
        "second moment",
        _by_element(_thresholds.second_moment(0.5, warmup=0)),
        ("elements",),
    ),
    Clip("moment", _by_element(thresholds.moment(decay=0.5)), ("elements",)),
    Clip("ema of elements", _by_element(EMA), ("elements",)),
    Clip("largest element", _by_element(_thresholds.ema_of_max(0.5)), ("numbers",)),
    Clip("skip", _skip, ("numbers",)),
    Clip("constrain", _constrained, ("slices",), True),
    Clip("chained", chained, ("numbers",)),
]


class Result(NamedTuple):
    """Hold the updates, the recorded metrics and the text of the program."""

    updates: Any
    metrics: dict[str, Any]
    program: str


def gradients() -> Any:
    """Return leaves that all meshes split evenly, with norms far below and above 2."""
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
    """Return specs; kernels are sharded over both axes, rows over two of three axes."""
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
    """Build the transformation, with `specs` as `axis_name` if it requires one."""
    return clip.make(**({"axis_name": specs} if specs and clip.by_axis else {}))


def update_of(tx: Any) -> Callable[[Any], Any]:
    """Return a function that computes the first update and its metrics."""

    def update(tree: Any) -> Any:
        updates, state = tx.update(tree, tx.init(tree))
        return updates, optclip.metrics(state)

    return update


def run_of(tx: Any) -> Callable[[Any], Any]:
    """Return a function that scans three updates, the second ten times as large."""

    def run(tree: Any) -> Any:
        def step(state: Any, scale: Any) -> Any:
            scaled = jax.tree.map(lambda x: scale * x, tree)
            updates, state = tx.update(scaled, state, tree)
            return state, (updates, optclip.metrics(state))

        return jax.lax.scan(step, tx.init(tree), jnp.array([1.0, 10.0, 1.0]))[1]

    return run


def on_one_device(clip: Clip, of: Callable[[Any], Any]) -> Result:
    return Result(*helpers.quick_jit(of(made(clip)))(gradients()), "")


def on_a_mesh(
    clip: Clip, shape: str, placement: str, mode: str, of: Callable[[Any], Any]
) -> Result:
    """Run on a mesh, and check that updates are sharded like the gradients."""
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
    result = Result(*compiled(tree), compiled.as_text())
    for key, x in result.updates.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, out[key]), x.ndim)
    return result
