"""Part `equality with the CPU`: compare clipping on the GPU with clipping on the CPU.

Each transformation runs on both, on leaves of ordinary numbers, of numbers whose
squares overflow or underflow, of zeros, and with one NaN or inf.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optclip
from benchmarks import trees
from benchmarks.donated_buffers import compiled_together
from benchmarks.timing import Row
from optclip import recipes

SHAPES = {"a": (64, 48), "b": (48,), "c": (8192,), "d": (33, 7)}
# The largest element of ordinary numbers is about 4.
SIZES = {
    "float32": {"ordinary": 1.0, "large": 1e25, "small": 1e-25},
    "bfloat16": {"ordinary": 1.0, "large": 1e25, "small": 1e-25},
    "float16": {"ordinary": 1.0, "large": 1e4, "small": 1e-3},
}
NONFINITE = {"NaN": np.nan, "inf": np.inf}


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

    cases = {name: sized(size) for name, size in SIZES[dtype].items()}
    cases["zero"] = sized(0.0)
    for name, value in NONFINITE.items():
        cases[name] = sized(1.0)
        cases[name]["b"][3] = value
    return cases


def rows(tiny: bool) -> Iterator[Row]:
    cases = {dtype: inputs(dtype) for dtype in SIZES}
    devices = jax.devices()[0], jax.local_devices(backend="cpu")[0]
    chosen = dict(list(clips().items())[:2]) if tiny else clips()

    def results(tx: Any) -> Any:
        """Return the results of all cases on both devices, or the text of an error."""
        try:
            return [_run(tx, cases, device) for device in devices]
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:500]

    for name, outcome in compiled_together(results, chosen).items():
        if isinstance(outcome, str):
            yield {"clipping": name, "failed": outcome}
            continue
        gpu, cpu = outcome
        for dtype in cases:
            difference = _difference(gpu[dtype], cpu[dtype])
            yield {"clipping": name, "dtype": dtype, **difference}


def _run(tx: Any, cases: Any, device: Any) -> Any:
    """Return the clipped leaves and the record of each case on one device."""

    def clipped(trees: Any) -> Any:
        results = {}
        for dtype, tree in trees.items():
            params = jax.tree.map(jnp.ones_like, tree)
            updates, state = tx.update(tree, tx.init(params), params)
            results[dtype] = updates, optclip.metrics(state)
        return results

    run = jax.jit(clipped)
    results: dict[str, Any] = {dtype: {} for dtype in cases}
    for case in next(iter(cases.values())):
        inputs = jax.device_put({d: cases[d][case] for d in cases}, device)
        for dtype, result in jax.device_get(run(inputs)).items():
            results[dtype][case] = result
    return results


def _difference(gpu: Any, cpu: Any) -> Row:
    """Return the largest differences over all cases, and the worst element's case."""
    worst, where, cells = {"element": 0.0, "largest": 0.0, "record": 0.0}, "", 0
    for case in gpu:
        (leaves, record), (cpu_leaves, cpu_record) = gpu[case], cpu[case]
        for key, leaf in leaves.items():
            differences = _relative(leaf, cpu_leaves[key])
            eps = float(jnp.finfo(leaf.dtype).eps)
            where = case if differences.each / eps > worst["element"] else where
            worst["element"] = max(worst["element"], differences.each / eps)
            worst["largest"] = max(worst["largest"], differences.of_largest / eps)
            cells += differences.cells
        for key, number in record.items():
            differences = _relative(number, cpu_record[key])
            worst["record"] = max(worst["record"], differences.each)
            cells += differences.cells
    return {
        "of an element, eps": worst["element"],
        "case": where,
        "of the largest element, eps": worst["largest"],
        "of the record": worst["record"],
        "cells finite on one only": cells,
    }


class Differences(NamedTuple):
    """Hold the largest difference, relative to its element and to the largest element.

    `cells` counts the elements that are NaN or inf on one device and differ on the
    other.
    """

    each: float
    of_largest: float
    cells: int


def _relative(gpu: Any, cpu: Any) -> Differences:
    # The CPU flushes subnormal numbers to zero, so differences of these count little.
    dtype = np.asarray(cpu).dtype
    least = float(jnp.finfo(dtype).tiny) if dtype.kind not in "iub" else 1.0
    a, b = (np.asarray(x).astype(np.float64) for x in (gpu, cpu))
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    cells = int(np.sum(~same & ~finite))
    if not finite.any():
        return Differences(0.0, 0.0, cells)
    errors, size = np.abs(a - b)[finite], np.abs(b)[finite]
    each = float(np.max(errors / np.maximum(size, least)))
    return Differences(each, float(errors.max() / max(size.max(), least)), cells)
