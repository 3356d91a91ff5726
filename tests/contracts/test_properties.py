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
from tests.support import covering, helpers, oracles, strategies
from tests.support.registry import BY_SCOPE, ENTRIES
from tools import bounds

SHARE = strategies.fraction(full=1.0, quick=0.2)


def entry_clip(entry, run):
    def update(tree, threshold):
        tx = helpers.strict(entry.make(threshold if entry.scalar_threshold else None))
        return tx.update(tree, tx.init(tree))[0]

    return run(update)


def follows_formula(clip, entry, tree, scale):
    """Compare with the formula; return whether anything was clipped."""
    active = entry.threshold[1] if entry.scalar_threshold else 1.0
    # With two bounds, both would have to be scaled.
    threshold = np.float32(active * (1.0 if entry.id == "value-two-bounds" else scale))
    clipped = clip(tree, threshold)
    helpers.assert_same_types(clipped, tree)
    with np.errstate(over="ignore", under="ignore"):
        expected = entry.expected(helpers.as_xla_sees(tree), float(threshold))
    problem = helpers.wrong(clipped, expected, tree, entry.roundings)
    assert problem is None, f"{threshold}: {problem}"
    return helpers.differs(clipped, tree)


@pytest.mark.covering(
    entry=ENTRIES,
    dtype=strategies.DTYPES,
    # Responses receive norms in float32, of leaves of any dtype.
    where=lambda entry, dtype: (
        covering.full or dtype == "float32" or entry.response == "hard"
    ),
)
def test_entry_hostile_magnitudes_follow_formula(entry, dtype):
    clip = entry_clip(entry, helpers.optimized_jit)
    cases = [strategies.pattern(name, dtype) for name in strategies.PATTERNS]
    num_clipped = sum(follows_formula(clip, entry, *case) for case in cases)
    assert num_clipped > len(cases) / 3


@pytest.mark.covering(entry=BY_SCOPE, name=tuple(strategies.STRUCTURES))
def test_entry_hostile_structures_follow_formula(entry, name):
    """Structures concern the scope; responses only receive norms."""
    tree = strategies.STRUCTURES[name]
    follows_formula(entry_clip(entry, helpers.quick_jit), entry, tree, 1.0)


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
    for j, dtype in enumerate(strategies.DTYPES)
    if covering.full or i % 3 == j
]


@functools.cache
def compiled(name, jit=helpers.optimized_jit, **options):
    def clip(tree, threshold):
        tx = helpers.strict(CLIPS[name](threshold, record=False, **options))
        return tx.update(tree, tx.init(tree))[0]

    return jit(clip)


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
def problems(draw, names=tuple(CLIPS), **kwargs):
    """Draw a clipping, a tree, and a threshold near or far from its norms."""
    name, dtype = draw(st.sampled_from([case for case in CASES if case[0] in names]))
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
    holds(lambda drawn: outcomes.append(prop(*drawn)), strategy, SHARE)
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
        assert largest_ratio(name, once, threshold) - 1 <= bounds.room(dtype, 2.0)
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


def test_global_clips_leaves_keep_their_proportions(holds):
    def prop(name, dtype, tree, threshold):
        if loses_last_bits(name, dtype, tree, threshold):
            return False
        out = compiled(name)(tree, threshold)
        before, after = (np.concatenate([*map(np.ravel, wide(x))]) for x in (tree, out))
        factors = after[before != 0] / before[before != 0]
        if factors.size:
            eps = float(jnp.finfo(dtype).eps)
            assert np.ptp(factors) <= 1.01 * eps * np.max(factors)
        return helpers.differs(out, tree)

    check(holds, prop, problems(names=GLOBAL))


def test_clips_power_of_two_scales_through(holds):
    """Scaling gradients and threshold by 2**k scales the output exactly by 2**k."""

    def prop(problem, power):
        name, dtype, tree, threshold = problem
        factor = np.float32(2.0**power)

        def scaled(x):
            return np.asarray(x) * factor.astype(x.dtype)

        clipped = compiled(name)(tree, threshold)
        larger = compiled(name)(jax.tree.map(scaled, tree), threshold * factor)
        if loses_last_bits(name, dtype, tree, threshold):
            return False
        helpers.assert_identical(larger, jax.tree.map(scaled, clipped))
        return helpers.differs(clipped, tree)

    check(holds, prop, st.tuples(problems(lowest=-8, highest=2), st.integers(0, 8)))


def test_clips_order_and_split_of_leaves_do_not_matter(holds):
    def prop(name, dtype, tree, threshold):
        bias, kernel, out = jax.tree.leaves(tree)
        clip = compiled(name, helpers.quick_jit)
        parts = {"p": out, "q": bias[::-1], "r": kernel[:1], "s": kernel[:0:-1]}
        apart = jax.tree.map(np.asarray, clip(parts, threshold))
        kernel = np.concatenate([apart["r"], apart["s"][::-1]])
        joined = {
            "dense": {"bias": apart["q"][::-1], "kernel": kernel},
            "out": [apart["p"]],
        }
        whole = compiled(name)(tree, threshold)
        helpers.assert_close(joined, whole, ulps=2)
        return helpers.differs(whole, tree)

    check(holds, prop, problems(names=(*GLOBAL, "value")))


def test_clips_larger_threshold_leaves_no_element_smaller(holds):
    def prop(problem, factor):
        name, _, tree, threshold = problem
        low = compiled(name)(tree, threshold)
        high = compiled(name)(tree, np.float32(min(threshold * factor, 1e38)))
        for a, b in zip(wide(low), wide(high), strict=True):
            assert np.all(np.abs(a) <= np.abs(b))
        return helpers.differs(low, high)

    check(holds, prop, st.tuples(problems(), st.floats(1.0, 3.0)))


def test_clips_finite_input_gives_no_nan(holds):
    """By any response, at any magnitude, at a threshold of 0 too."""

    def prop(problem, response, is_zero):
        name, _, tree, threshold = problem
        clip = compiled(name, helpers.quick_jit, response=response)
        out = clip(tree, np.float32(0) if is_zero else threshold)
        assert not any(np.any(np.isnan(x)) for x in wide(out))
        return helpers.differs(out, tree)

    responses = st.sampled_from(["hard", "smooth", "normalize"])
    drawn = problems(lowest=-149, highest=118)
    check(holds, prop, st.tuples(drawn, responses, st.booleans()))
