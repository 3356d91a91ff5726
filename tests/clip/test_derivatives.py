"""First and second derivatives, both modes, under vmap, against differences.

The oracle is NumPy's, in float64, on one long vector cut into blocks by index.
"""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import responses
from optclip.norms import Norm
from tests.support import differences, helpers, oracles
from tests.support.registry import ENTRIES, square_root_capper

KERNEL, BIAS = [0, 1, 2, 3, 4, 5], [6, 7]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A value of one setting: what optclip is given, and what the oracle needs.

    Attributes:
      name: what the tests call it.
      given: the scope, response or norm.
      oracle: which elements share a norm, or the formula of a response.
      traits: what of it meets the other settings: see tests/support/covering.py.
    """

    name: str
    given: Any
    oracle: Any
    traits: tuple[str, ...]


SCOPES = [
    Choice("tree", "tree", [KERNEL + BIAS], ("tree",)),
    Choice("leaf", "leaf", [KERNEL, BIAS], ("leaf",)),
    Choice("axes", optclip.axes(0), [[0, 2, 4], [1, 3, 5], BIAS], ("axes",)),
    Choice(
        "groups",
        optclip.groups({"bias": "b", "kernel": "k"}),
        [KERNEL, BIAS],
        ("groups",),
    ),
    Choice("element", "element", [[i] for i in range(8)], ("element",)),
]
# Those with a kink at the threshold or with a curve; those that move an element to the
# bound itself or scale it.
RESPONSES = [
    Choice("hard", "hard", oracles.hard, ("kink", "moves")),
    Choice("smooth", "smooth", oracles.smooth, ("curve", "scales")),
    Choice(
        "smooth-1",
        responses.Smooth(1.0),
        lambda n, c: 1 / (1 + n / c),
        ("curve", "scales"),
    ),
    Choice("normalize", "normalize", oracles.normalized, ("curve", "moves")),
    Choice(
        "user",
        square_root_capper,
        lambda n, c: math.sqrt(c / n) if n > c else 1.0,
        ("kink", "scales"),
    ),
]
# Measured in two passes, or relative to the largest element; the L2 norm over a count.
NORMS = [
    Choice("l1", Norm(1.0), None, ("two-pass",)),
    Choice("l2", Norm(2.0), None, ("two-pass",)),
    Choice("inf", Norm(np.inf), None, ("two-pass",)),
    Choice("rms", Norm(2.0, 0.5), None, ("count",)),
    Choice("average", Norm(2.0, 1.0), None, ("count",)),
    Choice("4", Norm(4.0), None, ("largest",)),
    Choice("half", Norm(0.5), None, ("largest",)),
]


def is_new(scope, response, norm):
    """Elements have one norm; one by count is the L2 norm over a number."""
    if scope.name == "element":
        return norm.name == "l2"
    return norm.given.per_count == 0 or response.name == "hard"


@dataclasses.dataclass(frozen=True)
class Case:
    """One clip of a vector of eight: by optclip, and by its formula."""

    scope: Choice
    response: Choice
    norm: Choice

    @property
    def blocks(self) -> list[list[int]]:
        return self.scope.oracle

    def clip(self, x: Any, c: Any, eps: Any = 0.0) -> Any:
        tx = optclip.clip_by(
            c,
            over=self.scope.given,
            response=self.response.given,
            norm=self.norm.given,
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
        if self.scope.name == "element" and "moves" in self.response.traits:
            eps = 0.0
        for block in self.blocks:
            n = self.measure(x[block])
            out[block] *= self.response.oracle(n + eps, c) if n else 1.0
        return out

    def measure(self, values: np.ndarray) -> float:
        norm = self.norm.given
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
        if self.norm.given.ord < 2 and self.scope.name != "element":
            smooth &= x != 0
        if "curve" in self.response.traits:
            for block in self.blocks:
                smooth[block] &= bool(np.any(x[block]))
        return smooth


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


@pytest.mark.covering(scope=SCOPES, response=RESPONSES, norm=NORMS, where=is_new)
def test_by_updates_threshold_and_eps(scope, response, norm):
    """Both orders and modes, under vmap over the points."""
    case = Case(scope, response, norm)
    named = points(case)
    xs = np.stack(list(named.values()))
    smooth = np.stack([case.without_kinks(x) for x in xs])
    turns = np.random.default_rng(5).uniform(-1, 1, xs.shape)
    along = np.where(smooth, turns * np.stack([differences.sizes(x) for x in xs]), 0.0)

    def derivatives(x, along):
        return differences.by_jax(case.clip, x, along, 1.0, 0.0)

    with jax.enable_x64(True):
        found = jax.device_get(helpers.quick_jit(jax.vmap(derivatives))(xs, along))
    for i, (name, x) in enumerate(named.items()):
        own = jax.tree.map(lambda part, i=i: part[i], found)
        formula = functools.partial(case.formula, c=1.0)
        _compare(name, own, formula, x, along[i], smooth[i])
        _compare_numbers(name, own.by_numbers, case, x)


def _compare(name, found, formula, x, along, smooth):
    """In units of the coordinates, so that large and small ones weigh alike."""
    expected = differences.by_differences(formula, x, along)
    unit = np.where(smooth, differences.sizes(x), 0.0)
    for part in differences.OF_UPDATES:
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


def small_gradients():
    """Two leaves, one past every threshold, with a zero in each."""
    rng = np.random.default_rng(1)
    bias, kernel = rng.normal(size=3), 5.0 * rng.normal(size=(3, 2))
    bias[1] = kernel[2, 0] = 0.0
    return {"dense": {"bias": bias}, "out": [kernel]}


def clip_of(entry, to_tree):
    """A transformation as a function from a vector to a vector."""

    def clip(x):
        tx = helpers.strict(entry.make())
        out, _ = tx.update(to_tree(x), tx.init(to_tree(x)))
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(out)])

    return clip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_every_transformation_has_the_derivative_of_differences(entry):
    """Not under vmap, so that branches stay branches; at zero the identity."""
    flat, to_tree = _flat(small_gradients())
    smooth = flat != 0
    unit = differences.sizes(flat)
    along = np.random.default_rng(5).uniform(-1, 1, flat.shape) * unit * smooth

    def formula(x):
        return _flat(entry.expected(to_tree(x)))[0]

    with jax.enable_x64(True), jax.debug_nans(True):
        by_jax = functools.partial(differences.by_jax, clip_of(entry, to_tree))
        by_jax = helpers.quick_jit(by_jax)
        found = jax.device_get(by_jax(flat, along))
        at_zero = jax.device_get(by_jax(0 * flat, along))
    assert helpers.differs(formula(flat), flat)
    _compare(entry.id, found, formula, flat, along, smooth)
    identity = entry.slope_at_zero
    weights = differences.weights(flat.size)[0]
    np.testing.assert_array_equal(at_zero.tangent, identity * along)
    np.testing.assert_array_equal(at_zero.slope, identity * weights)
    assert np.all(np.isfinite([at_zero.forward, at_zero.reverse]))


# One with the branch to a second pass, one with slices, one of elements.
REMATERIALIZED = [e for e in ENTRIES if e.id in ("global-norm", "norm-axis", "value")]


@pytest.mark.parametrize("entry", REMATERIALIZED, ids=lambda e: e.id)
def test_a_rematerialized_clip_is_the_same(entry):
    """What the backward pass computes once more is what the forward pass had."""
    flat, to_tree = _flat(small_gradients())
    clip = clip_of(entry, to_tree)
    weights = differences.weights(flat.size)[0]

    def slopes(x):
        return [jax.vjp(f, x)[1](weights)[0] for f in (clip, jax.checkpoint(clip))]

    with jax.enable_x64(True):
        plain, remat = helpers.quick_jit(slopes)(flat)
    assert helpers.differs(plain, weights)
    chex.assert_trees_all_close(remat, plain, rtol=1e-12, atol=1e-15)


def _flat(tree):
    """A tree as one vector, and the way back."""
    leaves, treedef = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def to_tree(x):
        split = jnp.split if isinstance(x, jax.Array) else np.split
        parts = zip(split(x, ends), leaves, strict=True)
        return jax.tree.unflatten(treedef, [a.reshape(b.shape) for a, b in parts])

    return np.concatenate([np.ravel(leaf) for leaf in leaves]), to_tree
