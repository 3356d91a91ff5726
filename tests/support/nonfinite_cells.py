"""The table policy x input x scope: what `nonfinite=` makes of NaN and inf.

`expected` says what must come out, in NumPy float64, from the words of each policy and
from nothing else. `tests/clip/test_nonfinite_cells.py` holds both layers of optclip to it;
`tools/nonfinite_page.py` writes the table of `docs/nonfinite.md` from it.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from tests.support import oracles

POLICIES = ("propagate", "zero", "drop", "raise")
SCOPES = ("tree", "leaf", "axes", "groups", "element")
LIMIT = 1.0
GROUPS = {"kernel": "a", "rows": "a", "head": "b"}
# A large kernel has zeros up to 64 rows and columns. The oracle computes with one of each:
# the others become what the last one does.
LARGE = 64
# The shape of the BCOO leaf and the rows it stores: row 1 twice, rows 0 and 3 not, and
# one past the end. That is padding, no part of the gradient: its NaN must not be seen.
SHAPE = (4, 2)
PADDING = 9
ROWS = [1, 2, 1, PADDING]
# The name of a leaf and an index.
Entry = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """A tree with something wrong in it.

    Attributes:
      title: what the table calls it.
      leaf: where it is; None is everywhere.
      at: index and value of each stored entry that is replaced.
      outside_norm: whether `norm_mask` leaves that leaf out, or `mask`.
      outside_clip: whether `clip_mask` does, or `mask`.
    """

    title: str
    leaf: str | None
    at: dict[Any, float]
    outside_norm: bool = False
    outside_clip: bool = False


NAN, INF = float("nan"), float("inf")
INPUTS = {
    "nan": Input("one NaN", "kernel", {(0, 1): NAN}),
    "inf": Input("one inf", "kernel", {(0, 1): INF}),
    "-inf": Input("one -inf", "kernel", {(0, 1): -INF}),
    "all": Input("every entry NaN", None, {...: NAN}),
    "norm_mask": Input(
        "NaN in a leaf outside `norm_mask`", "kernel", {(0, 1): NAN}, True
    ),
    "clip_mask": Input(
        "NaN in a leaf outside `clip_mask`", "kernel", {(0, 1): NAN}, False, True
    ),
    "mask": Input("NaN in a leaf outside `mask`", "kernel", {(0, 1): NAN}, True, True),
    "sparse": Input("NaN in a `BCOO` leaf", "rows", {(1, 1): NAN}),
    "overflow": Input(
        "`BCOO` duplicates that add up to inf", "rows", {(0, 0): 3e38, (2, 0): 3e38}
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    policy: str
    given: str
    scope: str
    # Whether the kernel is large, and its norm its largest element: XLA on CPU takes the
    # maximum of so many in another way.
    large: bool = False

    @property
    def input(self) -> Input:
        return INPUTS[self.given]

    @property
    def id(self) -> str:
        size = "-large" if self.large else ""
        return f"{self.policy}-{self.given}-{self.scope}{size}"

    @property
    def ord(self) -> float:
        return math.inf if self.large else 2.0


CELLS = [
    Cell(*key) for key in itertools.product(POLICIES, INPUTS, SCOPES, (False, True))
]


def stored(given: Input | None, zeros: int = 0) -> dict[str, np.ndarray]:
    """The values of the leaves, float32; clean for None.

    The kernel has so many more rows and columns of zeros.
    """
    kernel = np.array([[6, 8], [0.3, 0.4]], np.float32)
    tree = {
        "kernel": np.pad(kernel, (0, zeros)),
        "rows": np.array([[3, 2], [0.2, 5], [1, 4], [NAN, NAN]], np.float32),
        "head": np.array([0.5, 2], np.float32),
    }
    for name, index in itertools.product(tree, given.at if given else ()):
        if given.leaf in (name, None):
            tree[name][index] = given.at[index]
    return tree


def gradients(given: Input | None, *, large: bool) -> dict[str, Any]:
    """The tree to clip."""
    leaves = stored(given, LARGE - 2 if large else 0)
    tree = {name: jnp.asarray(x) for name, x in leaves.items()}
    tree["rows"] = BCOO((tree["rows"], jnp.array(ROWS)[:, None]), shape=SHAPE)
    return tree


def dense(given: Input | None, zeros: int = 0) -> dict[Entry, float]:
    """The gradients that the tree stands for, by entry; sums overflow as float32's."""
    found: dict[Entry, np.float32] = {}
    for name, leaf in stored(given, zeros).items():
        for index, x in np.ndenumerate(leaf):
            entry = (name, *index)
            if name == "rows":
                entry = (name, ROWS[index[0]], index[1])
                with np.errstate(over="ignore"):
                    x = found.get(entry, np.float32(0)) + x
            found[entry] = x
    inside = {e: float(x) for e, x in found.items() if e[:2] != ("rows", PADDING)}
    return dict(sorted(inside.items()))


