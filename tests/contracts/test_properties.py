"""Clipping follows its formula on hostile trees, and keeps its invariants on any tree.

pytest tests/contracts/test_properties.py --full    # 20,000 examples of each
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import optclip
from tests.support import covering, helpers, norm_bounds, oracles, strategies
from tests.support.registry import ENTRIES, by_trait

# Each trait, each order, and the two averages, which divide before they square.
ORDERS = {"norm", "norm-l1", "average-norm", "rms", "global-norm"}
ORDERS |= {"global-norm-inf", "global-norm-3", "singular-value", "spectral-norm"}
FORMULAS = [e for e in ENTRIES if covering.full or e in by_trait() or e.id in ORDERS]


@pytest.mark.covering(
    entry=FORMULAS,
    dtype=helpers.DTYPES,
    # Responses receive norms in float32, of leaves of any dtype.
    where=lambda entry, dtype: (
        covering.full or dtype == "float32" or entry.response == "hard"
    ),
)
def test_entry_hostile_magnitudes_follow_formula(entry, dtype):
    # Norms are computed in float32, whose sums the compiler may reorder. An optimized
    # program costs five times as much.
    is_sum = dtype == "float32" and entry.id in ORDERS
    jit = helpers.optimized_jit if is_sum else helpers.quick_jit

    @jit
    def clip(tree, threshold):
        tx = helpers.tx_without_promotion(
            entry.make(threshold if entry.scalar_threshold else None)
        )
        return tx.update(tree, tx.init(tree))[0]

    changes = []
    for name in strategies.PATTERNS:
        tree, scale = strategies.pattern(name, dtype)
        active = entry.threshold[1] if entry.scalar_threshold else 1.0
        # With two bounds, both would have to be scaled.
        threshold = np.float32(active * (entry.id == "value-two-bounds" or scale))
        clipped = clip(tree, threshold)
        helpers.assert_same_types(clipped, tree)
        with np.errstate(over="ignore", under="ignore"):
            expected = entry.expected(helpers.as_xla_sees(tree), float(threshold))
        helpers.assert_follows(clipped, expected, tree, entry.roundings)
        changes.append(helpers.differs(clipped, tree))
    assert np.mean(changes) > 1 / 3


# Several kinds of scopes and orders of norms.
CLIPS = {
    "global": optclip.clip_by_global_norm,
    "global-1": functools.partial(optclip.clip_by_global_norm, ord=1.0),
    "global-inf": functools.partial(optclip.clip_by_global_norm, ord=math.inf),
    "leaf": optclip.clip_by_norm,
    "axis": functools.partial(optclip.clip_by_norm, axis=(0,)),
    "rms": optclip.clip_by_rms,
    "value": optclip.clip_by_value,
}
GLOBAL = ("global", "global-1", "global-inf")
# Every case compiles a program.
CASES = [
    (name, dtype)
    for i, name in enumerate(CLIPS)
    for j, dtype in enumerate(helpers.DTYPES)
    if covering.full or i % 3 == j
]


@functools.cache
def compiled(name, **options):
    def clip(tree, threshold):
        tx = helpers.tx_without_promotion(
            CLIPS[name](threshold, record=False, **options)
        )
        return tx.update(tree, tx.init(tree))[0]

    return helpers.optimized_jit(clip)


def wide(tree):
    return [helpers.as_float64(x) for x in jax.tree.leaves(tree)]


def norms(name, tree):
    """Return the norms that this clipping bounds, in float64, as arrays."""
    leaves = wide(tree)
    if name in GLOBAL:
        order = {"global-1": 1.0, "global-inf": math.inf}.get(name, 2.0)
        return [np.array(oracles.tree_norm(leaves, order))]
    if name == "value":
        return [np.abs(x) for x in leaves]
    if name == "axis":
        return [np.apply_along_axis(oracles.norm, 0, x) for x in leaves]
    measure = oracles.rms if name == "rms" else oracles.norm
    return [np.array(measure(x)) for x in leaves]


def largest_ratio(name, tree, threshold):
    return max(float(np.max(n)) for n in norms(name, tree)) / float(threshold)


@st.composite
def problems(draw, **kwargs):
    """Draw a clipping, a tree, and a threshold near or far from its norms."""
    name, dtype = draw(st.sampled_from(CASES))
    tree = draw(strategies.finite_trees(dtype, **kwargs))
    near = st.sampled_from([1.0, 1 - 1e-7, 1 + 1e-7, 0.5, 2.0])
    ratio = draw(st.one_of(near, st.floats(-8, 1).map(lambda e: 10.0**e)))
    largest = largest_ratio(name, tree, 1.0) or 1.0
    return name, dtype, tree, np.float32(min(largest * ratio, 1e38))


def loses_last_bits(name, dtype, tree, threshold):
    """Return whether an element of the output may be subnormal."""
    tiny = max(float(jnp.finfo(dtype).tiny), 2.0**-126)
    least = 1 / max(1.0, largest_ratio(name, tree, threshold))
    return any(np.any((x != 0) & (np.abs(x) * least < 2 * tiny)) for x in wide(tree))


def check(holds, prop, strategy):
    """Try the property; in a fifth of the examples it must return True."""
    outcomes = []
    share = 1.0 if covering.full else 0.2
    holds(lambda drawn: outcomes.append(prop(*drawn)), strategy, share)
    assert sum(outcomes) >= len(outcomes) / 5


def test_clips_norm_is_within_bound_identical_below_and_idempotent(holds):
    """Below its threshold a tree is identical; clipping again moves at most one ulp."""

    def prop(name, dtype, tree, threshold):
        once = compiled(name)(tree, threshold)
        twice = compiled(name)(once, threshold)
        info = jnp.finfo(dtype)
        floor = max(float(info.smallest_subnormal), 2.0**-126)
        for a, b in zip(wide(once), wide(twice), strict=True):
            assert np.all(np.abs(a - b) <= 1.5 * float(info.eps) * np.abs(a) + floor)
        if largest_ratio(name, tree, threshold) < 1 - 1e-6:
            helpers.assert_identical(once, tree)
        if loses_last_bits(name, dtype, tree, threshold):
            return False
        assert largest_ratio(name, once, threshold) - 1 <= norm_bounds.room(dtype, 2.0)
        return helpers.differs(once, tree)

    check(holds, prop, problems())


def test_strict_norm_is_never_above_and_clipping_again_is_identity(holds):
    def prop(name, dtype, tree, threshold):
        clip = compiled(name, strict=True)
        out = clip(tree, threshold)
        assert all(np.all(n <= float(threshold)) for n in norms(name, out))
        helpers.assert_identical(clip(out, threshold), out)
        return helpers.differs(out, tree)

    check(holds, prop, problems(lowest=-140))
