"""Tests of the table of docs/migrating.md: inputs on which optax fails."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import helpers, oracles
from tools.comparison import page
from tools.comparison.rows import NORMAL, ROWS

BF16, NAN, INF = jnp.bfloat16, np.nan, np.inf


def f32(*values):
    return np.float32(values)


def bf16(*values):
    return np.array(values, BF16)


def by_policy(propagate, zero):
    return {"propagate": propagate, "zero": zero}


UNIT = f32(0.6, 0.8)
BRAIN = bf16(0.6, 0.8)
RMS = 1 / math.sqrt((3**2 + 4**2) / 2)
BOTH = 1 / math.sqrt(3**2 + 4**2 + 6**2 + 8**2)
NORMAL_BF16 = [x.astype(BF16) for x in NORMAL]
BY_NAME = {row.name: row for row in ROWS}
# The results in their dtypes, computed by hand.
EXPECTED = {
    "float16-overflow": np.float16([0.6, 0.8]),
    "float32-overflow": UNIT,
    "float32-underflow": f32(0, 0),
    "one-inf": by_policy([f32(NAN, NAN), f32(NAN)], [f32(0, 0), f32(0)]),
    "bfloat16-sum": [x.astype(BF16) for x in oracles.by_tree(helpers.as_float64(NORMAL_BF16), 1.0)],
    "injected-schedule": [bf16(1.2, 1.6), bf16(0.9, 1.2), BRAIN],
    "injected-rounding": {"a number": np.float32(0.3), "a schedule": np.float32(0.3)},
    "array-threshold": BRAIN,
    "slope-at-zero": f32(1, 1),
    "debug-nans": f32(0, 0),
    "shard-map": f32(*range(1, 9)) / math.sqrt(sum(i * i for i in range(1, 9))),
    "explicit-mesh": f32(0.6, 0.8, 0, 0, 0, 0, 0, 0),
    "adaptive-dtype": BRAIN,
    "nonfinite-values": by_policy(f32(1, -1, NAN, 1), f32(0, 0, 0, 1)),
    "int-leaf": [UNIT, np.int32([7])],
    "sparse-leaf": np.diag(UNIT),
    "schedule": UNIT,
    "scan": f32(5, 10, 15),
    "flatten": [f32(3 * RMS, 4 * RMS), f32(0.5, 0.5)],
    "partition": [f32(3 * BOTH, 4 * BOTH), f32(6 * BOTH, 8 * BOTH)],
    "masked": [f32(3 / 13, 4 / 13), f32(12)],
    "float16-underflow": np.full(1000, 1e-3 / math.sqrt(1000), np.float16),
    "norm-overflow": np.float32(5e20),
    "many-leaves": [bf16(1 / 20)] * 400,
    "one-bad-example": f32(0.6, 1.3),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_row_matches_value_by_hand(name):
    row, expected = BY_NAME[name], EXPECTED[name]
    result = page.result(row, row.ours)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        inexact = jnp.issubdtype(b.dtype, jnp.inexact)
        rtol = float(jnp.finfo(b.dtype).eps) if inexact else 0
        np.testing.assert_allclose(*map(helpers.as_float64, (a, b)), rtol=rtol)


def test_strict_clip_keeps_every_norm_at_most_one():
    row = BY_NAME["above-the-bound"]
    norms = page.result(row, row.ours)
    chex.assert_shape(norms, (200,))
    assert np.all(norms <= 1)
    np.testing.assert_allclose(norms, 1, rtol=1.3e-4)


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def test_comparison_table_matches_run():
    """The column of optax is compared if the page names the installed version."""
    tables = [
        [line.split("|") for line in table.splitlines()]
        for table in (page.current_table(), page.new_table())
    ]
    same_optax = f" optax {optax.__version__} " in tables[0][0]
    for cells, expected in zip(*tables, strict=True):
        if not same_optax:
            del cells[2], expected[2]
        line, new = "|".join(cells), "|".join(expected)
        assert NUMBER.split(line) == NUMBER.split(new)
        # Another CPU may round the third digit differently.
        numbers = (np.float64(NUMBER.findall(text)) for text in (line, new))
        np.testing.assert_allclose(*numbers, rtol=2e-3)
