"""What remembers, on any history of gradients, against its paper in float64.

pytest tests/contracts/test_fuzz_histories.py --full     # 19,992 histories; without it 289
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
from tests.support import methods, rules

STEPS = 30
ENTRIES = 4
INF = math.inf
# Of the largest number so far: what is remembered is float32.
ROUNDING = 3e-6
# Seventeen cases share the examples asked for.
SHARE = 1 / 17


def size(g):
    return float(np.sqrt(np.sum(g**2)))


def by_norm(oracle):
    """An oracle of thresholds of a norm as one of gradients."""

    def step(g):
        norm = size(g)
        limit = oracle.step(norm)
        return g * min(1.0, limit / norm) if norm > 0 else g

    return step


def by_leaf(oracle):
    """Likewise one of the thresholds of several leaves, here of one."""

    def step(g):
        norm = size(g)
        limit = oracle.step(np.array([norm]))[0]
        return g * min(1.0, limit / norm) if norm > 0 else g

    return step


def by_factor(oracle):
    """Likewise one of factors; zeros teach it nothing."""

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
# The transformation, and what makes an oracle of its paper that knows nothing yet.
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
        lambda: by_leaf(rules.AdaGC(1.05, 0.9, 3, 1.0)),
    ),
    "ema": (
        whole(thresholds.ema(1.5, 0.5, 0, INF)),
        lambda: by_leaf(rules.AdaGC(1.5, 0.5, 0, INF)),
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
    """The transformation over a whole history, compiled once."""
    tx, _ = CASES[case]
    zeros = jnp.zeros(ENTRIES)

    def step(state, g):
        out, state = tx.update(g, state, zeros)
        return state, out

    return jax.jit(lambda rows: jax.lax.scan(step, tx.init(zeros), rows)[1])


@st.composite
def histories(draw):
    """Usual steps, spikes of up to a million, zeros, and what is not finite."""
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
def test_any_history_is_learned_as_the_paper_has_it(case, holds):
    changed = []

    def prop(rows):
        found = np.asarray(scanned(case)(rows), np.float64)
        step = CASES[case][1]()
        largest = 0.0
        for i, (row, out) in enumerate(
            zip(rows.astype(np.float64), found, strict=True)
        ):
            # Of a first norm that is not finite a quantile has nothing to say.
            with np.errstate(all="ignore"), contextlib.suppress(IndexError):
                wanted = step(row)
            if not np.all(np.isfinite(row)):
                continue
            seen = np.abs([wanted, row] if case == "uclip" else wanted)
            largest = max(largest, float(np.max(seen)))
            off = np.max(np.abs(out - wanted))
            assert off <= 1e-4 * np.max(np.abs(wanted)) + ROUNDING * largest, (i, off)
            changed.append(not np.allclose(wanted, row, rtol=1e-4))

    holds(prop, histories(), SHARE)
    assert np.mean(changed) > 0.02
