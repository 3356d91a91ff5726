"""Test the pure functions: their formulas, given norms, and exchanged arguments."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from optclip import recipes, thresholds
from tests.support import covering, helpers
from tests.support.registry import ENTRIES

PURE = [entry for entry in ENTRIES if entry.pure]


def clipped_by(entry, tree):
    """Clip without the global and group norms that some functions return too."""
    clipped = entry.pure(tree)
    return clipped[0] if isinstance(clipped, tuple) else clipped


@pytest.mark.parametrize(
    "make", [helpers.mixed_gradients, *[helpers.gradients] * covering.full]
)
def test_pure_functions_equal_their_formulas(make):
    tree = make()

    @helpers.quick_jit
    @helpers.without_promotion
    def clip_by_all(tree):
        return [clipped_by(entry, tree) for entry in PURE]

    for entry, found in zip(PURE, clip_by_all(tree), strict=True):
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        helpers.assert_close(found, entry.expected(helpers.as_float64(tree)), ulps=4)


def test_functions_return_norms_that_may_span_several_leaves():
    hints = {
        name: typing.get_type_hints(getattr(F, name))["return"]
        for name in F.__all__
        if name.startswith("clip_by")
    }
    returned = {
        name for name, hint in hints.items() if typing.get_origin(hint) is tuple
    }
    assert returned == {"clip_by", "clip_by_global_norm", "clip_by_group_norm"}


@pytest.mark.parametrize(
    "norm", [7.0, jnp.float32(7), np.float64(7), 7, jnp.bfloat16(7), 0.0, 1.5]
)
def test_global_norm_clipping_uses_passed_norm(norm):
    tree = helpers.gradients()
    found, returned = F.clip_by_global_norm(tree, 2.0, use_norm=norm)
    assert returned == norm
    if norm < 2:
        helpers.assert_identical(found, tree)
    else:
        expected = jax.tree.map(lambda x: np.asarray(x) * (2 / 7), tree)
        helpers.assert_close(found, expected, 2)


@pytest.mark.parametrize("number", [2**40, np.int64(2**40)])
def test_integer_beyond_32_bits_equals_float(number):
    """JAX rejects such an int, and wraps one of NumPy."""
    x = np.float32([3.0, 4.0])

    def outs(c):
        skip = optclip.skip(optax.identity(), max_loss=1.0)
        band = optclip.responses.band(0.5, max_growth=c)
        given = [
            optclip.clip_by_global_norm(thresholds.zscore(max_norm=c)),
            optclip.clip_by_global_norm(20.0, response=band),
            recipes.sclip(c, c),
            recipes.clippy(c, c),
        ]
        return [
            F.clip_by_global_norm(x, 1.0, use_norm=c)[0],
            F.clip_by_global_norm(x, 1.0, eps=c)[0],
            skip.update(x, skip.init(x), value=c)[0],
            *(tx.update(x, tx.init(x), x)[0] for tx in given),
        ]

    found, expected = helpers.quick_jit(lambda: (outs(number), outs(2.0**40)))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


GRADIENTS = {
    "dict": {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)},
    "list": [np.ones(3, np.float32)],
    "array": np.ones((2, 3), np.float32),
}
THRESHOLDS = {
    "clip_by_global_norm": "max_norm",
    "clip_by_norm": "max_norm",
    "clip_by_rms": "max_rms",
    "clip_by_average_norm": "max_norm",
    "clip_by_value": "limit",
    "clip_by": "threshold",
}


@pytest.mark.covering(
    name=tuple(THRESHOLDS),
    number=(1, 1.0, np.float32(1), np.float64(1)),
    kind=tuple(GRADIENTS),
    run=covering.RUNS,
)
def test_threshold_before_gradients_error_asks_for_exchange(name, number, kind, run):
    words = f"must come before `{THRESHOLDS[name]}`, .* Exchange the two arguments"
    with pytest.raises(TypeError, match=f"(?s){words}"):
        run(lambda tree: getattr(F, name)(number, tree))(GRADIENTS[kind])