def array(cell: Cell, name: str) -> np.ndarray:
    """One leaf of what must come out; zero where nothing is stored."""
    out = np.zeros(
        SHAPE if name == "rows" else stored(None, int(cell.large))[name].shape
    )
    for entry, x in expected(cell).items():
        if entry[0] == name:
            out[entry[1:]] = x
    is_padded = cell.large and name == "kernel"
    return np.pad(out, (0, LARGE - 3), mode="edge") if is_padded else out


def masks(given: Input) -> dict[str, dict[str, bool]]:
    """The mask that leaves out what the input does, if any."""
    asked = {
        (True, True): "mask",
        (True, False): "norm_mask",
        (False, True): "clip_mask",
    }
    name = asked.get((given.outside_norm, given.outside_clip))
    return {name: {leaf: leaf != given.leaf for leaf in GROUPS}} if name else {}


def unit(scope: str, entry: Entry) -> Any:
    """What the entries that share a norm have in common."""
    return {
        "tree": (),
        "groups": GROUPS[entry[0]],
        "leaf": entry[0],
        "axes": entry[:-1],
        "element": entry,
    }[scope]


def expected(cell: Cell) -> dict[Entry, float]:
    """What comes out (of `raise`: where no error stops it), by entry.

    A leaf outside `clip_mask` is left alone, and so is one outside `norm_mask` if its
    norm is its own: then nothing scales it.
    """
    before = dense(cell.input, int(cell.large))
    out = dict(before)
    masked = {e for e in before if e[0] == cell.input.leaf}
    for share in {unit(cell.scope, e): None for e in before}:
        members = {e for e in before if unit(cell.scope, e) == share}
        measured = members - masked if cell.input.outside_norm else members
        scaled = members - masked if cell.input.outside_clip else members
        if measured:
            wanted = {e: before[e] for e in sorted(members)}
            out |= _settled(cell, wanted, measured, scaled)
    return out


def _settled(cell, values, measured, scaled):
    """The entries that are scaled by one norm, by the words of the policy."""
    if cell.policy == "drop":
        values = {e: x if np.isfinite(x) else 0.0 for e, x in values.items()}
    sound = all(np.isfinite(values[e]) for e in measured)
    if cell.policy == "zero" and not sound:
        return dict.fromkeys(scaled, 0.0)
    if cell.scope == "element":
        return {e: np.clip(values[e], -LIMIT, LIMIT) for e in scaled}
    if not sound:
        return dict.fromkeys(scaled, NAN)
    norm = oracles.norm(np.array([values[e] for e in sorted(measured)]), cell.ord)
    return {e: values[e] * oracles.hard(norm, LIMIT) for e in scaled}


def wrong(cell: Cell) -> list[Entry]:
    """The entries that are not finite, as the dense gradient has them."""
    return [e for e, x in dense(cell.input).items() if not np.isfinite(x)]


def measured(cell: Cell) -> bool:
    """Whether a norm sees the wrong entry, and `clip/nonfinite` counts the step."""
    return not cell.input.outside_norm


def is_error(cell: Cell) -> bool:
    """Whether `raise` raises: it looks at what is measured or scaled."""
    shared = cell.scope in ("tree", "groups")
    return measured(cell) or (shared and not cell.input.outside_clip)


def words(cell: Cell) -> str:
    """The outcome in a few words; what they do not name is clipped as ever."""
    if cell.policy == "raise" and is_error(cell):
        return "error"
    before, found = dense(cell.input), expected(cell)
    bad, leaf = wrong(cell), {e for e in before if e[0] == cell.input.leaf}
    same = {e for e in before if np.array_equal(before[e], found[e], equal_nan=True)}
    untouched = bool(leaf) and leaf <= same
    lost = {e for e, x in found.items() if x == 0 or np.isnan(x)}
    lost -= leaf if untouched else set()
    parts = []
    if lost:
        state = "NaN" if any(np.isnan(found[e]) for e in lost) else "zero"
        parts.append(f"{_name(lost, bad)} {state}")
    if untouched:
        parts.append("leaf untouched")
    return ", ".join(parts) or "entry at the bound"


def _name(lost: set[Entry], bad: list[Entry]) -> str:
    """A set of entries, seen from the bad ones."""

    def around(scope):
        return {e for e in dense(None) if unit(scope, e) == unit(scope, bad[0])}

    known = {
        "all": around("tree"),
        "entry": set(bad),
        "its slice": around("axes"),
        "its leaf": around("leaf"),
        "its group": around("groups"),
        "the others": around("tree") - around("leaf"),
        "the rest of its group": around("groups") - around("leaf"),
    }
    return next(name for name, part in known.items() if lost == part)
