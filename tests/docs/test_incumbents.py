"""Each input that optax gets wrong is right here: values worked out from the formulas."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import helpers, oracles
from tools.comparison import page, show
from tools.comparison.rows import NORMAL, ROWS
from tools.comparison.sides import eager

BF16, NAN, INF = jnp.bfloat16, np.nan, np.inf


def f32(*values):
    return np.float32(values)


def f16(*values):
    return np.float16(values)


def bf16(*values):
    return np.array(values, BF16)


def by_policy(propagate, zero, drop):
    return {"propagate": propagate, "zero": zero, "drop": drop}


UNIT, HALF_OF_IT = f32(0.6, 0.8), f32(0.3, 0.4)
BRAIN = bf16(0.6, 0.8)
MIXED = [bf16(0.6), f32(0.8)]
RMS = 1 / math.sqrt((3**2 + 4**2) / 2)
BOTH = 1 / math.sqrt(3**2 + 4**2 + 6**2 + 8**2)
ONE_BAD = by_policy(
    [f32(NAN, NAN), f32(NAN)], [f32(0, 0), f32(0)], [f32(0, 0.8), f32(0.6)]
)
NORMAL_BF16 = [x.astype(BF16) for x in NORMAL]


# What comes out, in its dtype; an error as its class and a part of what it says.
EXPECTED = {
    "float16-overflow": f16(0.6, 0.8),
    "float32-overflow": UNIT,
    "mixed-overflow": [f16(0.6), f32(0.8)],
    "float32-underflow": f32(0, 0),
    "zero-of-zero": f32(0, 0),
    "negative-norm": (ValueError, r"`max_norm` must be 0 or more .*-1\.0"),
    "one-inf": ONE_BAD,
    "infinite-threshold": [f32(INF, 4), f32(3)],
    "bfloat16-sum": [x.astype(BF16) for x in oracles.by_tree(helpers.as_float64(NORMAL_BF16), 1.0)],
    "injected-schedule": [bf16(1.2, 1.6), bf16(0.9, 1.2), BRAIN],
    "injected-mixed": [MIXED],
    "injected-array": [BRAIN],
    "injected-rounding": {"a number": np.float32(0.3), "a schedule": np.float32(0.3)},
    "array-threshold": BRAIN,
    "numpy-threshold": BRAIN,
    "slope-at-zero": f32(1, 1),
    "debug-nans": f32(0, 0),
    "strict-promotion": MIXED,
    "strict-promotion-adaptive": BRAIN,
    "shard-map": f32(*range(1, 9)) / math.sqrt(sum(i * i for i in range(1, 9))),
    "explicit-mesh": f32(0.6, 0.8, 0, 0, 0, 0, 0, 0),
    "adaptive-dtype": BRAIN,
    "rms-zero-of-zero": f32(0, 0),
    "rms-negative": (ValueError, r"`max_rms` must be 0 or more .*-1\.0"),
    "negative-value": (ValueError, r"`limit` must be 0 or more .*-1\.0"),
    "nonfinite-values": by_policy(f32(1, -1, NAN, 1), f32(0, 0, 0, 1), f32(0, 0, 0, 1)),
    "int-leaf": [UNIT, np.int32([7])],
    "python-leaf": [np.float32(0.6), np.float32(0.8)],
    "float0-leaf": [UNIT, np.zeros(1, jax.dtypes.float0)],
    "sparse-leaf": np.diag(UNIT),
    "schedule": UNIT,
    "extra-argument": UNIT,
    "scan": f32(5, 10, 15),
    "one-name-twice": {"clip/norm": np.float32(5), "second/norm": np.float32(2), "clip_2/norm": np.float32(1)},
    "flatten": [f32(3 * RMS, 4 * RMS), f32(0.5, 0.5)],
    "flatten-dtypes": MIXED,
    "partition": [f32(3 * BOTH, 4 * BOTH), f32(6 * BOTH, 8 * BOTH)],
    "masked": [f32(3 / 13, 4 / 13), f32(12)],
    "float16-underflow": np.full(1000, 1e-3 / math.sqrt(1000), np.float16),
    "bfloat16-overflow": BRAIN,
    "norm-overflow": np.float32(5e20),
    "many-leaves": [bf16(1 / 20)] * 400,
    "one-nan": ONE_BAD,
    "tree-of-thresholds": [UNIT, HALF_OF_IT],
    "rms-slope-at-zero": f32(1, 1),
    "complex-values": np.complex64([1j, 0.3 + 0.4j]),
    "adaptive-rank": f32(0.6, 0, 0.8, 1).reshape(2, 1, 1, 1, 1, 2),
    "axes-and-ranks": [HALF_OF_IT.reshape(2, 1, 1, 1), f32(0.8)],
    "rms-float16": f16(3 * RMS, 4 * RMS),
    "adaptive-float16": f16(0.6, 0.8),
    "zero-nans": f32(0, 0, 1),
    "order-three": np.float32(6),
    "one-bad-example": f32(0.6, 1.3),
}  # fmt: skip
OWN_TEST = {"jit-and-eager", "above-the-bound"}
BY_NAME = {row.name: row for row in ROWS}


def check(found, expected):
    """Shape and dtype, and every entry within a unit in the last place of its dtype."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if b.dtype == jax.dtypes.float0:
            assert a.dtype == jax.dtypes.float0
            continue
        a = jnp.asarray(a)
        chex.assert_equal_shape([a, b])
        assert a.dtype == b.dtype
        inexact = jnp.issubdtype(a.dtype, jnp.inexact)
        rtol = float(jnp.finfo(a.dtype).eps) if inexact else 0
        np.testing.assert_allclose(*map(helpers.as_float64, (a, b)), rtol=rtol)


