"""Record clipped cotangents with a probe, or with the logs of a newer JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import clip_cotangent, cotangent_probe
from tests.support import backprop
from tests.support.helpers import quick_jit

STEPS, BATCH, WIDTH, C = 7, 4, 6, 0.5
X = np.random.default_rng(0).normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
W = (np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) * 0.9).astype(np.float32)
TARGET = np.random.default_rng(2).normal(size=(BATCH, WIDTH)).astype(np.float32)


def loss(w, probe=None, how="none", **options):
    """Build a recurrent network with the probe in its carry, in its xs, or outside."""

    def step(carry, inputs):
        (h, passed), (x, own) = carry, inputs
        h = jnp.tanh(jnp.dot(h, w, precision="highest") + x)
        if how == "carry":
            h, passed = clip_cotangent(h, C, probe=passed, **options)
        elif how == "none":
            h = clip_cotangent(h, C, **options)
        else:
            h, _ = clip_cotangent(h, C, probe=own if how == "xs" else probe, **options)
        return (h, passed), None

    start = jnp.zeros((BATCH, WIDTH)), probe if how == "carry" else None
    xs = X, probe if how == "xs" else None
    (h, _), _ = jax.lax.scan(step, start, xs)
    return jnp.sum(h * TARGET)


def by_hand():
    """Return the norms of each step, the last one first, and their coefficients."""
    given = (np.asarray(x, np.float64) for x in (W, X, TARGET))
    _, seen = backprop.recurrent(*given, backprop.hard(C))
    norms = np.linalg.norm(seen, axis=-1)
    coefficients = np.minimum(1, C / norms)
    assert 0 < np.sum(coefficients < 1) < coefficients.size
    return norms, coefficients


def assert_counts(record, coefficients, name="cotangent"):
    """Check the metrics of a record, except the largest norm, which is returned."""
    found = optclip.metrics(record)
    largest = found.pop(f"{name}/largest_norm")
    wanted = {
        "mean_coefficient": coefficients.mean(),
        "clipped": np.sum(coefficients < 1),
        "fraction": np.mean(coefficients < 1),
        "nonfinite": 0,
    }
    assert found.keys() == {f"{name}/{key}" for key in wanted}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[f"{name}/{key}"], value, rtol=1e-5)
    return largest


@functools.cache
def gradients(how, steps=None):
    """Return the gradient, and the record of a probe that is passed in this way."""
    gradient = quick_jit(jax.grad(lambda w, p: loss(w, p, how), argnums=(0, 1)))
    probe = cotangent_probe(steps)
    assert "callback" not in gradient.lower(W, probe).as_text()
    with jax.debug_nans(True):
        return gradient(W, probe)


@pytest.mark.parametrize("how", ["carry", "xs", "outside"])
def test_probe_counts_all_steps_and_keeps_gradient(how):
    """A probe from outside has NaN as largest norm, since JAX adds the steps."""
    grads, record = gradients(how, STEPS if how == "xs" else None)
    norms, coefficients = by_hand()
    largest = assert_counts(record, coefficients)
    wanted = np.nan if how == "outside" else norms.max()
    np.testing.assert_allclose(largest, wanted, rtol=1e-5)
    assert np.sum(record.cotangent_norms) == STEPS * BATCH
    if how == "xs":
        np.testing.assert_allclose(record.cotangent_norm, norms.max(1)[::-1], rtol=1e-5)
        clipped = np.sum(coefficients < 1, 1)[::-1]
        np.testing.assert_array_equal(record.cotangent_clipped, clipped)
    given = (np.asarray(x, np.float64) for x in (W, X, TARGET))
    expected, _ = backprop.recurrent(*given, backprop.hard(C))
    np.testing.assert_allclose(grads, expected, rtol=0, atol=2e-6 * abs(expected).max())


@pytest.mark.parametrize("how", ["scan", "remat"])
def test_probe_through_three_calls_counts_each_norm_once(how):
    w = 1.5

    def one(x, probe):
        def step(carry, _=None):
            return clip_cotangent(w * carry[0], C, axis=None, probe=carry[1]), None

        if how == "scan":
            (x, _), _ = jax.lax.scan(step, (x, probe), length=3)
        else:
            for _ in range(3):
                (x, probe), _ = jax.checkpoint(step)((x, probe))
        return jnp.sum(x**2) / 2

    batch = X[0] * np.array([[0.01], [0.04], [0.08], [1]], np.float32)
    g, norms = w**3 * np.asarray(batch, np.float64), []
    for _ in range(3):
        norms.append(np.linalg.norm(g, axis=-1))
        g = w * backprop.hard(C)(g)
    norms = np.stack(norms)
    k = np.minimum(1, C / norms)
    assert 0 < np.sum(k < 1) < k.size
    probe, of_each = cotangent_probe(), jax.vmap(one, (0, None))
    together = quick_jit(jax.grad(lambda p: jnp.sum(of_each(batch, p))))(probe)
    each = quick_jit(jax.vmap(jax.grad(one, 1), (0, None)))(batch, probe)
    assert np.isnan(assert_counts(together, k))
    np.testing.assert_allclose(each.cotangent_norm, norms.max(0), rtol=1e-6)
    np.testing.assert_array_equal(each.cotangent_clipped, np.sum(k < 1, 0))
    np.testing.assert_array_equal(each.cotangent_chains, 1)


@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_probe_counts_nonfinite_norms_outside_mean(policy):
    rows = [[3, 4], [np.nan, 1], [np.inf, 0], [0.3, 0.4], [0, 0]]

    clip = functools.partial(clip_cotangent, jnp.zeros((5, 2)), 1.0, nonfinite=policy)
    _, pull = jax.vjp(lambda p: clip(probe=p), cotangent_probe())
    (record,) = quick_jit(pull)((jnp.asarray(rows, "float32"), cotangent_probe()))
    found = optclip.metrics(record)
    # The mean counts 1 for zeros and for norms that are not finite.
    wanted = {"largest_norm": 5, "mean_coefficient": 4.2 / 5, "clipped": 1}
    wanted |= {"fraction": 0.2, "nonfinite": 2}
    found = {key.removeprefix("cotangent/"): x for key, x in found.items()}
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("axis", [(), None])
def test_probe_counts_elements_or_leaves(axis):
    """In float32, also of float64; the record is constant to derivatives."""

    def value(probe, x):
        out, _ = clip_cotangent({"a": x, "b": 2 * x}, 1.0, axis=axis, probe=probe)
        return jnp.sum(out["a"] ** 2) + jnp.sum(out["b"])

    def record(x):
        found = jax.grad(value)(cotangent_probe(), x)
        return found.cotangent_norm, found

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        slope, found = quick_jit(jax.grad(record, has_aux=True))(np.float64(X[0]))
    assert not np.any(slope)
    rows = np.stack([2 * np.float64(X[0]), np.ones_like(X[0])])
    norms = np.linalg.norm(rows, axis=(1, 2)) if axis is None else np.abs(rows)
    assert found.cotangent_norms == norms.size
    assert found.cotangent_clipped == np.sum(norms > 1)
    assert found.cotangent_norm.dtype == jnp.float32
    np.testing.assert_allclose(found.cotangent_norm, norms.max(), rtol=1e-6)


def test_metrics_names_probes_and_clips_by_path():
    tx = optclip.clip_by_global_norm(1.0)
    probes = {"encoder": {"block": cotangent_probe()}, "clip": cotangent_probe(3)}
    found = optclip.metrics((tx.init(jnp.ones(2)), probes))
    assert "clip/threshold" in found
    assert {"1/clip/fraction", "1/encoder/block/largest_norm"} <= found.keys()
    assert np.isnan(found["1/clip/mean_coefficient"])
    assert found["1/clip/nonfinite"].dtype == jnp.int32


def test_summary_has_line_per_probe():
    _, record = gradients("carry")
    norms, coefficients = by_hand()
    clipped = np.sum(coefficients < 1)
    line = (
        f"cell: largest norm {norms.max():.4g}, mean coefficient"
        f" {coefficients.mean():.4g}, {clipped} clipped,"
        f" {clipped / coefficients.size:.0%}"
    )
    assert optclip.summary({"cell": record}) == line
    assert optclip.summary(optclip.metrics({"cell": record})) == line
    state = optclip.clip_by_global_norm(1.0).init(jnp.ones(2))
    both = optclip.summary({"optimizer": state, "cell": record})
    assert both == f"{optclip.summary(state)}\n{line}"
    bad = record._replace(cotangent_nonfinite=jnp.float32(3))
    assert optclip.summary({"cell": bad}) == f"{line}, 3 not finite"
