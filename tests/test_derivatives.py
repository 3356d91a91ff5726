"""First and second derivatives, both modes, under vmap, against differences.

The oracle is NumPy's, in float64, on one long vector cut into blocks by index.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import norms, responses
from tests import differences, helpers, oracles
from tests.registry import ENTRIES, square_root_capper

KERNEL, BIAS = [0, 1, 2, 3, 4, 5], [6, 7]

# The scope; which elements share a norm.
SCOPES = {
    "tree": (optclip.TREE, [KERNEL + BIAS]),
    "leaf": (optclip.LEAF, [KERNEL, BIAS]),
    "axes": (optclip.axes(0), [[0, 2, 4], [1, 3, 5], BIAS]),
    "groups": (optclip.groups({"bias": "b", "kernel": "k"}), [KERNEL, BIAS]),
    "element": (optclip.ELEMENT, [[i] for i in range(8)]),
}
# The response; its formula.
RESPONSES = {
    "hard": ("hard", oracles.hard),
    "smooth": ("smooth", oracles.smooth),
    "smooth-1": (responses.Smooth(1.0), lambda n, c: 1 / (1 + n / c)),
    "normalize": ("normalize", oracles.normalized),
    "user": (square_root_capper, lambda n, c: math.sqrt(c / n) if n > c else 1.0),
}
NORMS = {
    "l1": norms.L1,
    "l2": norms.L2,
    "inf": norms.INF,
    "rms": norms.RMS,
    "average": norms.AVERAGE,
    "4": norms.Norm(4.0),
    "half": norms.Norm(0.5),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One clip of a vector of eight: by optclip, and by its formula."""

    scope: str
    response: str
    norm: str

    @property
    def blocks(self) -> list[list[int]]:
        return SCOPES[self.scope][1]

    def clip(self, x: Any, c: Any, eps: Any = 0.0) -> Any:
        tx = optclip.clip_by(
            c,
            over=SCOPES[self.scope][0],
            response=RESPONSES[self.response][0],
            norm=NORMS[self.norm],
            eps=eps,
            record=False,
        )
        tree = {
            "kernel": x[jnp.array(KERNEL)].reshape(3, 2),
            "bias": x[jnp.array(BIAS)],
        }
        out, _ = tx.update(tree, tx.init(tree))
        return jnp.concatenate([out["kernel"].ravel(), out["bias"]])

    def formula(self, x: np.ndarray, c: float, eps: float = 0.0) -> np.ndarray:
        out = x.copy()
        if self.scope == "element" and self.response in ("hard", "normalize"):
            eps = 0.0  # elements go to the bound itself
        for block in self.blocks:
            n = self.measure(x[block])
            out[block] *= RESPONSES[self.response][1](n + eps, c) if n else 1.0
        return out

    def measure(self, values: np.ndarray) -> float:
        norm = NORMS[self.norm]
        count = len(values) ** norm.per_count
        return oracles.norm(values, norm.ord) / count

    def scaled(self, x: np.ndarray, wanted: list[float]) -> np.ndarray:
        """`x` with norms as wanted, block by block, in turns."""
        out = x.copy()
        for i, block in enumerate(self.blocks):
            n = self.measure(x[block])
            out[block] *= wanted[i % len(wanted)] / n if n else 0.0
        return out

    def without_kinks(self, x: np.ndarray) -> np.ndarray:
        """Where differences can tell two derivatives: not at the kinks at zero."""
        smooth = np.ones(x.shape, bool)
        if NORMS[self.norm].ord < 2 and self.scope != "element":
            smooth &= x != 0
        if self.response in ("smooth", "smooth-1", "normalize"):
            for block in self.blocks:
                smooth[block] &= bool(np.any(x[block]))
        return smooth


def _pairs():
    """Each scope with each response and norm, each response with each kind of norm."""
    four = [name for name in SCOPES if name != "element"]
    for i, response in enumerate(RESPONSES):
        for j, norm in enumerate(NORMS):
            # A norm by count is the L2 norm over a number: once is enough.
            if not NORMS[norm].per_count or response == "hard":
                yield Case(four[(i + j) % 4], response, norm)
        yield Case("element", response, "l2")


def points(case: Case) -> dict[str, np.ndarray]:
    """By name: all eight elements apart from each other and from the threshold of 1."""
    rng = np.random.default_rng(11)
    x = rng.permutation(np.linspace(0.5, 1.2, 8)) * rng.choice([-1, 1], 8)
    no_bias, gaps = x.copy(), x.copy()
    no_bias[BIAS] = 0.0
    gaps[[1, 4, 7]] = 0.0
    return {
        "inside": case.scaled(x, [0.5]),
        "outside": case.scaled(x, [3.0]),
        "both": case.scaled(x, [0.5, 3.0]),
        "far": case.scaled(x, [1e6]),
        "zero leaf": case.scaled(no_bias, [3.0, 0.5]),
        "zeros in a leaf": case.scaled(gaps, [3.0, 0.5]),
    }


