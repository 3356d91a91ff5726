"""Compare recorded norms with whole arrays, and write a sentence per mistake."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._arrays._leaf import Leaf
from .._norms import LEAST
from .._typing import PyTree
from . import _copies
from ._metrics import states_in
from ._text import listed

# Squared norms in float32 differ less, also of small leaves on a mesh of CPUs.
_TOLERANCE = 1e-3
_LARGEST = float(np.finfo(np.float32).max)
_ADVICE = ' A state with record="leaves" shows in which leaf it differs.'


class RecordedNorms(NamedTuple):
    """Hold what a step recorded.

    Attributes:
      norms: A dict from the key of each norm to the norm and the names of its leaves;
        empty if only the norm of all leaves is recorded.
      shared: The norm of all leaves, its threshold and coefficient, from each state;
        empty if leaves or groups have their own.
      leaves: A dict from the name of each leaf to the leaf.
      names: The name of the record, and those of the other records.
    """

    norms: dict[str, tuple[float, list[str]]]
    shared: list[list[float]]
    leaves: dict[str, Leaf]
    names: tuple[str, list[str]]

    @property
    def total(self) -> float:
        """The norm of all leaves."""
        norms = [norm for norm, _ in self.norms.values()]
        return self.shared[0][0] if self.shared else math.hypot(*norms)


def ratio_of(norm: float, leaves: Iterable[tuple[float, int]]) -> float:
    """Return the ratio of squares, from the norm and the size of each whole leaf."""
    norms, sizes = zip((0.0, 0), *leaves, strict=True)
    whole = math.hypot(*norms)
    # Smaller squares are lost in float32, and the record of larger norms is inf.
    is_lost = norm <= whole <= math.sqrt(sum(sizes)) * LEAST["float32"]
    if is_lost or (norm == math.inf and _LARGEST < whole < math.inf):
        return 1.0
    ratio = norm / (whole if whole < math.inf else math.nan) if whole else math.inf
    return ratio * ratio


def _is_right(
    ratio: float, leaves: Iterable[Leaf] = (), tolerance: float = _TOLERANCE
) -> bool:
    # XLA may measure numbers before it rounds them to bfloat16.
    rounding = max((float(jnp.finfo(x.dtype).eps) for x in leaves), default=0.0)
    return abs(ratio - 1) <= max(tolerance, rounding)


def mistakes(
    unlike: list[str], ratios: dict[str, float], total: float, read: RecordedNorms
) -> Iterator[str]:
    """Yield a sentence for each mistake."""
    if unlike:
        fault = ", or this device is faulty" if unlike[0].endswith(" alone") else ""
        yield (
            f"Devices hold different values of {listed(unlike)}: a mean or sum over"
            f" devices is missing{fault}. The other findings are of the first device."
        )
    leaves = {k: [read.leaves[x] for x in of] for k, (_, of) in read.norms.items()}
    wrong = {k: x for k, x in ratios.items() if not _is_right(x, leaves[k])}
    causes = {k: _cause(x, read.norms[k][0], leaves[k]) for k, x in wrong.items()}
    are_alike = len(wrong) == len(ratios) and np.allclose(
        [*wrong.values()], total, rtol=_TOLERANCE, atol=0
    )
    # One norm alone has a common factor only if this is a number of devices.
    is_factor = len(wrong) > 1 or any(map(_is_square, (total, 1 / (total or 1))))
    if wrong and are_alike and is_factor and 0 < total < math.inf:
        also = f" Or: {causes[min(wrong)]}" if all(causes.values()) else ""
        yield (
            f"All norms: {total:.4g}: the step measured gradients"
            f" {math.sqrt(total):.4g} times as large as these: a sum over devices, a"
            f" scaled loss, or another step.{also}"
        )
        return
    for key, cause in causes.items():
        if cause:
            yield f"`{key or 'grads'}`: {wrong[key]:.4g}: {cause}"
    if others := [
        f"`{k or 'grads'}`: {wrong[k]:.4g}" for k, x in causes.items() if not x
    ]:
        yield (
            f"{listed(others)}: not the norm of these gradients or of their shards."
            " Pass those that entered the clipping in the recorded step."
            f"{_ADVICE if '' in wrong and len(read.leaves) > 1 else ''}"
        )
    if not wrong and not _is_right(total, read.leaves.values()):
        yield (
            f"The norm of all leaves: {total:.4g}, while each leaf is right: it is not"
            " the root of the sum of their squares."
        )
    words = "norm", "threshold", "coefficient"
    for word, numbers in zip(words, zip(*read.shared, strict=True), strict=False):
        if not np.allclose(numbers, numbers[0], _TOLERANCE, 0, equal_nan=True):
            each = ", ".join(f"{x:.4g}" for x in numbers)
            yield f"The {word} of all leaves differs between the states: {each}."


def _is_square(ratio: float) -> bool:
    root = round(math.sqrt(ratio)) if ratio < math.inf else 0
    return root > 1 and _is_right(ratio / root**2)


def _cause(ratio: float, norm: float, leaves: list[Leaf]) -> str:
    """Return the cause of a wrong ratio of squares, or no text."""
    if ratio == 0:
        return "left out of the norm. If this is meant, pass mask=."
    if not math.isfinite(ratio):
        return (
            "not finite, or 0 only in these gradients. Check a step with finite"
            " gradients."
        )
    copies = round(ratio)
    counted = 1 < copies <= jax.device_count() and _is_right(ratio / copies)
    # Of several leaves, one may be left out.
    is_half = len(leaves) == 1 and _is_right(2 * ratio)
    what = f"counted {copies} times" if counted else "some shards are counted twice"
    if ratio < 1:
        what = f"{'half of it' if is_half else 'a part'} is missing"
    advice = "Pass axis_name=specs, () for whole arrays."
    if axes := _summed_axes(norm, leaves):
        # A gathered leaf counts once per device of an axis that is not known here.
        gathered = ", or gathered before," if counted else ","
        summed, split = axes
        return (
            f"{what}: summed over {summed}{gathered} but split over {split}. {advice}"
        )
    return f"{what}. {advice}" if counted or is_half else ""


def _summed_axes(norm: float, leaves: list[Leaf]) -> tuple[str, str] | None:
    """Return the axes that were summed for this norm, and those that split the leaves.

    Sets of axes that explain the norm are alternatives.
    """
    places = [getattr(x.array, "sharding", None) for x in leaves]
    shardings = [x for x in places if isinstance(x, NamedSharding)]
    if not shardings or any(x.mesh != shardings[0].mesh for x in shardings):
        return None
    mesh = shardings[0].mesh
    if len(shardings) < len(leaves) or not isinstance(mesh, jax.sharding.Mesh):
        return None
    norms = [_copies.by_device(x.array, mesh.devices) for x in leaves]
    shares = np.square(np.hypot.reduce(norms) / norm)
    axes = [name for name, size in mesh.shape.items() if size > 1]
    found = []
    for number in range(len(axes) + 1):
        for some in itertools.combinations(axes, number):
            summed = shares.sum(tuple(map(mesh.axis_names.index, some)))
            # The state is read on the first device. Of many sets of axes, one may be
            # close by chance.
            if _is_right(float(summed.flat[0]), tolerance=_TOLERANCE / 10):
                found.append(_in_words(some))
    split = {x for y in shardings for z in y.spec for x in np.atleast_1d(z) if x}
    whole = _in_words([x for x in axes if x in split])
    # Several leaves may be split over other axes each.
    found = [x for x in found if x != whole]
    return (" or ".join(found), whole) if found else None


def _in_words(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes)) or "no axis"


def copied(arrays: dict[str, Any], opt_state: PyTree) -> list[str]:
    """Return a question if the gradients are equal rows, as `pmap` returns copies."""
    rows = jnp.shape(states_in(opt_state)[0].state.clip_step)
    are_rows = rows and all(jnp.shape(x)[:1] == rows for x in arrays.values())
    if not are_rows or rows[0] < 2 or _copies.compare(arrays, by_row=True)[1]:
        return []
    return [
        f"All gradients are {rows[0]} equal rows: are they copies, as of pmap? Then"
        " pass one, jax.tree.map(lambda x: x[0], grads)."
    ]


def ties(fingerprints: dict[str, tuple[int, int]]) -> list[str]:
    """Return a question for each two leaves that hold the same numbers."""
    alike: dict[tuple[int, int], list[str]] = {}
    for key, fingerprint in fingerprints.items():
        alike.setdefault(fingerprint, []).append(key)
    return [
        f"`{a}` and `{b}` hold the same numbers: are they tied? Then pass one of them,"
        " since the norm counts both."
        for keys in alike.values()
        for a, b in itertools.pairwise(keys)
    ]
