"""Test `scaled`, `of` and `current` against the rule alone and NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds as T
from tests.support import covering, helpers, rules, running_rules
from tests.support.running_rules import INF, thresholds_of
from tests.support.steps import history, over_steps

NORMS = rules.NORMS[:60]


def each_limit(rule, norms):
    """Return the thresholds of a rule for each row of norms."""
    limits = jax.vmap(lambda row: running_rules.limits_of(rule, row))
    return np.float64(helpers.optimized_jit(limits)(norms))


def limits_of(rule):
    return thresholds_of(optclip.clip_by_global_norm(rule), NORMS)


RULES = {
    "quantile": T.quantile(0.5, 8),
    "mean_plus_std": T.mean_plus_std(1.0, 8, warmup=4),
    "zscore": T.zscore(1.5, 0.9, 4),
    "mean_over_rms": T.mean_over_rms(),
    "previous_norm": T.previous_norm(),
}


@pytest.mark.parametrize(
    "name", RULES if covering.full else ["quantile", "zscore", "previous_norm"]
)
def test_factor_multiplies_threshold_and_bounds_limit_it(name):
    """These rules learn from norms before clipping, so their memory is the same."""
    alone, _, state = limits_of(RULES[name])
    rule = T.scaled(RULES[name], 2.0, low=1.5, high=4.0)
    limits, clipped, scaled_state = limits_of(rule)
    expected = np.minimum(np.maximum(2 * alone, 1.5), 4.0)
    np.testing.assert_allclose(limits, expected, rtol=1e-6)
    assert clipped.any()
    assert {1.5, 4.0} & set(limits)
    helpers.assert_identical(scaled_state.clip_memory, state.clip_memory)
    unbounded, _, _ = limits_of(T.scaled(RULES[name], 2.0))
    np.testing.assert_array_equal(unbounded, 2 * alone)


def test_rule_of_clipped_norms_learns_those_clipped_at_the_scaled_threshold():
    """Clipped at its own threshold, the average of `ema` would shrink each step."""
    one, two = (T.ema(ratio, 0.5, 0) for ratio in (1.0, 2.0))
    scaled, clipped, _ = limits_of(T.scaled(one, 2.0))
    expected, _, _ = limits_of(two)
    np.testing.assert_array_equal(scaled, expected)
    assert clipped.any()


def test_schedules_of_scaling_read_the_step():
    factor = optax.linear_schedule(1.0, 3.0, 2)
    rule = T.scaled(1.0, factor, low=lambda step: 0.5 * step, high=2.5)
    limits, _, _ = limits_of(rule)
    np.testing.assert_allclose(limits[:8], [1, 2, *[2.5] * 4, 2.5, 2.5])


def test_infinite_threshold_times_zero_is_not_nan():
    limits, _, _ = limits_of(T.scaled(T.mean_plus_std(1.0, 8, warmup=4), 0.0))
    assert set(limits) == {0.0, INF}


def test_negative_threshold_of_loss_is_not_raised_to_zero():
    rule = T.scaled(T.mean_plus_std(1.0, 4, warmup=2), high=-1.0)
    tx = optclip.skip(optax.identity(), max_loss=rule)
    losses = np.float32([-5, -5, -5, -2, -0.5])
    _, metrics, _ = history(tx, np.ones((5, 1), np.float32), value=losses)
    limits = metrics["skip/loss_threshold"]
    np.testing.assert_allclose(limits[:4], [-1, -1, -5, -5], rtol=1e-5)
    assert metrics["skip/skipped"][-1] == 2


@pytest.mark.parametrize("rule", [2.0, T.relative_to_params(4.0), T.current()])
def test_scaling_of_rule_without_state_needs_none(rule):
    tx = optclip.clip_by_norm(T.scaled(rule, 0.5), record=False)
    assert tx.init(np.ones(2)) == optax.EmptyState()
    params, updates = np.float32([0.5, 0]), np.float32([0, 2])
    out, _ = tx.update(updates, optax.EmptyState(), params)
    np.testing.assert_allclose(out, [0, 1])


QUANTILES = {"median": 0.5, 0.9: 0.9, 0: 0, 1.0: 1, 0.31: 0.31}


@pytest.mark.parametrize(
    "reduce", ["max", "mean", *(QUANTILES if covering.full else ["median", 0.31])]
)
def test_statistic_of_elements_follows_numpy(reduce):
    """Also with ties, a single element, sizes that differ, and no element."""
    tree = {
        "ties": np.float32([2, -2, 2, 0, 0, 1]),
        "one": np.float32([-3]),
        "many": np.random.default_rng(3).normal(size=(7, 11)).astype(np.float32),
        "tiny": np.float32([1e-38, 3e38, -1e20]),
        "none": np.zeros((0, 2), np.float32),
    }
    tx = optclip.clip_by(T.of(reduce, T.current()), over="element", record="leaves")
    clipped, _ = helpers.quick_jit(tx.update)(tree, tx.init(tree))

    def expected(x):
        # Norms below 2**-60 read 0.
        size = np.where(np.abs(x) < 2.0**-60, 0, np.abs(np.float64(x)))
        if reduce in QUANTILES:
            return np.quantile(size, QUANTILES[reduce])
        return getattr(np, reduce)(size)

    for key, x in tree.items():
        limit = expected(x) if x.size else 0
        bounded = np.clip(np.float64(x), -limit, limit)
        np.testing.assert_allclose(clipped[key], bounded, rtol=1e-6, atol=1e-30)
    assert any(np.any(clipped[key] != x) for key, x in tree.items()) == (
        reduce not in ("max", 1.0)
    )


def test_rule_of_statistic_learns_one_norm_per_leaf():
    """The largest singular value of each matrix, capped at its own running median."""
    rng = np.random.default_rng(5)
    steps = rng.normal(size=(12, 3, 4)) * rng.lognormal(size=(12, 1, 1))
    tree = {"a": steps.astype(np.float32), "b": (steps[::-1] * 3).astype(np.float32)}
    rule = T.of("max", T.quantile(0.5, 5))
    outs, _ = over_steps(optclip.clip_by_singular_value(rule), tree)
    for key, grads in tree.items():
        tops = [np.linalg.norm(np.float64(g), 2) for g in grads]
        limits = [np.median(tops[max(0, i - 4) : i + 1]) for i in range(12)]
        left = [np.linalg.norm(np.float64(out), 2) for out in outs[key]]
        np.testing.assert_allclose(left, np.minimum(tops, limits), rtol=2e-6)
        assert np.any(np.array(tops) > limits)


def test_leaf_with_nonfinite_norm_does_not_teach_statistic():
    tx = optclip.clip_by(T.of("max", T.quantile(0.5, 4)), over=optclip.axes(0))
    rows = np.float32([[[1, 2]], [[np.nan, 9]], [[1, 2]]])
    _, states = over_steps(tx, {"a": rows, "b": np.abs(np.nan_to_num(rows))})
    known = jax.tree.leaves(states.clip_memory)[-1]
    np.testing.assert_array_equal(known, [[1, 1], [1, 2], [2, 3]])


@pytest.mark.parametrize(
    ("mode", "reduce"),
    [
        (mode, reduce)
        for i, reduce in enumerate(["max", "mean", "median", 0.9])
        for mode in covering.rotated(["shard_map", "auto", "explicit"], i)
    ],
)
def test_statistic_of_split_leaf_is_that_of_the_whole(mode, reduce):
    leaf = np.random.default_rng(2).normal(size=(8, 3)).astype(np.float32)
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh, spec = jax.make_mesh((2,), ("data",), axis_types=(kind,)), P("data")
    tx = optclip.clip_by_value(T.scaled(T.of(reduce, T.ema(0.5, warmup=0))))

    def step(x):
        state = tx.init(x)
        for _ in range(2):
            out, state = tx.update(x, state)
        return out

    whole = helpers.quick_jit(step)(leaf)
    assert np.any(whole != leaf)
    if mode == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    placed = jax.device_put(leaf, NamedSharding(mesh, spec))
    compiled = helpers.quick_jit(step)
    np.testing.assert_allclose(compiled(placed), whole, rtol=1e-6)
    if mode == "shard_map":
        # Two steps: a quantile has a loop, a count and a minimum.
        program = compiled.lower(placed).as_text()
        assert program.count("all_reduce") <= {"max": 7, "mean": 5}.get(reduce, 9)


def test_quantile_and_median_without_jit_equal_compiled():
    leaf = np.random.default_rng(4).normal(size=(3, 4)).astype(np.float32)
    tx = optclip.clip_by(T.of("median", T.quantile(0.9, 2)), over=optclip.axes(0))
    compiled, _ = helpers.quick_jit(tx.update)(leaf, tx.init(leaf))
    with jax.disable_jit():
        found, _ = tx.update(leaf, tx.init(leaf))
    np.testing.assert_allclose(found, compiled, rtol=1e-6)
    assert np.any(found != leaf)


def test_statistic_of_elements_on_unknown_axes_is_rejected():
    tx = optclip.clip_by_value(T.of("max", T.current()), record=False)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def step(x):
        return tx.update(x, optax.EmptyState())[0]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(ValueError, match="axis_name"):
        mapped(jnp.ones(4))


@pytest.mark.parametrize("spread", [0, 1e-6, 0.1, 3, 40])
def test_logarithmic_mean_plus_std_follows_float64(spread):
    """Also where ratios of norms exceed the range of float32."""
    normal = np.random.default_rng(0).normal(size=(5, 30))
    logs = np.clip(np.array([-60, -20, 0, 20, 60])[:, None] + spread * normal, -85, 85)
    norms = np.float32(np.exp(logs))
    rule = T.mean_plus_std(1.0, 8, warmup=4, log=True)
    logs = np.log(np.float64(norms))
    for limits, row in zip(each_limit(rule, norms), logs, strict=True):
        assert np.all(np.isinf(limits[:4]))
        for i in range(4, 30):
            last = row[max(0, i - 8) : i]
            log = np.mean(last) + max(np.std(last), 1e-6)
            if abs(log) < 85:
                np.testing.assert_allclose(limits[i], np.exp(log), rtol=3e-5)


# Other rules have a first threshold of their own, or a definition below equal norms:
# an average that starts at zero, the moments of Adam, and the norm before the first.
ABOVE_EQUAL_NORMS = {
    "ema, first": T.ema(1.0, 0.9, warmup=0),
    "ema, debiased": T.ema(1.0, 0.9, warmup=0, start="debiased"),
    "ema, warm": T.ema(1.0, 0.99, warmup=3, max_norm=INF),
    "mean_plus_std": T.mean_plus_std(1.0, 7),
    "quantile": T.quantile(0.1, 7),
    "quantile, traced": T.quantile(jnp.float32(0.3), 7),
    "scaled": T.scaled(T.quantile(0.5, 7), 1.0),
    "zscore": T.zscore(1.0, 0.9, 3),
    "zscore, mean": T.zscore(0.1, 0.9, 3, "mean"),
    "zscore, percentile": T.zscore(0.1, 0.9, 3, "percentile"),
} | {f"log, {k}": T.mean_plus_std(k, 7, log=True) for k in (0, 0.1, 1, 3)}


@pytest.mark.parametrize("name", ABOVE_EQUAL_NORMS)
def test_equal_norms_of_any_size_are_never_clipped(name):
    exponents = np.random.default_rng(0).uniform(-37, 37, size=(400, 1))
    # `mean_plus_std` computes 1e-6 of a norm, which must be in range.
    exponents = np.maximum(exponents, -31) if name == "mean_plus_std" else exponents
    norms = np.broadcast_to(np.float32(10**exponents), (400, 20))
    assert np.all(each_limit(ABOVE_EQUAL_NORMS[name], norms) >= norms)