@pytest.mark.parametrize(
    "case", [*_pairs()], ids=lambda c: f"{c.scope}-{c.response}-{c.norm}"
)
def test_by_updates_threshold_and_eps(case):
    """Both orders and modes, under vmap over the points."""
    named = points(case)
    xs = np.stack(list(named.values()))
    smooth = np.stack([case.without_kinks(x) for x in xs])
    turns = np.random.default_rng(5).uniform(-1, 1, xs.shape)
    along = np.where(smooth, turns * np.stack([differences.sizes(x) for x in xs]), 0.0)

    def derivatives(x, along):
        def of_numbers(c, eps):
            return differences.loss(case.clip(x, c, eps))

        of_updates = differences.by_jax(lambda x: case.clip(x, 1.0), x, along)
        return of_updates, jax.grad(of_numbers, (0, 1))(1.0, 0.0)

    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(jax.vmap(derivatives))(xs, along))
    for i, (name, x) in enumerate(named.items()):
        of_updates, of_numbers = jax.tree.map(lambda part, i=i: part[i], found)
        formula = functools.partial(case.formula, c=1.0)
        _compare(name, of_updates, formula, x, along[i], smooth[i])
        _compare_numbers(name, of_numbers, case, x)


def _compare(name, found, formula, x, along, smooth):
    """In units of the coordinates, so that large and small ones weigh alike."""
    expected = differences.by_differences(formula, x, along)
    unit = np.where(smooth, differences.sizes(x), 0.0)
    for part in differences.Derivatives._fields:
        assert np.all(np.isfinite(getattr(found, part))), (name, part)
        by = 1.0 if part == "tangent" else unit
        a, b = getattr(found, part) * by, getattr(expected, part) * by
        differences.assert_close(a, b, f"{name}: {part}")


def _compare_numbers(name, found, case, x):
    """By the threshold and by eps, which is moved by a share of the smallest norm."""
    measured = [case.measure(x[block]) for block in case.blocks]
    unit = min(n for n in measured if n)
    by_threshold = differences.slope_along(
        lambda c: differences.loss(case.formula(x, c)), 1.0, 1.0
    )
    by_eps = differences.slope_along(
        lambda eps: differences.loss(case.formula(x, 1.0, eps)), 0.0, unit
    )
    differences.assert_close(found[0], by_threshold, f"{name}: by the threshold")
    differences.assert_close(found[1] * unit, by_eps, f"{name}: by eps")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_every_transformation(entry):
    """Not under vmap, so that branches stay branches; at zero the identity."""
    flat, to_tree = _flat(helpers.as_float64(helpers.gradients()))
    flat[[1, 6, 18]] = 0.0
    smooth = flat != 0
    unit = differences.sizes(flat)
    along = np.random.default_rng(5).uniform(-1, 1, flat.shape) * unit * smooth

    def clip(x):
        tx = helpers.strict(entry.make())
        out, _ = tx.update(to_tree(x), tx.init(to_tree(x)))
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(out)])

    def formula(x):
        return _flat(entry.expected(to_tree(x)))[0]

    def derivatives(x, along):
        remat = jax.checkpoint(lambda x: differences.loss(clip(x)))
        return differences.by_jax(clip, x, along), jax.grad(remat)(x)

    with jax.enable_x64(True), jax.debug_nans(True):
        by_jax = jax.jit(derivatives)
        found, remat = jax.device_get(by_jax(flat, along))
        at_zero, _ = jax.device_get(by_jax(0 * flat, along))
    assert helpers.differs(formula(flat), flat)
    _compare(entry.id, found, formula, flat, along, smooth)
    np.testing.assert_allclose(remat, found.slope, rtol=1e-12)
    identity = entry.slope_at_zero
    weights = differences.weights(flat.size)[0]
    np.testing.assert_array_equal(at_zero.tangent, identity * along)
    np.testing.assert_array_equal(at_zero.slope, identity * weights)
    assert np.all(np.isfinite([at_zero.forward, at_zero.reverse]))


def _flat(tree):
    """A tree as one vector, and the way back."""
    leaves, treedef = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def to_tree(x):
        split = jnp.split if isinstance(x, jax.Array) else np.split
        parts = zip(split(x, ends), leaves, strict=True)
        return jax.tree.unflatten(treedef, [a.reshape(b.shape) for a, b in parts])

    return np.concatenate([np.ravel(leaf) for leaf in leaves]), to_tree