@pytest.mark.parametrize("name", EXPECTED)
def test_row(name, run):
    expected = EXPECTED[name]
    if isinstance(expected, tuple):
        error, message = expected
        with pytest.raises(error, match=message):
            BY_NAME[name].ours(run)
        return
    check(BY_NAME[name].ours(run), expected)


def test_jit_and_eager():
    """Row 27: equal to the bit where nothing is clipped, else up to rounding."""
    units = BY_NAME["jit-and-eager"].ours(eager)
    assert units["unclipped"] == 0
    assert units["clipped"] <= 8


def test_above_the_bound(run):
    """Row 34: of 200 vectors that are clipped, none is left above the threshold."""
    norms = BY_NAME["above-the-bound"].ours(run)
    chex.assert_shape(norms, (200,))
    assert np.all(norms <= 1)
    np.testing.assert_allclose(norms, 1, rtol=1.3e-4)


def test_every_row_has_a_test():
    assert {row.name for row in ROWS} == EXPECTED.keys() | OWN_TEST
    numbers = [int(row.number.rstrip("abcd")) for row in ROWS]
    assert sorted(set(numbers)) == list(range(1, 46))
    assert len(BY_NAME) == len(ROWS)


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def assert_alike(written, made):
    """Words are the same, and numbers those of the run in three digits.

    Another CPU rounds differently, so that a number may be another by 1e-5 before it is
    written in three digits.
    """
    for line, new in zip(written, made, strict=True):
        assert NUMBER.split(line) == NUMBER.split(new)
        pairs = zip(NUMBER.findall(line), NUMBER.findall(new), strict=True)
        for digits, found in pairs:
            near = [float(found) * (1 + error) for error in (-1e-5, 0.0, 1e-5)]
            rounded = [float(f"{x:.3g}") for x in near]
            assert float(digits) in [float(found), *rounded], (line, found)


def test_the_page_is_what_a_run_gives(monkeypatch):
    """Of another optax than the one the page names, its column is not compared."""
    monkeypatch.setattr(show, "DIGITS", 9)
    written, made = page.kept(), page.made()
    assert written.count("\n| ") == sum(row.on_page for row in ROWS) == len(ROWS) - 28
    assert_alike(page.without_optax(written), page.without_optax(made))
    if page.optax_version(written) == optax.__version__:
        assert_alike(written.splitlines(), made.splitlines())


def test_what_is_equal():
    """A last digit that rounding decides may be another; a word, or more, may not."""
    assert_alike(["`[0.602, NaN]` of 1000"], ["`[0.6015625, NaN]` of 1000"])
    assert_alike(["norm 0.991", "5e+20"], ["norm 0.991499999", "5.00000003e+20"])
    assert_alike(["norm 0.992"], ["norm 0.991499999"])
    for other in ("norm 0.9926", "norm 0.9914", "norm 0.99, 1", "a norm 0.992"):
        with pytest.raises(AssertionError):
            assert_alike(["norm 0.992"], [other])


def test_what_is_compared_without_optax():
    text = "| # | input | optax 9 | optclip |\n| 1 | one | `NaN` | `[1]` (so) |\n"
    left = ["| # | input | optclip |", "| 1 | one | `[1]` (so) |"]
    assert page.without_optax(text) == left
    assert page.optax_version(text) == "9"
