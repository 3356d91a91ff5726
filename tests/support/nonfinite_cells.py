"""The table policy x input x scope: how `nonfinite=` treats NaN and inf.

`expected` computes each outcome in NumPy float64 from the definition of each policy.
`tests/clip/test_nonfinite.py` compares the transformations with it, and
`docs.plots_and_tables.nonfinite_table` writes the table of `docs/nan_and_inf.md` from
it.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from tests.support import oracles

POLICIES = ("propagate", "zero", "raise")
SCOPES = ("tree", "leaf", "axes", "groups", "element")
LIMIT = 1.0
GROUPS = {"kernel": "a", "rows": "a", "head": "b"}
# The BCOO leaf stores row 1 twice and rows 0 and 3 never. Its last stored row is past
# the end: padding, whose NaN is not part of the gradient.
SHAPE = (4, 2)
PADDING = 9
ROWS = [1, 2, 1, PADDING]
# The name of a leaf and an index.
Entry = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """Hold a tree with non-finite entries.

    Attributes:
      title: Name of the input in the table.
      leaf: The leaf with these entries; None for every leaf.
      at: Index and value of each stored entry that is replaced.
      mask: The argument that excludes that leaf, if any.
    """

    title: str
    leaf: str | None
    at: dict[Any, float]
    mask: str = ""

    @property
    def masks(self) -> dict[str, dict[str, bool]]:
        """Return the mask argument that excludes the leaf, if any."""
        included = {leaf: leaf != self.leaf for leaf in GROUPS}
        return {self.mask: included} if self.mask else {}

    @property
    def outside_norm(self) -> bool:
        return self.mask in ("mask", "norm_mask")

    @property
    def outside_clip(self) -> bool:
        return self.mask in ("mask", "clip_mask")


NAN, INF = float("nan"), float("inf")
INPUTS = {
    "nan": Input("one NaN", "kernel", {(0, 1): NAN}),
    "inf": Input("one inf", "kernel", {(0, 1): INF}),
    "-inf": Input("one -inf", "kernel", {(0, 1): -INF}),
    "all": Input("every entry NaN", None, {...: NAN}),
    "norm_mask": Input(
        "NaN in a leaf outside `norm_mask`", "kernel", {(0, 1): NAN}, "norm_mask"
    ),
    "clip_mask": Input(
        "NaN in a leaf outside `clip_mask`", "kernel", {(0, 1): NAN}, "clip_mask"
    ),
    "mask": Input("NaN in a leaf outside `mask`", "kernel", {(0, 1): NAN}, "mask"),
    # One of two duplicates.
    "sparse": Input("NaN in a `BCOO` leaf", "rows", {(0, 1): NAN}),
    "overflow": Input(
        "`BCOO` duplicates that add up to inf", "rows", {(0, 0): 3e38, (2, 0): 3e38}
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """Hold one cell of the table."""

    policy: str
    given: str
    scope: str

    @property
    def input(self) -> Input:
        return INPUTS[self.given]

    @property
    def id(self) -> str:
        return f"{self.policy}-{self.given}-{self.scope}"


CELLS = [Cell(*key) for key in itertools.product(POLICIES, INPUTS, SCOPES)]


def stored(given: Input | None) -> dict[str, np.ndarray]:
    """Return the leaves in float32; for None, all finite except the padding."""
    tree = {
        "kernel": np.array([[6, 8], [0.3, 0.4]], np.float32),
        "rows": np.array([[3, 2], [0.2, 5], [1, 4], [NAN, NAN]], np.float32),
        "head": np.array([0.5, 2], np.float32),
    }
    for name, index in itertools.product(tree, given.at if given else ()):
        if given.leaf in (name, None):
            tree[name][index] = given.at[index]
    return tree


def gradients(given: Input | None) -> dict[str, Any]:
    """Return the tree to clip."""
    tree = {name: jnp.asarray(x) for name, x in stored(given).items()}
    tree["rows"] = BCOO((tree["rows"], jnp.array(ROWS)[:, None]), shape=SHAPE)
    return tree


def dense(given: Input | None) -> dict[Entry, float]:
    """Return the dense gradient per entry; duplicates are added in float32."""
    tree = stored(given)
    rows = np.zeros(SHAPE, np.float32)
    inside = [i for i, row in enumerate(ROWS) if row != PADDING]
    with np.errstate(over="ignore"):
        np.add.at(rows, [ROWS[i] for i in inside], tree["rows"][inside])
    entries = (tree | {"rows": rows}).items()
    stored_rows = set(ROWS)
    return {
        (name, *index): float(x)
        for name, leaf in sorted(entries)
        for index, x in np.ndenumerate(leaf)
        if name != "rows" or index[0] in stored_rows
    }


def array(cell: Cell, name: str) -> np.ndarray:
    """Return one expected leaf; unstored entries are zero."""
    out = np.zeros(SHAPE if name == "rows" else stored(None)[name].shape)
    for entry, x in expected(cell).items():
        if entry[0] == name:
            out[entry[1:]] = x
    return out


def unit(scope: str, entry: Entry) -> Any:
    """Return the key that all entries of one norm share."""
    return {
        "tree": (),
        "groups": GROUPS[entry[0]],
        "leaf": entry[0],
        "axes": entry[:-1],
        "element": entry,
    }[scope]


def expected(cell: Cell) -> dict[Entry, float]:
    """Return the result per entry (for `raise`, without `checkify`).

    A leaf outside `clip_mask` is unchanged. So is a leaf outside `norm_mask` whose norm
    covers no other leaf: nothing scales it.
    """
    before = dense(cell.input)
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
    """Return the entries that one norm scales, by the definition of the policy."""
    sound = all(np.isfinite(values[e]) for e in measured)
    if cell.policy == "zero" and not sound:
        return dict.fromkeys(scaled, 0.0)
    if cell.scope == "element":
        return {e: np.clip(values[e], -LIMIT, LIMIT) for e in scaled}
    if not sound:
        return dict.fromkeys(scaled, NAN)
    norm = oracles.norm(np.array([values[e] for e in sorted(measured)]))
    return {e: values[e] * oracles.hard(norm, LIMIT) for e in scaled}


def measured(cell: Cell) -> bool:
    """Return whether a norm covers the entry, which `clip/nonfinite` then counts."""
    return not cell.input.outside_norm


def is_error(cell: Cell) -> bool:
    """Return whether `raise` raises: it checks measured and scaled entries."""
    shared = cell.scope in ("tree", "groups")
    return measured(cell) or (shared and not cell.input.outside_clip)
