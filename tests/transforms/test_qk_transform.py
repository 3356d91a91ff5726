"""QK-Clip as the last transformation of a chain: what it returns, and records."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip.functional import clip_attention_logits

HOT = np.array([50.0, 400.0, 100.0, 900.0], np.float32)


def tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {"query": (5, 4, 3), "key": (5, 2, 3), "out": (7,)}
    return {
        n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()
    }


PARAMS, GRADS = tree(0), tree(1)
LAYERS = optclip.find_heads(PARAMS, query="query", key="key")
LOGITS = {"attention": jnp.asarray(HOT)}


def last(**options):
    return optax.chain(
        optax.sgd(0.1), optclip.clip_attention_logits(100.0, LAYERS, **options)
    )


@pytest.mark.parametrize("by_group", [False, True])
def test_new_weights_are_those_that_the_function_clips(by_group):
    tx = last(by_group=by_group, balance=0.3)

    @jax.jit
    def step(grads, state):
        updates, state = tx.update(grads, state, PARAMS, max_logits=LOGITS)
        return optax.apply_updates(PARAMS, updates), state

    got, _ = step(GRADS, tx.init(PARAMS))
    plain, _ = optax.sgd(0.1).update(GRADS, optax.sgd(0.1).init(PARAMS))
    want, _ = clip_attention_logits(
        optax.apply_updates(PARAMS, plain), LOGITS, 100.0, LAYERS, by_group=by_group,
        balance=0.3,
    )  # fmt: skip
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-7)
    assert not np.allclose(got["query"], optax.apply_updates(PARAMS, plain)["query"])


def test_updates_of_what_is_not_clipped_are_kept_to_the_bit():
    tx = optclip.clip_attention_logits(100.0, LAYERS)
    s = {"attention": jnp.asarray([50.0, 99.0, 400.0, 1.0])}
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, max_logits=s)
    np.testing.assert_array_equal(updates["query"][:, :2], GRADS["query"][:, :2])
    np.testing.assert_array_equal(updates["key"][:, 0], GRADS["key"][:, 0])
    np.testing.assert_array_equal(updates["out"], GRADS["out"])
    assert not np.array_equal(updates["key"][:, 1], GRADS["key"][:, 1])


def test_the_record_has_each_layer_and_counts_logits_of_no_use():
    tx = last()
    state = tx.init(PARAMS)
    for s in (HOT, [np.nan, 200.0, -3.0, 1.0], [1.0, 2.0, 3.0, 4.0]):
        s = jnp.asarray(s, jnp.float32)
        _, state = tx.update(GRADS, state, PARAMS, max_logits={"attention": s})
        found = optclip.metrics(state)
        if s[1] == 200:
            assert found["attention/norm/attention"] == 200
            assert found["attention/coefficient/attention"] == 0.5
            assert found["attention/fraction/attention"] == 0.25
    assert found["attention/norm/attention"] == 4
    assert found["attention/threshold/attention"] == 100
    assert found["attention/coefficient/attention"] == 1
    assert found["attention/nonfinite/attention"] == 1
    assert found["attention/rate/attention"] == pytest.approx(2 / 3)


def test_thresholds_are_those_of_every_clip():
    schedule = optclip.clip_attention_logits(lambda step: 100.0 / (step + 1), LAYERS)
    rule = optclip.clip_attention_logits(optclip.thresholds.quantile(0.5), LAYERS)
    by_layer = optclip.clip_attention_logits({"attention": 200.0}, LAYERS)
    seen = {}
    for name, tx in {"schedule": schedule, "rule": rule, "layer": by_layer}.items():
        state = tx.init(PARAMS)
        for _ in range(2):
            _, state = tx.update(GRADS, state, PARAMS, max_logits=LOGITS)
        seen[name] = optclip.metrics(state)["attention/threshold/attention"]
    assert seen["schedule"] == 50
    assert seen["layer"] == 200
    assert np.isfinite(seen["rule"])
    assert seen["rule"] > 0


def test_without_a_record_nothing_is_kept():
    tx = optclip.clip_attention_logits(100.0, LAYERS, record=False)
    state = tx.init(PARAMS)
    assert state == optax.EmptyState()
    updates, after = tx.update(GRADS, state, PARAMS, max_logits=LOGITS)
    assert after == state
    assert not np.array_equal(updates["query"], GRADS["query"])


def test_it_scans_in_one_trace_and_under_accumulation_of_steps():
    tx = last()
    traces = []

    def step(carry, s):
        traces.append(1)
        params, state = carry
        updates, state = tx.update(GRADS, state, params, max_logits={"attention": s})
        return (optax.apply_updates(params, updates), state), None

    many = jnp.asarray([HOT, HOT / 10, HOT])
    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), many)
    assert len(traces) == 1
    assert optclip.metrics(state)["attention/rate/attention"] == pytest.approx(2 / 3)
    assert np.all(np.isfinite(params["query"]))
    steps = optax.MultiSteps(tx, every_k_schedule=2)
    state = steps.init(PARAMS)
    for s in (HOT / 10, HOT):
        updates, state = steps.update(GRADS, state, PARAMS, max_logits={"attention": s})
    want, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, max_logits=LOGITS)
    np.testing.assert_allclose(updates["query"], want["query"], rtol=1e-5, atol=1e-6)


def test_nothing_of_the_state_is_like_parameters():
    tx = optclip.clip_attention_logits(optclip.thresholds.quantile(0.5), LAYERS)
    marked = optax.tree_map_params(
        tx, lambda x: None, tx.init(PARAMS), transform_non_params=lambda x: 1
    )
    assert set(jax.tree.leaves(marked)) == {1}


def test_narrow_updates_come_back_narrow():
    params, grads = (
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), t) for t in (PARAMS, GRADS)
    )
    tx = optclip.clip_attention_logits(100.0, LAYERS)
    updates, _ = tx.update(grads, tx.init(params), params, max_logits=LOGITS)
    assert updates["query"].dtype == jnp.bfloat16
    new = np.asarray(optax.apply_updates(params, updates)["query"], np.float64)
    wide = [np.asarray(x["query"], np.float64) for x in (params, grads)]
    kappa = np.repeat(np.sqrt(np.minimum(1, 100 / HOT).reshape(2, 2).min(1)), 2)
    exact = (wide[0] + wide[1]) * (np.minimum(1, 100 / HOT) / kappa)[:, None]
    room = 2.0**-8 * (np.abs(exact) + np.abs(wide[0]) + np.abs(exact - wide[0]))
    assert np.all(np.abs(new - exact) <= room)


@pytest.mark.parametrize(
    ("params", "logits", "words"),
    [(None, LOGITS, "`params` must be"), (PARAMS, None, "`max_logits` must be")],
)
def test_update_says_what_it_lacks(params, logits, words):
    tx = last()
    with pytest.raises(ValueError, match=words):
        tx.update(GRADS, tx.init(PARAMS), params, max_logits=logits)


def test_updates_must_have_the_leaves():
    tx = optclip.clip_attention_logits(100.0, LAYERS)
    with pytest.raises(ValueError, match="must have the leaf 'query'"):
        tx.update({"key": GRADS["key"]}, tx.init(PARAMS), PARAMS, max_logits=LOGITS)
