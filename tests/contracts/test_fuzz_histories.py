"""Methods with memory follow their papers in float64 on any history of gradients.

pytest tests/contracts/test_fuzz_histories.py --full    # 20,000 histories, or 289
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import optclip
from optclip import recipes, thresholds
from tests.support import helpers, methods, rules

STEPS = 30
ENTRIES = 4
INF = math.inf
# Relative to the largest number so far: memories are float32.
ROUNDING = 3e-6
# Seventeen cases share the examples.
SHARE = 1 / 17


def size(g):
    return float(np.sqrt(np.sum(g**2)))


def by_norm(oracle, of_leaves=False):
    """Clip by an oracle of thresholds for one norm or several."""

    def step(g):
        norm = size(g)
        limit = oracle.step(np.array([norm]))[0] if of_leaves else oracle.step(norm)
        return g * min(1.0, limit / norm) if norm > 0 else g

    return step


def by_factor(oracle):
    """Scale by an oracle of factors; zeros are not remembered."""

    def step(g):
        norm = size(g)
        factor = oracle.step(np.array([norm if norm > 0 else np.nan]))[0]
        return g * factor if norm > 0 else g

    return step


def whole(rule):
    return optclip.clip_by_global_norm(rule)


def to_one(g):
    return g * min(1.0, 1.0 / size(g)) if size(g) > 0 else g


AGGC = {"decay": 0.9, "min_norm": 0.0, "max_shrink": 0.2, "max_growth": 1.5}
ALL = optclip.by_path(lambda path: "all")
BY_LEAF = {"over": "leaf", "response": "normalize"}
MEDIAN, SECOND = thresholds.quantile(0.5, 100), thresholds.second_moment(25.0, 0.9, 3)
PERCENTILE = thresholds.zscore(1.0, 0.9, 3, "percentile")
# The transformation, and a factory of an oracle of its paper in its initial state.
CASES = {
    "autoclip": (recipes.autoclip(0.3, 8), lambda: by_norm(rules.AutoClip(0.3, 8))),
    "median": (whole(MEDIAN), lambda: by_norm(rules.AutoClip(0.5, 100))),
    "levanter": (
        recipes.mean_std_clip(1.0, 6),
        lambda: by_norm(rules.Levanter(1.0, 6)),
    ),
    "zclip": (
        recipes.zclip(1.5, 0.8, 4, max_norm=INF),
        lambda: by_norm(rules.ZClip(1.5, 0.8, 4)),
    ),
    "zclip-capped": (
        recipes.zclip(2.5, 0.9, 1, max_norm=2.0),
        lambda: by_norm(rules.ZClip(2.5, 0.9, 1, max_norm=2.0)),
    ),
    "percentile": (
        whole(PERCENTILE),
        lambda: by_norm(rules.ZClip(1.0, 0.9, 3, "percentile")),
    ),
    "adagc": (
        recipes.adagc(1.05, 0.9, 3, 1.0),
        lambda: by_norm(rules.AdaGC(1.05, 0.9, 3, 1.0), of_leaves=True),
    ),
    "ema": (
        whole(thresholds.ema(1.5, 0.5, 0, INF)),
        lambda: by_norm(rules.AdaGC(1.5, 0.5, 0, INF), of_leaves=True),
    ),
    "olmo_ratio": (
        recipes.olmo_ratio(1.1, 0.9),
        lambda: by_factor(methods.OlmoRatio(1.1, 0.9)),
    ),
    "aggc": (
        optclip.skip(recipes.aggc(ALL, high=1.2, low=0.5, **AGGC)),
        lambda: by_factor(methods.Aggc(1.2, 0.5, **AGGC)),
    ),
    "spam": (
        optclip.skip(optclip.clip_by_value(SECOND)),
        lambda: methods.Spam(25.0, 0.9, 4, 10**6).step,
    ),
    "stable_spam-elements": (
        optclip.clip_by_value(thresholds.ema_of_max(0.9), response="proportional"),
        lambda: methods.StableSpamMax(0.9).step,
    ),
    "stable_spam-leaves": (
        optclip.clip_by(thresholds.mean_over_rms(), **BY_LEAF),
        lambda: methods.StableSpamNorm().step,
    ),
    "acclip": (
        optclip.skip(recipes.acclip(b2=0.9)),
        lambda: methods.Acclip(b2=0.9).step,
    ),
    "stable_adamw": (
        optclip.skip(recipes.stable_adamw(b2=0.9)),
        lambda: functools.partial(
            methods.StableAdamW(b2=0.9).step, w=np.zeros(ENTRIES)
        ),
    ),
    "sclip": (recipes.sclip(2.0, 9.0), lambda: methods.SClip(2.0, 9.0).step),
    "uclip": (
        recipes.uclip(optclip.clip_by_global_norm(1.0)),
        lambda: methods.UClip(to_one).step,
    ),
}


@functools.cache
def scanned(case):
    """Run the transformation over a whole history, compiled once."""
    tx, _ = CASES[case]
    zeros = jnp.zeros(ENTRIES)

    def step(state, g):
        out, state = tx.update(g, state, zeros)
        return state, out

    return helpers.quick_jit(lambda rows: jax.lax.scan(step, tx.init(zeros), rows)[1])


@st.composite
def histories(draw):
    """Usual steps, spikes of up to a million, zeros, NaN and inf."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    level = draw(st.sampled_from([1e-2, 1.0, 1.0, 30.0]))
    exponents = st.one_of(*[st.floats(-1, 1)] * 6, st.floats(-3, 6))
    special = st.sampled_from([0.0, math.nan, INF, -INF])
    kinds = st.one_of(*[exponents.map(lambda e: 10.0**e)] * 8, special)
    sizes = draw(st.lists(kinds, min_size=STEPS, max_size=STEPS))
    rows = rng.normal(size=(STEPS, ENTRIES)) * level
    for row, length in zip(rows, sizes, strict=True):
        if math.isfinite(length):
            row *= length
        else:
            row[draw(st.integers(0, ENTRIES - 1))] = length
    return rows.astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_memory_any_history_follows_paper(case, holds):
    is_clipped = []

    def prop(rows):
        outs = np.asarray(scanned(case)(rows), np.float64)
        step = CASES[case][1]()
        largest = 0.0
        for i, (row, out) in enumerate(zip(rows.astype(np.float64), outs, strict=True)):
            # A quantile of no finite norm is undefined.
            with np.errstate(all="ignore"), contextlib.suppress(IndexError):
                expected = step(row)
            if not np.all(np.isfinite(row)):
                continue
            seen = np.abs([expected, row] if case == "uclip" else expected)
            largest = max(largest, float(np.max(seen)))
            error = np.max(np.abs(out - expected))
            room = 1e-4 * np.max(np.abs(expected)) + ROUNDING * largest
            assert error <= room, (i, error)
            is_clipped.append(not np.allclose(expected, row, rtol=1e-4))

    holds(prop, histories(), SHARE)
    assert np.mean(is_clipped) > 0.02
