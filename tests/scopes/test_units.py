"""Test the units of AGC: each output of a layer, of any rank, stacked or not."""

import functools

import numpy as np
import pytest

import optclip
from optclip import recipes
from tests.support import helpers

CLOSE = {"rtol": 1e-5, "atol": 1e-9}
SHAPES = [(), (5,), (4, 5), (3, 4, 5), (2, 3, 4, 5), (2, 2, 2, 3, 4, 5)]


def arrays(shape, rng):
    """Return gradients, every other unit past the threshold, and parameters."""
    grads, params = (np.asarray(rng.normal(size=shape), np.float32) for _ in range(2))
    size = np.resize([1.0, 1e-3], shape[-1:])
    # The parameters of every third unit are zero.
    is_nonzero = np.resize([1.0, 1.0, 0.0], shape[-1:])
    return grads * np.float32(size), params * np.float32(is_nonzero)


def expected_of(grads, params, axis):
    """Equation 3 of Brock et al. (2021) in float64."""
    grads, params = (np.asarray(x, np.float64) for x in (grads, params))
    norm, size = (
        np.sqrt(np.sum(x**2, axis=axis, keepdims=True)) for x in (grads, params)
    )
    limit = 0.01 * np.maximum(size, 1e-3)
    return np.where(norm > limit, grads * limit / np.where(norm > 0, norm, 1), grads)


@functools.cache
def compiled(tx):
    return helpers.quick_jit(lambda g, p: tx.update(g, tx.init(p), p)[0])


AGC = recipes.agc()


def test_units_of_every_rank_match_paper():
    rng = np.random.default_rng(0)
    grads, params = zip(*(arrays(shape, rng) for shape in SHAPES), strict=True)
    found = compiled(AGC)(grads, params)
    for clipped, g, p in zip(found, grads, params, strict=True):
        axis = () if g.ndim == 0 else (0,) if g.ndim == 1 else tuple(range(g.ndim - 1))
        np.testing.assert_allclose(clipped, expected_of(g, p, axis), **CLOSE)
        assert g.ndim == 0 or not np.allclose(clipped, g)


def test_stacked_layers_clip_like_separate_layers():
    shapes = {"kernel": (3, 4, 5), "bias": (3, 5), "scale": (3,)}
    rng = np.random.default_rng(0)
    pairs = {name: arrays(shape, rng) for name, shape in shapes.items()}
    grads, params = ({"net": {k: v[i] for k, v in pairs.items()}} for i in range(2))
    tx = recipes.agc(stacked=lambda path: path.startswith("net"))
    found = compiled(tx)(grads, params)["net"]
    for name, axis in (("kernel", (1,)), ("bias", (1,)), ("scale", ())):
        expected = expected_of(grads["net"][name], params["net"][name], axis)
        np.testing.assert_allclose(found[name], expected, **CLOSE)
    assert not np.allclose(compiled(AGC)(grads, params)["net"]["bias"], found["bias"])


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_relative_threshold_of_infinite_parameter_norm_clips_nothing(nonfinite):
    """The squares of parameters may overflow, unlike those of gradients."""
    rule = optclip.thresholds.relative_to_params(0.5)
    clip = compiled(optclip.clip_by_norm(rule, nonfinite=nonfinite))
    grads = np.float32([6e25, 8e25])
    np.testing.assert_array_equal(clip(grads, np.float32([1e25, 1e25])), grads)
    np.testing.assert_allclose(clip(grads, np.float32([6, 8])), [3.0, 4.0], rtol=1e-6)
