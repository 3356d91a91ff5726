"""A skipped step is none: updates zero, the optimizer as it was, counts kept."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from optclip import thresholds
from tests.support import helpers

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}


def grads(size):
    return {"w": jnp.array([0.6, 0.0]) * size, "b": jnp.array([0.8]) * size}


def inner():
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    return optax.chain(optax.adamw(schedule), optax.trace(0.9))


@functools.cache
def compiled(tx):
    return helpers.quick_jit(tx.update)


def run(tx, sizes, **extras):
    """The updates and the state of each step."""
    update = compiled(tx)
    state = tx.init(PARAMS)
    rows = []
    for i, size in enumerate(sizes):
        extra = {key: values[i] for key, values in extras.items()}
        updates, state = update(grads(size), state, PARAMS, **extra)
        rows.append((updates, state))
    return rows


INNER = inner()
SKIPPING = optclip.skip(INNER, max_norm=10.0)


@pytest.mark.parametrize("bad", [100.0, jnp.nan, jnp.inf, -jnp.inf])
def test_the_optimizer_does_not_notice(bad):
    with_spike = run(SKIPPING, [1.0, 2.0, bad, 1.5])
    without = run(INNER, [1.0, 2.0, 1.5])
    chex.assert_trees_all_equal(
        with_spike[2][1].skip_inner, with_spike[1][1].skip_inner
    )
    chex.assert_trees_all_equal(with_spike[2][0], jax.tree.map(jnp.zeros_like, PARAMS))
    # A schedule and a bias correction go on as if there had been three steps.
    chex.assert_trees_all_close(with_spike[3][0], without[2][0])
    assert with_spike[3][1].skip_inner[0][0].count == 3


def test_a_number_of_python_is_zeroed_too():
    tx = optclip.skip(optax.sgd(0.5), max_norm=1.0)
    updates, state = tx.update({"w": 8.0}, tx.init({"w": 0.0}))
    assert updates["w"] == 0
    assert state.skip_record["skip"].skip_skipped == 1
    updates, state = tx.update({"w": 0.25}, state)
    assert updates["w"] == -0.125
    assert state.skip_record["skip"].skip_skipped == 1


def test_a_clip_to_zero_is_no_skip():
    """What skip is for: the moments decay under a zeroed update."""
    clip = optclip.clip_by_global_norm(10.0, response="drop")
    rows = run(optax.chain(clip, optax.scale_by_adam()), [1.0, 100.0])
    before, after = (optax.tree.get(state, "mu")["b"] for _, state in rows)
    assert abs(after[0]) < abs(before[0])
    rows = run(optclip.skip(optax.scale_by_adam(), max_norm=10.0), [1.0, 100.0])
    before, after = (optax.tree.get(state, "mu")["b"] for _, state in rows)
    assert after[0] == before[0]


def test_metrics_tell_of_a_skip_and_of_the_clip_inside():
    clip = optclip.clip_by_global_norm(1.0)
    tx = optclip.skip(optax.chain(clip, optax.sgd(1.0)), max_norm=10.0)
    rows = run(tx, [2.0, 100.0, 50.0, jnp.nan, 0.5, 60.0])
    found = optclip.metrics(rows[-1][1])
    assert found["skip/skipped"] == 4
    assert found["skip/consecutive"] == 1
    assert found["skip/threshold"] == 10
    np.testing.assert_allclose(found["skip/norm"], 60.0, rtol=1e-6)
    np.testing.assert_allclose(found["skip/rate"], 0.5)
    assert found["skip/nonfinite"] == 1
    assert optclip.metrics(rows[3][1])["skip/consecutive"] == 3
    # The clip inside saw two steps.
    assert found["clip/norm"] == 0.5
    assert found["clip/rate"] == 0.5


def test_two_skips_have_two_names():
    clip = optclip.clip_by_global_norm(1.0, name="skip")
    one = optclip.skip(optax.chain(clip, optax.sgd(1.0)), max_norm=10.0)
    found = optclip.metrics(run(optclip.skip(one, max_norm=5.0), [1.0, 7.0])[-1][1])
    # The clip inside is first, then the inner skip, then the outer one.
    assert "skip/skipped" not in found
    assert (found["skip_2/threshold"], found["skip_2/skipped"]) == (10, 0)
    assert (found["skip_3/threshold"], found["skip_3/skipped"]) == (5, 1)


def test_no_more_steps_in_a_row_are_skipped_than_allowed():
    tx = optclip.skip(optax.sgd(1.0), max_norm=10.0, max_consecutive=2)
    rows = run(tx, [100.0] * 7)
    taken = [bool(updates["b"][0] != 0) for updates, _ in rows]
    assert taken == [False, False, True, False, False, True, False]
    assert optclip.metrics(rows[-1][1])["skip/consecutive"] == 1
    loud = run(tx, [jnp.nan] * 3)[-1][0]
    assert np.isnan(loud["b"][0])


@pytest.mark.parametrize(("learns", "skipped"), [(True, 1), (False, 4)])
def test_learning_from_what_was_skipped(learns, skipped):
    """After a shift of level a rule that learns of nothing else skips for ever."""
    rule = thresholds.mean_plus_std(3.0, window=4, warmup=3)
    tx = optclip.skip(optax.sgd(1.0), max_norm=rule, learn_skipped=learns)
    rows = run(tx, [1.0, 1.1, 0.9, 50.0, 50.0, 50.0, 50.0])
    assert optclip.metrics(rows[-1][1])["skip/skipped"] == skipped


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_a_step_is_skipped_by_its_loss(scale):
    """Also one that is negative: its spikes are upwards."""
    rule = thresholds.mean_plus_std(6.0, window=8, warmup=3, ddof=1)
    tx = optclip.skip(optax.sgd(1.0), max_value=rule)
    losses = jnp.array([3.0, 3.1, 2.9, 3.0, 3.0 + 10.0 * scale, 3.05, jnp.nan, 3.0])
    rows = run(tx, [1.0] * 8, value=losses * scale)
    taken = [bool(updates["b"][0] != 0) for updates, _ in rows]
    assert taken == [True, True, True, True, False, True, False, True]
    # Not yet known in its warm-up.
    first = optclip.metrics(rows[0][1])
    assert first["skip/value_threshold"] == jnp.inf


def test_a_norm_or_a_loss_is_enough():
    tx = optclip.skip(optax.sgd(1.0), max_norm=10.0, max_value=5.0)
    sizes = [1.0, 100.0, 1.0, 100.0, 1.0, 1.0]
    losses = jnp.array([1.0, 1.0, 9.0, 9.0, -jnp.inf, 5.0])
    rows = run(tx, sizes, value=losses)
    taken = [bool(updates["b"][0] != 0) for updates, _ in rows]
    assert taken == [True, False, False, False, False, True]


def test_the_loss_by_a_schedule():
    tx = optclip.skip(optax.sgd(1.0), max_value=lambda step: 10.0 * step)
    rows = run(tx, [1.0] * 3, value=jnp.array([1.0, 1.0, 21.0]))
    limits = [optclip.metrics(state)["skip/value_threshold"] for _, state in rows]
    np.testing.assert_array_equal(limits, [0.0, 10.0, 20.0])
    taken = [bool(updates["b"][0] != 0) for updates, _ in rows]
    assert taken == [False, True, False]


def test_the_loss_without_learning():
    rule = thresholds.mean_plus_std(3.0, window=4, warmup=3)
    tx = optclip.skip(optax.sgd(1.0), max_value=rule, learn_skipped=False)
    losses = jnp.array([1.0, 1.1, 0.9, 50.0, 50.0, 50.0])
    rows = run(tx, [1.0] * 6, value=losses)
    found = optclip.metrics(rows[-1][1])
    assert found["skip/skipped"] == 3
    assert found["skip/value"] == 50
    # The mean of the three, and three of their deviations.
    np.testing.assert_allclose(found["skip/value_threshold"], 1.2449, rtol=1e-4)
    silent = optclip.skip(optax.sgd(1.0), max_norm=1.0)
    assert "skip/value" not in optclip.metrics(silent.init(PARAMS))


def test_the_loss_must_be_given():
    tx = optclip.skip(optax.sgd(1.0), max_value=5.0)
    with pytest.raises(ValueError, match=r"`value` must be .*None.*value=loss\)"):
        tx.update(grads(1.0), tx.init(PARAMS))
    with pytest.raises(ValueError, match="`value` must be .*got Array"):
        tx.update(grads(1.0), tx.init(PARAMS), value=jnp.ones(2))
    rule = thresholds.relative_to_params()
    tx = optclip.skip(optax.sgd(1.0), max_value=rule)
    with pytest.raises(ValueError, match="`max_value` must be .*got Relative.*Try"):
        tx.update(grads(1.0), tx.init(PARAMS), PARAMS, value=1.0)


def test_the_state_of_a_skip_without_the_loss():
    plain = optclip.skip(optax.sgd(1.0))
    valued = optclip.skip(optax.sgd(1.0), max_value=thresholds.quantile(0.5))
    with pytest.raises(ValueError, match="state` must be .* skip with max_value, got"):
        valued.update(grads(1.0), plain.init(PARAMS), value=1.0)
    with pytest.raises(ValueError, match="state` must be .* skip without max_value"):
        plain.update(grads(1.0), valued.init(PARAMS))


def test_any_group_is_enough_and_others_may_be_left_out():
    groups = optclip.groups(optclip.by_path(lambda path: path))
    tx = optclip.skip(optax.sgd(1.0), max_norm={"w": 10.0, "b": None}, over=groups)
    for size, taken in (((1.0, 100.0), True), ((100.0, 1.0), False)):
        tree = {"w": jnp.array([size[0], 0.0]), "b": jnp.array([size[1]])}
        updates, _ = compiled(tx)(tree, tx.init(PARAMS))
        assert bool(updates["b"][0] != 0) == taken
    mask = optclip.by_path(lambda path: path == "w")
    tx = optclip.skip(optax.sgd(1.0), mask=mask)
    tree = {"w": jnp.ones(2), "b": jnp.array([jnp.nan])}
    assert np.isnan(compiled(tx)(tree, tx.init(PARAMS))[0]["b"][0])


def test_a_threshold_that_is_nan_is_off():
    tx = optclip.skip(optax.sgd(1.0), max_norm=lambda step: jnp.nan, max_value=None)
    assert run(tx, [1.0])[-1][0]["b"][0] == 0
    tx = optclip.skip(optax.sgd(1.0), max_value=lambda step: jnp.nan)
    assert run(tx, [1.0], value=[jnp.float32(1.0)])[-1][0]["b"][0] == 0


def test_what_is_inside_is_shown_zeros():
    """So that a NaN raises nothing there and no derivative is NaN."""
    clip = optclip.clip_by_global_norm(1.0, nonfinite="raise")
    tx = optclip.skip(clip, max_norm=10.0)
    checked = jax.experimental.checkify.checkify(
        lambda u: tx.update(u, tx.init(PARAMS))[0]
    )
    error, _ = helpers.quick_jit(checked)(grads(jnp.nan))
    assert error.get() is None

    def length(size):
        tx = optclip.skip(optax.scale_by_adam(), max_norm=10.0)
        updates, _ = tx.update(grads(size), tx.init(PARAMS))
        return sum(jnp.sum(x) for x in jax.tree.leaves(updates))

    assert helpers.quick_jit(jax.grad(length))(jnp.float32(jnp.nan)) == 0


def test_a_tree_without_leaves_is_never_skipped():
    tx = optclip.skip(optax.sgd(1.0), max_norm=1.0)
    updates, _ = tx.update({"none": None}, tx.init({"none": None}))
    assert updates == {"none": None}


def test_one_trace_in_scan_and_any_leaf():
    params = {"x": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(3)}
    tx = optclip.skip(optax.identity(), max_norm=10.0)
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def step(state, size):
        tree = {"x": (params["x"] * size).astype(jnp.bfloat16), "n": params["n"]}
        updates, state = tx.update(tree, state)
        return state, updates["x"]

    sizes = jnp.array([1.0, 100.0, 2.0])
    _, found = helpers.quick_jit(lambda s: jax.lax.scan(step, tx.init(params), s))(
        sizes
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[:, 0].astype(jnp.float32), [1.0, 0.0, 2.0])


def test_on_several_devices_all_skip_together():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    tx = optclip.skip(optax.trace(0.9), max_norm=10.0)

    def step(x):
        _, state = tx.update(x, tx.init(x))
        updates, state = tx.update(x, state)
        return updates, optclip.metrics(state)["skip/skipped"][None]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=spec("data"), out_specs=(spec("data"), spec(None))
    )
    # Each shard's own norm is below 10, that of all above.
    updates, skipped = helpers.quick_jit(mapped)(jnp.full(8, 5.0))
    np.testing.assert_array_equal(updates, 0)
    assert skipped[0] == 2


def test_a_multi_steps_is_no_transformation_yet():
    steps = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
    with pytest.raises(TypeError, match=r"Give its .gradient_transformation\(\)"):
        optclip.skip(steps)
    tx = optclip.skip(steps.gradient_transformation())
    state, found = tx.init(jnp.zeros(1)), []
    for gradient in (1.0, 1.0, jnp.nan, 1.0, 3.0):
        updates, state = compiled(tx)(jnp.array([gradient]), state)
        found.append(float(updates[0]))
    # What is skipped is no part of a mean.
    assert found == [0, -1, 0, 0, -2]


def test_sparse_updates_keep_their_places_in_a_skipped_step():
    mat = BCOO((jnp.array([3.0, 4.0]), jnp.array([[1], [2]])), shape=(5,))
    tx = optclip.skip(optax.identity(), max_norm=1.0)
    found, _ = tx.update(mat, tx.init(mat))
    np.testing.assert_array_equal(found.indices, mat.indices)
    assert not np.any(found.data)


def test_whole_numbers_do_not_move_in_a_skipped_step():
    tx = optclip.skip(optax.identity(), max_norm=1.0)
    updates = {
        "w": jnp.array([3.0, 4.0]),
        "n": jnp.array([5]),
        "key": jax.random.key(0),
    }
    found, state = tx.update(updates, tx.init(updates), updates)
    assert optclip.metrics(state)["skip/skipped"] == 1
    assert not np.any(found["w"])
    assert not np.any(found["n"])
    assert found["key"] == updates["key"]


def test_counters_stay_at_the_largest_number():
    last = jnp.int32(2**31 - 1)
    state = SKIPPING.init(PARAMS)
    ((name, record),) = state.skip_record.items()
    full = record._replace(skip_skipped=last, skip_consecutive=last - 1)
    state = state._replace(skip_record={name: full})
    for _ in range(2):
        updates, state = SKIPPING.update(grads(100.0), state, PARAMS)
        assert not np.any(updates["w"])
        assert state.skip_record[name].skip_skipped == last
        assert state.skip_record[name].skip_consecutive == last
