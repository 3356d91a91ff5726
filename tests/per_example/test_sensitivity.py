"""No example changes a sum by more than the sensitivity, in float64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip.per_example import clipped_grad, clipped_sum
from tests.support.helpers import optimized_jit

# Pairs of batches that differ in one example; 200,000 in all, half of them adversarial.
PAIRS, EXAMPLES, SIZE = 12_500, 4, 6
RESPONSES = ("hard", "auto_s", "normalize", "drop", "smooth", "unit")
PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
GROUPS = optclip.groups({"w": "matrix", "b": "vector"})


def linear(w, x):
    return jnp.sum(w * x)


BY_GROUP = {"threshold": {"matrix": 0.5, "vector": 1.0}, "over": GROUPS}
SENSITIVITIES = {
    "leaf": ({"threshold": 2.0, "over": "leaf"}, 2 * math.sqrt(2)),
    "each leaf": (
        {"threshold": {"w": 0.5, "b": 1.0}, "over": "leaf"},
        math.sqrt(1.25),
    ),
    "unbounded leaf": ({"threshold": {"w": 0.5, "b": None}, "over": "leaf"}, math.inf),
    "groups": (BY_GROUP | {"normalize_by": 4.0}, math.sqrt(1.25) / 4),
    "unit": ({"threshold": 5.0, "response": "unit"}, 1),
    "unit groups": (BY_GROUP | {"response": "unit"}, math.sqrt(2)),
    "weights": ({"threshold": 2.0, "max_weight": 1.5, "normalize_by": 4}, 0.75),
    "int8": ({"threshold": np.int8(100)}, 100),
    "bfloat16": ({"threshold": jnp.bfloat16(1.0), "normalize_by": 7}, 1 / 7),
}


@pytest.mark.parametrize("name", SENSITIVITIES)
def test_sensitivity_equals_formula_in_float64(name):
    options, expected = SENSITIVITIES[name]
    f = clipped_grad(linear, **options)
    found = f.sensitivity(params=PARAMS)
    assert isinstance(found, float)
    assert found == pytest.approx(expected, rel=1e-15)
    # These are the names of dp_accounting too.
    for relation in ("zero_out", "add_or_remove_one", "REPLACE_SPECIAL"):
        assert f.sensitivity(relation, PARAMS) == found
    assert f.sensitivity("replace_one", PARAMS) == 2 * found
    # A dict of thresholds has as many as there are.
    if "group" in name:
        assert f.sensitivity() == found


def test_sensitivity_of_traced_threshold_is_array():
    def of(threshold):
        tree = clipped_grad(linear, threshold).sensitivity("replace_one")
        leaf = clipped_grad(linear, {"w": threshold, "b": 1.0}, over="leaf")
        weighted = clipped_grad(linear, 2.0, max_weight=threshold)
        return tree, leaf.sensitivity(params=PARAMS), weighted.sensitivity()

    of = optimized_jit(of)
    np.testing.assert_allclose(of(3.0), [6, math.sqrt(10), 6], rtol=1e-6)
    np.testing.assert_array_equal(of(-1.0), [0, 1, 0])


@pytest.mark.parametrize("by", [1.2e-38, 1.0, 1e30])
def test_sum_is_within_sensitivity_for_numbers_of_any_size(by):
    """A sum that float32 cannot hold has a sensitivity of inf."""
    bounded = 0
    for c, weight in itertools.product([1e-9, 1.0, 1e30, 1e39], [1e-9, 1.0, 1e38]):
        f = clipped_grad(linear, c, max_weight=weight, normalize_by=by)
        found, _ = f(
            np.zeros(2, np.float32), np.float32([[3, 4]]), weights=np.float32([3e38])
        )
        assert length(found) <= f.sensitivity()
        bounded += f.sensitivity() < np.inf
    assert bounded >= 3


def cast(x, dtype):
    """Round as a computation in that dtype does, to inf above its largest number."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def adversarial(rng, dtype, count):
    """Draw gradients from 1e-45 to the largest number, with zeros, inf and NaN."""
    info = jnp.finfo(dtype)
    low, high = np.log(float(info.smallest_subnormal)), np.log(float(info.max))
    shape = (count, EXAMPLES, SIZE)
    scale = rng.uniform(low, high, (count, EXAMPLES, 1)) + rng.normal(0, 2, shape)
    x = rng.choice([-1.0, 1.0], shape) * np.exp(np.minimum(scale, high))
    same = rng.uniform(size=(count, EXAMPLES, 1)) < 0.3
    x = np.where(same, x[..., :1], x)
    for value in (0.0, np.inf, -np.inf, np.nan, float(info.max), float(info.tiny)):
        x = np.where(rng.uniform(size=shape) < 0.01, value, x)
    return cast(x, dtype)


