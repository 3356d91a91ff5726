"""Part `equality with the CPU`: the same clipping on the GPU and on the CPU.

Each transformation is compiled for both, and run on leaves with ordinary numbers, with
numbers whose squares overflow or underflow, with zeros, and with a NaN or an inf.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optclip
from benchmarks import trees
from benchmarks.donated import compiled_together
from benchmarks.timing import Row
from optclip import recipes

SHAPES = {"a": (64, 48), "b": (48,), "c": (8192,), "d": (33, 7)}
# The largest element of ordinary numbers is about 4.
SIZES = {
    "float32": {"ordinary": 1.0, "large": 1e25, "small": 1e-25},
    "bfloat16": {"ordinary": 1.0, "large": 1e25, "small": 1e-25},
    "float16": {"ordinary": 1.0, "large": 1e4, "small": 1e-3},
}
SPOILED = {"NaN": np.nan, "inf": np.inf}


def clips() -> dict[str, Any]:
    groups = {"a": "matrix", "b": "vector", "c": "vector", "d": "matrix"}
    matrices = {"a": True, "b": False, "c": False, "d": True}
    return {
        "global norm": optclip.clip_by_global_norm(1.0),
        "global norm, strict": optclip.clip_by_global_norm(1.0, strict=True),
        "global norm, l1": optclip.clip_by_global_norm(1.0, ord=1),
        "global norm, inf": optclip.clip_by_global_norm(1.0, ord=np.inf),
        "global norm, p = 3": optclip.clip_by_global_norm(1.0, ord=3),
        "per leaf": optclip.clip_by_norm(1.0),
        "per last axis": optclip.clip_by_norm(1.0, axis=-1),
        "per group": optclip.clip_by_group_norm(1.0, groups),
        "RMS": optclip.clip_by_rms(0.5),
        "value": optclip.clip_by_value(0.5),
        "AGC": recipes.agc(),
        "ZClip": recipes.zclip(),
        "spectral norm": optclip.clip_by_spectral_norm(1.0, mask=matrices),
        "singular values": optclip.clip_by_singular_value(1.0, mask=matrices),
    }


def inputs(dtype: str) -> dict[str, Any]:
    ordinary = trees.numbers(SHAPES, "float32")

    def sized(size: float) -> Any:
        return {k: (x * size).astype(trees.DTYPES[dtype]) for k, x in ordinary.items()}

    found = {name: sized(size) for name, size in SIZES[dtype].items()}
    found["zero"] = sized(0.0)
    for name, value in SPOILED.items():
        found[name] = sized(1.0)
        found[name]["b"][3] = value
    return found


def rows(tiny: bool) -> Iterator[Row]:
    cases = {dtype: inputs(dtype) for dtype in SIZES}
    devices = jax.devices()[0], jax.local_devices(backend="cpu")[0]
    chosen = dict(list(clips().items())[:2]) if tiny else clips()

    def results(tx: Any) -> Any:
        """The text of an exception, or all cases of all dtypes by both devices."""
        try:
            return [_run(tx, cases, device) for device in devices]
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:500]

    for name, found in compiled_together(results, chosen).items():
        if isinstance(found, str):
            yield {"clipping": name, "failed": found}
            continue
        mine, cpu = found
        for dtype in cases:
            difference = _difference(mine[dtype], cpu[dtype])
            yield {"clipping": name, "dtype": dtype, **difference}


def _run(tx: Any, cases: Any, device: Any) -> Any:
    """The clipped leaves and the record of each case, on one device."""

    def clipped(trees: Any) -> Any:
        found = {}
        for dtype, tree in trees.items():
            params = jax.tree.map(jnp.ones_like, tree)
            updates, state = tx.update(tree, tx.init(params), params)
            found[dtype] = updates, optclip.metrics(state)
        return found

    run = jax.jit(clipped)
    found: dict[str, Any] = {dtype: {} for dtype in cases}
    for case in next(iter(cases.values())):
        given = jax.device_put({d: cases[d][case] for d in cases}, device)
        for dtype, results in jax.device_get(run(given)).items():
            found[dtype][case] = results
    return found


def _difference(mine: Any, cpu: Any) -> Row:
    """The worst differences over all cases, with the case of the worst element."""
    worst, where, cells = {"element": 0.0, "largest": 0.0, "record": 0.0}, "", 0
    for case in mine:
        (leaves, record), (cpu_leaves, cpu_record) = mine[case], cpu[case]
        for key, leaf in leaves.items():
            found = _relative(leaf, cpu_leaves[key])
            eps = float(jnp.finfo(leaf.dtype).eps)
            where = case if found.each / eps > worst["element"] else where
            worst["element"] = max(worst["element"], found.each / eps)
            worst["largest"] = max(worst["largest"], found.of_largest / eps)
            cells += found.cells
        for key, number in record.items():
            found = _relative(number, cpu_record[key])
            worst["record"] = max(worst["record"], found.each)
            cells += found.cells
    return {
        "of an element, eps": worst["element"],
        "case": where,
        "of the largest element, eps": worst["largest"],
        "of the record": worst["record"],
        "cells finite on one only": cells,
    }


class Differences(NamedTuple):
    """The largest difference over its element and over the largest element.

    `cells` counts NaN and inf on one side that are something else on the other.
    """

    each: float
    of_largest: float
    cells: int


def _relative(mine: Any, cpu: Any) -> Differences:
    # A difference of subnormal numbers, which a CPU flushes, counts little.
    least = np.asarray(cpu).dtype
    least = float(jnp.finfo(least).tiny) if least.kind not in "iub" else 1.0
    a, b = (np.asarray(x).astype(np.float64) for x in (mine, cpu))
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    cells = int(np.sum(~same & ~finite))
    if not finite.any():
        return Differences(0.0, 0.0, cells)
    off, size = np.abs(a - b)[finite], np.abs(b)[finite]
    each = float(np.max(off / np.maximum(size, least)))
    return Differences(each, float(off.max() / max(size.max(), least)), cells)
