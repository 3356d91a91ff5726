"""No example adds more than its bound: the change of a sum by one, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.per_example import clipped_grad, clipped_sum

# Of each: pairs of batches that differ in one example, made by an adversary.
PAIRS, EXAMPLES, SIZE = 5000, 4, 6
RESPONSES = ("hard", "auto_s", "normalize", "drop", "smooth", "unit")
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float32)


def cast(x, dtype):
    """As a computation in that dtype would have it: inf above its largest number."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def adversarial(rng, dtype, count):
    """Gradients from 1e-45 to the largest number, zeros, inf and NaN among them."""
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
    """Norms of the threshold, but for the last few bits."""
    x = rng.normal(size=(count, EXAMPLES, SIZE))
    x *= threshold[:, None, None] / np.linalg.norm(x, axis=-1, keepdims=True)
    x *= 1 + rng.integers(-8, 9, (count, EXAMPLES, 1)) * 2.0**-24
    return cast(x, dtype)


def length(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


@functools.partial(jax.jit, static_argnames="response")
def sums(grads, threshold, response):
    def one(grads, threshold):
        whole, _ = clipped_sum(grads, threshold, response=response)
        without = jnp.arange(EXAMPLES) == EXAMPLES - 1
        less, _ = clipped_sum(grads, threshold, response=response, padding=without)
        own, _ = clipped_sum(grads[-1:], threshold, response=response)
        return whole, less, own

    return jax.vmap(one)(grads, threshold)


@pytest.mark.parametrize("response", RESPONSES)
def test_no_pair_of_neighbours_is_further_apart_than_the_bound(response):
    rng = np.random.default_rng(1)
    clipped = 0
    for dtype in DTYPES:
        # A threshold below 2**-36 counts as 0: nothing is added.
        threshold = np.exp(rng.uniform(np.log(2.0**-40), np.log(1e37), PAIRS))
        threshold = threshold.astype(np.float32).astype(np.float64)
        wild = adversarial(rng, dtype, PAIRS)
        near = near_the_threshold(rng, dtype, PAIRS, threshold)
        for grads in (wild, near):
            whole, less, own = sums(grads, jnp.float32(threshold), response)
            change = length(
                np.asarray(whole, np.float64) - np.asarray(less, np.float64)
            )
            most = np.where(threshold < 2.0**-36, 0, threshold)
            most = most > 0 if response == "unit" else most
            assert (change <= most).all()
            assert (length(own) <= most).all()
            norms = length(grads[:, -1])
            clipped += ((norms > threshold) & np.isfinite(norms)).sum()
    assert clipped > PAIRS


def test_rounding_of_the_sum_stays_within_what_is_stated():
    """1 + B (max(m, 8) + 3) 2**-23 times the sensitivity: B examples, m at a time."""
    rng = np.random.default_rng(2)
    for size in (1, 4, 64):
        batch = rng.normal(size=(1024, 3)) + 3
        f = clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, microbatch_size=size)
        g = jax.jit(f)
        whole = np.asarray(g(jnp.zeros(3), batch)[0], np.float64)
        for i in range(5):
            less, _ = g(jnp.zeros(3), batch, padding=np.arange(1024) == i)
            most = f.sensitivity() * (1 + 1024 * (max(size, 8) + 3) * 2.0**-23)
            assert length(whole - np.asarray(less, np.float64)) <= most


@pytest.mark.parametrize("size", [1, 4])
def test_many_microbatches_are_not_summed_plainly(size):
    """A plain sum of so many equal numbers is off by twice as much."""
    batch = np.full(4096, 0.3000001, np.float32)
    f = clipped_grad(lambda w, x: w * x, 1.0, microbatch_size=size)
    found = float(jax.jit(f)(jnp.float32(0), batch)[0])
    most = 4096 * (max(size, 8) + 3) * 2.0**-24
    assert abs(found - 4096 * float(batch[0])) <= most
    plain = float(np.cumsum(batch)[-1])
    assert abs(plain - 4096 * float(batch[0])) > most


def test_not_strict_it_may_be_above_by_a_rounding():
    rng = np.random.default_rng(3)
    grads = jnp.asarray(rng.normal(size=(4096, 1, 3)), jnp.float32)
    loose = jax.vmap(lambda g: clipped_sum(g, 0.1, strict=False)[0])(grads)
    strict = jax.vmap(lambda g: clipped_sum(g, 0.1)[0])(grads)
    assert 0.1 < length(loose).max() <= 0.1 * (1 + 2e-6)
    assert length(strict).max() <= np.float32(0.1)