def near_the_threshold(rng, dtype, count, threshold):
    """Draw gradients whose norms differ from the threshold in the last bits."""
    x = rng.normal(size=(count, EXAMPLES, SIZE))
    x *= threshold[:, None, None] / np.linalg.norm(x, axis=-1, keepdims=True)
    x *= 1 + rng.integers(-8, 9, (count, EXAMPLES, 1)) * 2.0**-24
    return cast(x, dtype)


def length(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


# All examples, without the last one, and the last one alone.
LAST = np.arange(EXAMPLES) == EXAMPLES - 1
WITHOUT = np.stack([np.zeros_like(LAST), LAST, ~LAST])


@functools.partial(optimized_jit, static_argnames="response")
def sums(grads, threshold, response="hard", weights=None):
    def one(grads, threshold, weights, padding):
        return clipped_sum(
            grads, threshold, response=response, weights=weights, padding=padding
        )[0]

    per_padding = jax.vmap(one, (None, None, None, 0))
    return jax.vmap(per_padding, (0, 0, 0, None))(grads, threshold, weights, WITHOUT)


# The gradients are converted to float32 before a response is applied.
@pytest.mark.parametrize(
    ("response", "dtype"),
    [
        *((response, jnp.float32) for response in RESPONSES),
        ("hard", jnp.float16), ("hard", jnp.bfloat16),
    ],
)  # fmt: skip
def test_neighboring_sums_differ_by_at_most_threshold(response, dtype):
    rng = np.random.default_rng(1)
    # A threshold below 2**-36 counts as 0: nothing is added.
    threshold = np.exp(rng.uniform(np.log(2.0**-40), np.log(1e37), PAIRS))
    threshold = threshold.astype(np.float32).astype(np.float64)
    most = np.where(threshold < 2.0**-36, 0, threshold)
    most = most > 0 if response == "unit" else most
    clipped = 0
    for grads in (
        adversarial(rng, dtype, PAIRS),
        near_the_threshold(rng, dtype, PAIRS, threshold),
    ):
        found = sums(grads, np.float32(threshold), response)
        whole, less, alone = np.moveaxis(np.float64(found), 1, 0)
        assert (length(whole - less) <= most).all()
        assert (length(alone) <= most).all()
        norms = length(grads[:, -1])
        clipped += ((norms > threshold) & np.isfinite(norms)).sum()
    assert clipped > PAIRS / 4


def test_weighted_neighboring_sums_differ_by_at_most_sensitivity():
    """Also where a product of weight and threshold is below the smallest float."""
    rng = np.random.default_rng(3)
    shape = PAIRS, EXAMPLES
    weights = np.float32(rng.normal(size=shape) * 2.0 ** rng.integers(-149, 60, shape))
    limits = np.float32(np.exp(rng.uniform(np.log(2.0**-40), 9, PAIRS)))
    grads = adversarial(rng, np.float32, PAIRS)
    found = np.float64(sums(grads, limits, weights=weights))
    whole, less, alone = np.moveaxis(found, 1, 0)
    # A weight below 2**-64 counts as 0.
    sizes = np.where(np.abs(weights) < 2.0**-64, 0, np.float64(np.abs(weights)))
    bounds = sizes * limits[:, None]
    assert (length(alone) <= bounds[:, -1]).all()
    assert (length(whole - less) <= sizes.max(1) * limits).all()
    assert (length(alone) > 0.99 * bounds[:, -1]).sum() > PAIRS / 10


@pytest.mark.parametrize("size", [1, 64])
def test_rounding_of_sum_stays_within_stated_bound(size):
    """1 + B (max(m, 8) + 3) 2**-23 times the sensitivity: B examples, m at a time."""
    batch = np.float32(np.random.default_rng(2).normal(size=(1024, 3)) + 3)
    f = clipped_grad(linear, 1.0, microbatch_size=size)
    run = optimized_jit(f)
    zeros = np.zeros(3, np.float32)

    def sum_without(i):
        return np.float64(run(zeros, batch, padding=np.arange(1024) == i)[0])

    whole = sum_without(-1)
    most = f.sensitivity() * (1 + 1024 * (max(size, 8) + 3) * 2.0**-23)
    for i in range(5):
        assert 0.99 < length(whole - sum_without(i)) <= most


def test_sum_of_many_microbatches_is_more_accurate_than_plain():
    """A plain sum of this many equal numbers has twice the error."""
    batch = np.full(4096, 0.3000001, np.float32)
    f = clipped_grad(linear, 1.0, microbatch_size=1)
    found = float(optimized_jit(f)(np.float32(0), batch)[0])
    most = 4096 * 11 * 2.0**-24
    assert abs(found - 4096 * float(batch[0])) <= most
    plain = float(np.cumsum(batch)[-1])
    assert abs(plain - 4096 * float(batch[0])) > most
