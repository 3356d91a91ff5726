"""What was clipped, out of a backward pass: by a probe, and by the logs of a newer JAX."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import clip_cotangent, cotangent_probe
from optclip.cotangents import _backward, _probe
from tests.support import backprop, helpers

RNG = np.random.default_rng(11)
STEPS, BATCH, WIDTH, C = 7, 4, 6, 0.5
X = RNG.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
W = (RNG.normal(size=(WIDTH, WIDTH)) * 0.9).astype(np.float32)
TARGET = RNG.normal(size=(BATCH, WIDTH)).astype(np.float32)


def loss(w, probe=None, how="none", **options):
    """A recurrent network, with the probe in its carry, among its xs, or outside."""

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


def by_hand(axis=-1):
    """The norms of each step, the last one first, and what they are multiplied by."""
    given = (np.asarray(x, np.float64) for x in (W, X, TARGET))
    _, seen = backprop.recurrent(*given, backprop.hard(C, axis))
    norms = np.sqrt(np.sum(np.square(seen), axis if axis is None else -1))
    coefficients = np.minimum(1, C / norms)
    assert 0 < np.sum(coefficients < 1) < coefficients.size
    return norms, coefficients


def assert_right(found, name="cotangent"):
    norms, coefficients = by_hand()
    wanted = {
        "largest_norm": norms.max(),
        "mean_coefficient": coefficients.mean(),
        "clipped": np.sum(coefficients < 1),
        "fraction": np.mean(coefficients < 1),
        "nonfinite": 0,
    }
    assert found.keys() == {f"{name}/{key}" for key in wanted}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[f"{name}/{key}"], value, rtol=1e-5)


def pop_largest(seen):
    found = optclip.metrics(seen)
    return found.pop("cotangent/largest_norm"), found


def gradients(probe, how, **options):
    function = jax.grad(lambda w, p: loss(w, p, how, **options), argnums=(0, 1))
    return jax.jit(function)(W, probe)


def test_a_probe_that_goes_from_step_to_step_has_the_sums_and_the_largest():
    grads, seen = gradients(cotangent_probe(), "carry")
    assert_right(optclip.metrics(seen))
    np.testing.assert_array_equal(grads, jax.jit(jax.grad(loss))(W))
    assert seen.cotangent_norms == STEPS * BATCH


def test_a_probe_among_the_xs_has_an_entry_a_step():
    _, seen = gradients(cotangent_probe(STEPS), "xs")
    assert_right(optclip.metrics(seen))
    norms, coefficients = by_hand()
    np.testing.assert_allclose(seen.cotangent_norm, norms.max(1)[::-1], rtol=1e-5)
    clipped = np.sum(coefficients < 1, 1)[::-1]
    np.testing.assert_array_equal(seen.cotangent_clipped, clipped)
    np.testing.assert_array_equal(seen.cotangent_norms, BATCH)


def test_a_probe_for_many_clips_at_once_does_not_say_a_wrong_largest_norm():
    _, seen = gradients(cotangent_probe(), "outside")
    largest, found = pop_largest(seen)
    assert np.isnan(largest)
    _, right = gradients(cotangent_probe(), "carry")
    for key, value in found.items():
        np.testing.assert_allclose(value, optclip.metrics(right)[key], rtol=1e-6)


def test_in_a_vmap_each_example_counts():
    def value(probe, batch):
        def one(x):
            return jnp.sum(clip_cotangent(x, C, probe=probe)[0] ** 2)

        return jnp.sum(jax.vmap(one)(batch))

    found = optclip.metrics(jax.grad(value)(cotangent_probe(), X[0]))
    norms = 2 * np.sqrt(np.sum(X[0].astype(np.float64) ** 2, -1))
    coefficient = np.minimum(1, C / norms).mean()
    np.testing.assert_allclose(
        found["cotangent/mean_coefficient"], coefficient, rtol=1e-6
    )
    assert np.isnan(found["cotangent/largest_norm"])
    each = jax.vmap(jax.grad(value), in_axes=(None, 0))(cotangent_probe(), X[:, :1])
    assert each.cotangent_norm.shape == (STEPS,)
    np.testing.assert_array_equal(each.cotangent_chains, 1)


@pytest.mark.parametrize("how", ["unrolled", "scan", "remat"])
def test_probe_through_three_clips_per_example_counts_each_norm_once(how):
    w = 1.5

    def one(x, probe):
        def step(carry, _=None):
            return clip_cotangent(w * carry[0], C, axis=None, probe=carry[1]), None

        step = jax.checkpoint(step) if how == "remat" else step
        if how == "scan":
            (x, _), _ = jax.lax.scan(step, (x, probe), length=3)
        else:
            for _ in range(3):
                (x, probe), _ = step((x, probe))
        return jnp.sum(x**2) / 2

    def of_all(probe, batch):
        return jnp.sum(jax.vmap(one, (0, None))(batch, probe))

    scales = np.array([[0.01], [0.04], [0.08], [1]], np.float32)
    batch = X[0] * scales
    x, norms = np.asarray(batch, np.float64), []
    g = w**3 * x
    for _ in range(3):
        norms.append(np.linalg.norm(g, axis=-1))
        g = w * backprop.hard(C)(g)
    norms = np.stack(norms)
    k = np.minimum(1, C / norms)
    assert 0 < np.sum(k < 1) < k.size
    largest, found = pop_largest(jax.grad(of_all)(cotangent_probe(), batch))
    assert np.isnan(largest)
    wanted = {"mean_coefficient": k.mean(), "clipped": np.sum(k < 1)}
    wanted |= {"fraction": np.mean(k < 1), "nonfinite": 0}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[f"cotangent/{key}"], value, rtol=1e-6)
    per_example = jax.vmap(jax.grad(one, 1), (0, None))(batch, cotangent_probe())
    np.testing.assert_allclose(per_example.cotangent_norm, norms.max(0), rtol=1e-6)
    np.testing.assert_array_equal(per_example.cotangent_clipped, np.sum(k < 1, 0))


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_what_is_not_finite_is_counted_and_not_averaged(policy):
    cotangent = np.array([[3, 4], [np.nan, 1], [np.inf, 0], [0.3, 0.4], [0, 0]])

    def pulled(probe):
        x = jnp.zeros((5, 2))
        out = jax.vjp(
            lambda p: clip_cotangent(x, 1.0, probe=p, nonfinite=policy), probe
        )
        return out[1]((jnp.asarray(cotangent, jnp.float32), cotangent_probe()))[0]

    found = optclip.metrics(pulled(cotangent_probe()))
    assert found["cotangent/nonfinite"] == 2
    assert found["cotangent/largest_norm"] == 5
    assert found["cotangent/clipped"] == 1
    assert found["cotangent/fraction"] == np.float32(0.2)
    # 1 for what is 0, or not finite.
    np.testing.assert_allclose(found["cotangent/mean_coefficient"], 4.2 / 5, rtol=1e-6)


def test_elements_and_leaves_have_records_too():
    def value(probe, x, **options):
        out, _ = clip_cotangent({"a": x, "b": 2 * x}, 1.0, probe=probe, **options)
        return jnp.sum(out["a"] ** 2) + jnp.sum(out["b"])

    x = jnp.asarray(X[0])
    gradient = jax.grad(value, argnums=0)
    elements = optclip.metrics(gradient(cotangent_probe(), x, axis=()))
    above = np.abs(2 * X[0]) > 1
    np.testing.assert_allclose(elements["cotangent/fraction"], above.mean() / 2)
    leaves = gradient(cotangent_probe(), x, axis=None)
    assert leaves.cotangent_norms == leaves.cotangent_clipped == 2
    largest = max(2 * np.linalg.norm(X[0]), np.sqrt(X[0].size))
    np.testing.assert_allclose(leaves.cotangent_norm, largest, rtol=1e-6)


def test_metrics_names_probes_by_their_path_beside_clips():
    tx = optclip.clip_by_global_norm(1.0)
    state = tx.init(jnp.ones(2))
    _, state = tx.update(jnp.ones(2), state)
    probes = {"encoder": {"block": cotangent_probe()}, "clip": cotangent_probe(3)}
    found = optclip.metrics((state, probes))
    assert "clip/threshold" in found
    assert {"1/clip/fraction", "1/encoder/block/largest_norm"} <= found.keys()
    assert np.isnan(found["1/clip/mean_coefficient"])
    assert found["1/clip/nonfinite"].dtype == jnp.int32
    alone = optclip.metrics(probes)
    assert next(iter(alone)) == "clip/largest_norm"
    assert len(alone) == 10


def test_summary_has_a_line_for_each_probe():
    _, seen = gradients(cotangent_probe(), "carry")
    norms, coefficients = by_hand()
    clipped = np.sum(coefficients < 1)
    line = (
        f"cell: largest norm {norms.max():.4g}, mean coefficient"
        f" {coefficients.mean():.4g}, {clipped} clipped,"
        f" {clipped / coefficients.size:.0%}"
    )
    assert optclip.summary({"cell": seen}) == line
    assert optclip.summary(optclip.metrics({"cell": seen})) == line
    tx = optclip.clip_by_global_norm(1.0)
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    both = optclip.summary({"optimizer": state, "cell": seen})
    assert both == f"{optclip.summary(state)}\n{line}"
    bad = seen._replace(cotangent_nonfinite=jnp.float32(3))
    assert optclip.summary({"cell": bad}) == f"{line}, 3 not finite"


def test_with_float64_and_strict_promotion():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray(X[0], jnp.float64)

        def value(p):
            return jnp.sum(clip_cotangent(x, C, probe=p)[0] ** 2)

        seen = jax.grad(value)(cotangent_probe())
    assert seen.cotangent_norm.dtype == jnp.float32
    np.testing.assert_allclose(
        seen.cotangent_norm, 2 * np.linalg.norm(X[0], axis=1).max(), rtol=1e-6
    )


def test_nothing_on_the_way_to_the_metrics_is_nan():
    with jax.debug_nans(True):
        _, seen = gradients(cotangent_probe(), "carry")
        assert_right(optclip.metrics(seen))


def test_a_record_is_a_constant_to_derivatives():
    def slope(x):
        probe = cotangent_probe()
        seen = jax.grad(lambda p: jnp.sum(clip_cotangent(x, C, probe=p)[0]))(probe)
        return seen.cotangent_norm

    np.testing.assert_array_equal(jax.grad(slope)(jnp.asarray(X[0])), 0)


def test_a_record_of_steps_is_for_a_scan():
    with pytest.raises(ValueError, match="`probe` must be one record.*xs of a jax.lax"):
        clip_cotangent(X, 1.0, probe=cotangent_probe(3))
    empty = cotangent_probe()._replace(cotangent_norm=None)
    with pytest.raises(ValueError, match="`probe` must be one record"):
        clip_cotangent(X, 1.0, probe=empty)
    pair = clip_cotangent(X, 1.0, probe=cotangent_probe())
    with pytest.raises(TypeError, match="h, probe = clip_cotangent"):
        clip_cotangent(pair, 1.0)


class WithLogs(jax.custom_vjp):
    """What a newer JAX has, as far as an older one can: the logs are kept outside."""

    kept: ClassVar = []

    def defvjp_with_logs(self, forward, backward):
        def without(*args):
            cotangents, logs = backward(*args)
            self.kept.append(logs)
            return cotangents

        self.defvjp(forward, without)


def test_logs_and_probe_agree(monkeypatch):
    """Both of one backward pass; in a newer JAX by its own logs, which scans stack."""
    if hasattr(jax.custom_vjp, "defvjp_with_logs"):

        def both(w):
            _, pull = jax.vjp(lambda w: loss(w, name="rnn"), w)
            return pull.with_logs(jnp.ones(()))

        (grads,), logs = jax.jit(both)(W)
        assert_right(optclip.metrics(logs), "rnn")
        _, seen = gradients(cotangent_probe(STEPS), "xs")
        jax.tree.map(np.testing.assert_array_equal, logs["rnn"], seen)
        np.testing.assert_array_equal(grads, jax.jit(jax.grad(loss))(W))
        return
    with pytest.raises(ValueError, match="`name` must be None, got 'rnn'.*0.11.1"):
        clip_cotangent(X, 1.0, name="rnn")
    monkeypatch.setattr(jax, "custom_vjp", WithLogs)
    monkeypatch.setattr("optclip.cotangents._clip_cotangent.HAS_LOGS", True)
    assert not _backward.HAS_LOGS
    _, pull = jax.vjp(lambda x: clip_cotangent(x, C, name="rnn"), X[0])
    pull(jnp.asarray(X[1]))
    _, seen = jax.vjp(lambda p: clip_cotangent(X[0], C, probe=p), cotangent_probe())
    (record,) = seen((jnp.asarray(X[1]), cotangent_probe()))
    jax.tree.map(np.testing.assert_array_equal, WithLogs.kept[-1]["rnn"], record)


@pytest.mark.parametrize(
    "options", [{}, {"axis": ()}, {"relative": "rms"}, {"nonfinite": "drop"}], ids=str
)
def test_a_record_that_nobody_asks_for_is_not_made(options, monkeypatch):
    """The cotangents are the same without it, to the bit."""

    def pulled(**probe):
        out, pull = jax.vjp(lambda x: clip_cotangent(x, C, **options, **probe), X[0])
        return pull(jax.tree.map(jnp.ones_like, out))[0]

    with_record = pulled(probe=cotangent_probe())
    assert np.any(with_record != 1)
    monkeypatch.delattr(_probe, "record_of")
    helpers.assert_identical(pulled(), with_record)


def test_the_largest_norm_may_be_small_and_is_unknown_of_two_clips_at_once():
    def value(probe, clips):
        pairs = [clip_cotangent(X[0], C, probe=probe) for _ in range(clips)]
        return sum(jnp.sum(h * 1e-3) for h, _ in pairs)

    seen = [jax.grad(value)(cotangent_probe(), clips) for clips in (1, 2)]
    one, two = (optclip.metrics(found)["cotangent/largest_norm"] for found in seen)
    np.testing.assert_allclose(one, 1e-3 * np.sqrt(WIDTH), rtol=1e-6)
    assert np.isnan(two)


def test_no_host_takes_part():
    text = jax.jit(jax.grad(loss, argnums=1), static_argnums=2).lower(
        W, cotangent_probe(), "carry"
    )
    assert "callback" not in text.as_text()
