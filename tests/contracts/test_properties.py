"""A search for counterexamples: what holds of every clip, whatever the numbers.

    pytest tests/contracts/test_properties.py --full      # 20,000 examples of each; without it 300

The shapes are few, because each new one has to be compiled; the values are drawn.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import optclip
from tests.support import covering, helpers, oracles
from tools import bounds

DTYPES = ["float32", "bfloat16", "float16"]
ULP = {dtype: float(jnp.finfo(dtype).eps) for dtype in DTYPES}
SHAPES = {"w": (3, 5), "b": (4,), "s": (1,)}

# Scopes of several kinds, norms of several orders; each with a norm oracle for a leaf.
CLIPS = {
    "global": lambda c, **k: optclip.clip_by_global_norm(c, **k),
    "global-1": lambda c, **k: optclip.clip_by_global_norm(c, ord=1.0, **k),
    "global-inf": lambda c, **k: optclip.clip_by_global_norm(c, ord=math.inf, **k),
    "leaf": lambda c, **k: optclip.clip_by_norm(c, **k),
    "axis": lambda c, **k: optclip.clip_by_norm(c, axis=(0,), **k),
    "rms": lambda c, **k: optclip.clip_by_rms(c, **k),
    "value": lambda c, **k: optclip.clip_by_value(c, **k),
}
# Each clip meets float32 and one narrow dtype: every one is a program to compile.
CASES = [
    (name, dtype)
    for i, name in enumerate(CLIPS)
    for dtype in (DTYPES if covering.full else [DTYPES[0], DTYPES[1 + i % 2]])
]


@functools.cache
def compiled(name, jit=jax.jit, **options):
    """One of the clips: as users run it, where roundings are what is promised."""

    def clip(tree, threshold):
        tx = helpers.strict(CLIPS[name](threshold, record=False, **options))
        return tx.update(tree, tx.init(tree))[0]

    return jit(clip)


def norms(name, tree):
    """The norms that the clip of this name bounds, in float64, one an array."""
    leaves = [helpers.as_float64(x) for x in jax.tree.leaves(tree)]
    if name.startswith("global"):
        order = {"global-1": 1.0, "global-inf": math.inf}.get(name, 2.0)
        return [np.array(oracles.tree_norm(leaves, order))]
    if name == "value":
        return [np.abs(x) for x in leaves]
    if name == "axis":
        return [np.apply_along_axis(oracles.norm, 0, x) for x in leaves]
    measure = oracles.rms if name == "rms" else oracles.norm
    return [np.array(measure(x)) for x in leaves]


def shares(name, tree, threshold):
    """How many times the threshold the norms are."""
    return [n / threshold for n in norms(name, tree)]


@st.composite
def trees(draw, dtype, lowest=None, highest=None):
    """Finite leaves around one power of two, some of them zero or far off."""
    info = jnp.finfo(dtype)
    lowest = max(info.minexp + 20, -40) if lowest is None else lowest
    highest = min(info.maxexp - 2, 100) if highest is None else highest
    center = draw(st.integers(lowest, highest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    zeros = draw(st.sampled_from([0.0, 0.0, 0.5, 0.95]))
    spread = draw(st.sampled_from([0, 0, 3, 10]))
    equal = draw(st.booleans())
    largest = float(info.max) / 2

    def leaf(shape):
        x = np.ones(shape) if equal else rng.normal(size=shape)
        x = np.ldexp(x, center + rng.integers(-spread, 1, size=shape))
        x = np.where(rng.random(shape) < zeros, 0.0, x)
        return jnp.asarray(np.clip(x, -largest, largest), dtype)

    return {key: leaf(shape) for key, shape in SHAPES.items()}


@st.composite
def problems(draw, names=tuple(CLIPS), **kwargs):
    """A clip, a tree, and a threshold near a norm of the tree, or far from all."""
    cases = [case for case in CASES if case[0] in names]
    name, dtype = draw(st.sampled_from(cases))
    tree = draw(trees(dtype, **kwargs))
    largest = max(float(np.max(n)) for n in norms(name, tree))
    share = draw(
        st.one_of(
            st.sampled_from([1.0, 1 - 1e-7, 1 + 1e-7, 0.5, 2.0]),
            st.floats(-8, 1).map(lambda e: 10.0**e),
        )
    )
    threshold = np.float32(min((largest or 1.0) * share, 1e38))
    return name, dtype, tree, threshold


def in_normal_range(name, dtype, tree, threshold):
    """Whether no element of the output can have lost its last bits."""
    tiny = max(float(jnp.finfo(dtype).tiny), 2.0**-126)
    least = 1 / max(1.0, *(float(np.max(s)) for s in shares(name, tree, threshold)))
    sizes = [np.abs(helpers.as_float64(x)) for x in jax.tree.leaves(tree)]
    return all(np.all((x == 0) | (x * least >= 2 * tiny)) for x in sizes)


def test_the_norm_is_within_its_bound(holds):
    """The true norm is at most `(1 + 2e-6)` times the threshold, and one rounding."""
    seen = []

    def prop(problem):
        name, dtype, tree, threshold = problem
        out = compiled(name)(tree, threshold)
        if in_normal_range(name, dtype, tree, threshold):
            excess = max(np.max(s) for s in shares(name, out, float(threshold))) - 1
            assert excess <= bounds.room(dtype, 2.0)
            seen.append(helpers.differs(out, tree))

    holds(prop, problems())
    assert sum(seen) > len(seen) / 4


def test_strict_bound_and_idempotence(holds):
    """Never above, not by a bit, and clipping again changes nothing."""
    seen = []

    def prop(problem):
        name, _, tree, threshold = problem
        clip = compiled(name, strict=True)
        out = clip(tree, threshold)
        assert all(np.all(n <= float(threshold)) for n in norms(name, out))
        helpers.assert_identical(clip(out, threshold), out)
        seen.append(helpers.differs(out, tree))

    holds(prop, problems(lowest=-140))
    assert sum(seen) > len(seen) / 4


def test_idempotent_to_one_ulp_and_its_rounding(holds):
    def prop(problem):
        name, dtype, tree, threshold = problem
        once = compiled(name)(tree, threshold)
        twice = compiled(name)(once, threshold)
        for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
            a, b = helpers.as_float64(a), helpers.as_float64(b)
            floor = max(float(jnp.finfo(dtype).smallest_subnormal), 2.0**-126)
            assert np.all(np.abs(a - b) <= 1.5 * ULP[dtype] * np.abs(a) + floor)

    holds(prop, problems())


def test_identity_below_the_threshold(holds):
    """To the bit."""
    seen = []

    def prop(problem):
        name, _, tree, threshold = problem
        inside = all(np.all(s < 1 - 1e-6) for s in shares(name, tree, float(threshold)))
        if inside:
            helpers.assert_identical(compiled(name)(tree, threshold), tree)
        seen.append(inside)

    holds(prop, problems())
    assert sum(seen) > len(seen) / 20


def test_leaves_that_share_a_norm_keep_their_proportions(holds):
    """All leaves that share a norm keep their proportions, to a rounding each."""
    seen = []

    def prop(problem):
        name, dtype, tree, threshold = problem
        if not in_normal_range(name, dtype, tree, threshold):
            return
        out = compiled(name)(tree, threshold)
        before = np.concatenate(
            [np.ravel(x) for x in helpers.as_float64(tree).values()]
        )
        after = np.concatenate([np.ravel(x) for x in helpers.as_float64(out).values()])
        factors = after[before != 0] / before[before != 0]
        if factors.size:
            assert np.ptp(factors) <= 1.01 * ULP[dtype] * np.max(factors)
        seen.append(helpers.differs(out, tree))

    holds(prop, problems(names=("global", "global-1", "global-inf")))
    assert sum(seen) > len(seen) / 4


def test_powers_of_two_scale_through(holds):
    """Gradients and threshold times 2**k give the output times 2**k, to the bit."""
    seen = []

    def prop(problem, power):
        name, dtype, tree, threshold = problem
        factor = np.float32(2.0**power)
        larger = jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)
        expected = compiled(name)(tree, threshold)
        found = compiled(name)(larger, threshold * factor)
        if not in_normal_range(name, dtype, tree, threshold):
            return
        helpers.assert_identical(
            found, jax.tree.map(lambda x: x * factor.astype(x.dtype), expected)
        )
        seen.append(helpers.differs(expected, tree))

    drawn = st.tuples(problems(lowest=-8, highest=2), st.integers(0, 8))
    holds(lambda both: prop(*both), drawn)
    assert sum(seen) > len(seen) / 4


def test_order_and_split_of_leaves(holds):
    """Permuted leaves and elements, and a leaf cut in two, are clipped the same."""

    def prop(problem):
        name, _, tree, threshold = problem
        w, b, s = (np.asarray(tree[key]) for key in "wbs")
        whole = compiled(name)(tree, threshold)
        apart = compiled(name, helpers.quick_jit)(
            {"p": s, "q": b[::-1], "r": w[:1], "s": w[:0:-1]}, threshold
        )
        joined = {
            "w": np.concatenate([apart["r"], apart["s"][::-1]]),
            "b": apart["q"][::-1],
            "s": apart["p"],
        }
        helpers.assert_close(joined, whole, ulps=2)

    holds(prop, problems(names=("global", "global-1", "global-inf", "value")))


def test_monotone_in_the_threshold(holds):
    """A larger threshold leaves no element smaller."""

    def prop(problem, larger):
        name, _, tree, threshold = problem
        low = compiled(name)(tree, threshold)
        high = compiled(name)(tree, np.float32(min(threshold * larger, 1e38)))
        for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(high), strict=True):
            a, b = np.abs(helpers.as_float64(a)), np.abs(helpers.as_float64(b))
            assert np.all(a <= b)

    holds(lambda both: prop(*both), st.tuples(problems(), st.floats(1.0, 3.0)))


def test_no_nan_from_finite_input(holds):
    """Not from any response either, at any magnitude, nor at a threshold of 0."""
    responses = ["hard", "smooth", "normalize"]

    def prop(problem, response, is_zero):
        name, _, tree, threshold = problem
        clip = compiled(name)
        if response != "hard":
            clip = compiled(name, helpers.quick_jit, response=response)
        out = clip(tree, np.float32(0) if is_zero else threshold)
        assert not any(np.any(np.isnan(x)) for x in helpers.as_float64(out).values())

    drawn = problems(lowest=-149, highest=118)
    holds(
        lambda both: prop(*both),
        st.tuples(drawn, st.sampled_from(responses), st.booleans()),
    )
