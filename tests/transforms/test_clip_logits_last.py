"""QK-Clip last in a chain: the new parameters are the clipped ones, and a record."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import clip_attention_logits, thresholds
from tests.support import attention, helpers
from tests.support.attention import KINDS, LAYOUTS, Model

LARGEST = np.array([150.0, 100.0, 20.0, 400.0, 3000.0, 50.0], np.float32)
GQA = Model(LAYOUTS[0], KINDS[1])
LAYERS = GQA.layers()
LOGITS = {"attn": LARGEST}


def named(x):
    return x.id


def steps_of(params, size=0.1):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: (size * rng.normal(size=x.shape)).astype(x.dtype), params
    )


@pytest.mark.parametrize("how", [{}, {"balance": 0.2}, {"by_group": True}])
@pytest.mark.parametrize("kind", KINDS, ids=named)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_the_new_parameters_are_the_clipped_ones(layout, kind, how):
    model = Model(layout, kind)
    params, largest = model.params(), LARGEST[: kind.heads]
    logits = {"attn": largest[None] if layout.stacks else largest}
    updates = steps_of(params)
    tx = clip_attention_logits(100.0, model.layers(), **how)
    found, state = tx.update(updates, tx.init(params), params, max_logits=logits)
    moved = optax.apply_updates(params, updates)
    wanted, gamma = optclip.functional.clip_attention_logits(
        moved, logits, 100.0, model.layers(), **how
    )
    new = optax.apply_updates(params, found)
    # The difference of a weight that nearly vanishes has the rounding of the weight.
    for x, y in zip(*map(jax.tree.leaves, (new, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    seen = optclip.metrics(state)
    np.testing.assert_allclose(seen["attention/coefficient/attn"], gamma["attn"].min())


def test_updates_of_heads_that_are_not_clipped_keep_their_bits():
    params, updates = GQA.params(), steps_of(GQA.params(), 1e-9)
    largest = np.array([150.0, 20, 20, 100, 99, -1], np.float32)
    tx = clip_attention_logits(100.0, LAYERS)
    found, _ = tx.update(updates, tx.init(params), params, max_logits={"attn": largest})
    before, after = GQA.parts(updates), GQA.parts(found)
    for name, kept in (("query", 3), ("key", 1)):
        for leaf, x in before[name].items():
            np.testing.assert_array_equal(
                after[name][leaf][..., kept:, :], x[..., kept:, :]
            )
            clipped = after[name][leaf][..., :kept, :] != x[..., :kept, :]
            assert np.all(clipped)
    np.testing.assert_array_equal(found["shared"], updates["shared"])


@pytest.mark.parametrize("wide", [True, False])
def test_bfloat16_weights(wide):
    params = GQA.params(jnp.bfloat16)
    updates = steps_of(params, 0.01)
    if wide:
        updates = jax.tree.map(lambda x: x.astype(np.float32), updates)
    tx = clip_attention_logits(100.0, LAYERS)
    largest = np.array([150.0, 120.0, 20.0, 190.0, 101.0, 50.0], np.float32)
    found, _ = tx.update(updates, tx.init(params), params, max_logits={"attn": largest})
    new = optax.apply_updates(params, found)
    exact = jax.tree.map(lambda p, u: np.float32(p) + np.float32(u), params, updates)
    exact, _ = optclip.functional.clip_attention_logits(
        exact, {"attn": largest}, 100.0, LAYERS
    )
    for part in ("query", "key"):
        for x, u, y in zip(
            *(jax.tree.leaves(t[part]) for t in (new, found, exact)), strict=True
        ):
            assert x.dtype == jnp.bfloat16
            assert u.dtype == (np.float32 if wide else jnp.bfloat16)
            # Half a ULP if the update is float32; else that of the update as well.
            ulp = 2.0 ** (np.floor(np.log2(np.abs(np.float64(y)))) - 7)
            off = np.abs(np.float64(x) - np.float64(y)) / ulp
            assert off.max() <= (0.51 if wide else 2)


def test_the_record_is_of_each_layer():
    params = {
        name: {k: np.ones((3, 2, 4), np.float32) for k in ("query", "key")}
        for name in ("block_0/attn", "block_1/attn")
    }
    layers = optclip.find_heads(params, query="query", key="key")
    tx = clip_attention_logits({"block_0/attn": 100.0, "block_1/attn": None}, layers)
    state = tx.init(params)
    before = optclip.metrics(state)
    rows = [([400.0, 50.0], [np.nan, 60.0]), ([30.0, -2.0], [np.inf, -np.inf])]
    for first, second in rows:
        logits = {"block_0/attn": jnp.array(first), "block_1/attn": jnp.array(second)}
        _, state = tx.update(params, state, params, max_logits=logits)
        if first[0] == 400:
            seen = optclip.metrics(state)
            assert seen["attention/norm/block_0/attn"] == 400
            assert seen["attention/norm/block_1/attn"] == 60
            assert seen["attention/threshold/block_0/attn"] == 100
            assert seen["attention/threshold/block_1/attn"] == np.inf
            assert seen["attention/coefficient/block_0/attn"] == 0.25
            assert seen["attention/coefficient/block_1/attn"] == 1
            assert seen["attention/fraction/block_0/attn"] == 0.5
            assert seen["attention/fraction/block_1/attn"] == 0
            assert seen["attention/nonfinite/block_0/attn"] == 0
            assert seen["attention/nonfinite/block_1/attn"] == 1
    seen = optclip.metrics(state)
    assert before.keys() == seen.keys()
    assert seen["attention/norm/block_0/attn"] == 30
    assert seen["attention/norm/block_1/attn"] == 0
    assert seen["attention/rate/block_0/attn"] == 0.5
    assert seen["attention/nonfinite/block_0/attn"] == 1
    assert seen["attention/nonfinite/block_1/attn"] == 2
    assert state.clip_step == 2


def test_by_group_is_recorded_as_what_was_done():
    params = GQA.params()
    for by_group, wanted in ((False, 3 / 6), (True, 6 / 6)):
        tx = clip_attention_logits(100.0, LAYERS, by_group=by_group)
        _, state = tx.update(params, tx.init(params), params, max_logits=LOGITS)
        assert optclip.metrics(state)["attention/fraction/attn"] == wanted


@pytest.mark.parametrize("record", [True, "leaves", False])
def test_what_is_kept(record):
    params = GQA.params()
    tx = clip_attention_logits(100.0, LAYERS, record=record, name="qk")
    state = tx.init(params)
    found, after = jax.jit(tx.update)(params, state, params, max_logits=LOGITS)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    if not record:
        assert after == optax.EmptyState()
        with pytest.raises(TypeError, match="`state` must be EmptyState"):
            tx.update(params, 3, params, max_logits=LOGITS)
        # What is to be remembered still is.
        tx = clip_attention_logits(thresholds.ema(), LAYERS, record=False)
        _, after = tx.update(params, tx.init(params), params, max_logits=LOGITS)
        assert not after.clip_record
        assert jax.tree.leaves(after.clip_memory)
    else:
        assert optclip.metrics(after)["qk/norm/attn"] == 3000
    assert helpers.differs(found, params)


def test_thresholds_may_be_scheduled():
    params = GQA.params()
    tx = clip_attention_logits(optax.linear_schedule(100.0, 50.0, 2), LAYERS)
    state = tx.init(params)
    for wanted in (100.0, 75.0, 50.0):
        _, state = tx.update(params, state, params, max_logits=LOGITS)
        seen = optclip.metrics(state)
        assert seen["attention/threshold/attn"] == wanted
        gamma = attention.coefficients(LARGEST, wanted).min()
        np.testing.assert_allclose(seen["attention/coefficient/attn"], gamma, rtol=1e-6)


def test_rules_learn_from_logits_of_use_alone():
    params = GQA.params()
    tx = clip_attention_logits(thresholds.previous_norm(max_norm=100.0), LAYERS)
    state = tx.init(params)
    history = [
        ([150.0, 100, 20, 400, 3000, 50], 100.0 / 3000),
        # NaN, 0 and below are forgotten by a rule, as if the step had not been.
        ([np.nan, 200, -1, 400, 60, 0], None),
        ([30.0, 100, 20, 400, 3000, 50], None),
    ]
    for largest, gamma in history:
        logits = {"attn": np.array(largest, np.float32)}
        found, state = tx.update(params, state, params, max_logits=logits)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found))
        leaves = jax.tree.leaves(state.clip_memory)
        assert all(np.all(np.isfinite(x)) for x in leaves)
        if gamma:
            seen = optclip.metrics(state)["attention/coefficient/attn"]
            np.testing.assert_allclose(seen, gamma, rtol=1e-6)


def run_of(tx, params, steps):
    def step(carry, scale):
        params, state = carry
        updates = jax.tree.map(jnp.zeros_like, params)
        logits = {"attn": scale * LARGEST}
        updates, state = tx.update(updates, state, params, max_logits=logits)
        return (optax.apply_updates(params, updates), state), None

    scales = jnp.arange(1.0, steps + 1)
    return jax.lax.scan(step, (params, tx.init(params)), scales)[0]


def test_it_runs_in_a_scan_and_in_a_chain():
    params = jax.tree.map(jnp.asarray, GQA.params())
    tx = optax.chain(optax.sgd(0.1), clip_attention_logits(100.0, LAYERS))
    new, state = jax.jit(lambda p: run_of(tx, p, 3))(params)
    gamma = np.prod([attention.coefficients(k * LARGEST, 100.0) for k in (1, 2, 3)], 0)
    # The difference to the old weight is rounded as the old weight is.
    wanted = gamma[:, None, None] * GQA.logits(params)
    off = np.abs(GQA.logits(new) - wanted).max((1, 2))
    assert np.all(off < 1e-5 * np.abs(GQA.logits(params)).max())
    assert optclip.metrics(state)["attention/rate/attn"] == 1


def test_it_traces_once():
    params, traced = GQA.params(), []
    tx = clip_attention_logits(optax.linear_schedule(100.0, 50.0, 9), LAYERS)

    @jax.jit
    def step(params, state, logits):
        traced.append(None)
        return tx.update(params, state, params, max_logits=logits)

    state = tx.init(params)
    for _ in range(3):
        _, state = step(params, state, LOGITS)
    assert len(traced) == 1


def test_many_parameters_may_be_mapped():
    params = GQA.params()
    both = jax.tree.map(lambda x: np.stack([x, 2 * x]), params)
    tx = clip_attention_logits(100.0, LAYERS)
    logits = {"attn": np.stack([LARGEST, 2 * LARGEST])}

    def step(params, logits):
        return tx.update(params, tx.init(params), params, max_logits=logits)[0]

    batched = jax.vmap(step)(both, logits)
    for i in range(2):
        own = jax.tree.map(lambda x, i=i: x[i], both)
        alone = step(own, {"attn": logits["attn"][i]})
        for x, y in zip(*map(jax.tree.leaves, (batched, alone)), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-6)


def test_it_is_the_last_of_several_steps():
    """The user keeps the largest of all microbatches: `jnp.maximum`."""
    params = jax.tree.map(jnp.asarray, GQA.params())
    clip = optax.chain(optax.sgd(0.1), clip_attention_logits(100.0, LAYERS))
    tx = optax.MultiSteps(clip, 2)
    state, running = tx.init(params), {"attn": jnp.full(6, -jnp.inf)}
    new = params
    for k in (1.0, 0.5):
        running = jax.tree.map(jnp.maximum, running, {"attn": k * LARGEST})
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(zeros, state, new, max_logits=running)
        new = optax.apply_updates(new, updates)
        if k == 1:
            assert not helpers.differs(new, params)
    wanted = attention.coefficients(LARGEST, 100.0)[:, None, None] * GQA.logits(params)
    np.testing.assert_allclose(GQA.logits(new), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "max_logit", [100.0, thresholds.ema(), {"attn": thresholds.ema()}]
)
def test_no_entry_is_taken_for_parameters(max_logit):
    params = GQA.params()
    tx = clip_attention_logits(max_logit, LAYERS)
    state = tx.init(params)
    mapped = optax.tree_map_params(tx, lambda x: x + 1, state)
    assert not helpers.differs(mapped, state)


def test_hyperparameters_may_be_injected():
    params = GQA.params()
    make = optax.inject_hyperparams(clip_attention_logits)
    tx = make(max_logit=100.0, layers=LAYERS, balance=0.5)
    state = tx.init(params)
    state.hyperparams["max_logit"] = jnp.asarray(50.0)
    _, state = jax.jit(tx.update)(params, state, params, max_logits=LOGITS)
    seen = optclip.metrics(state)
    assert seen["attention/threshold/attn"] == 50


def test_masked_layers_are_left_out():
    params = GQA.params()
    mask = {"query": True, "key": True, "shared": False}
    tx = optax.masked(clip_attention_logits(100.0, LAYERS), mask)
    found, _ = tx.update(params, tx.init(params), params, max_logits=LOGITS)
    assert helpers.differs(found["key"], params["key"])
    assert not helpers.differs(found["shared"], params["shared"])


def test_weights_that_nobody_updates_are_refused():
    params = GQA.params()
    tx = clip_attention_logits(100.0, LAYERS)
    updates = params | {"key": {"kernel": params["key"]["kernel"], "bias": None}}
    updates["more"] = dict.fromkeys("abcdef", jnp.ones(()))
    five = r"\['key/kernel', 'more/a', 'more/b', 'more/c', 'more/d'\]"
    words = f"`updates` must have the leaf 'key/bias' that `layers` names, got {five}"
    with pytest.raises(ValueError, match=words):
        tx.update(updates, tx.init(params), params, max_logits=LOGITS)


def test_what_update_lacks_is_named():
    params = GQA.params()
    tx = optax.chain(clip_attention_logits(100.0, LAYERS))
    state = tx.init(params)
    with pytest.raises(ValueError, match="`params` must be the parameters.*, got None"):
        tx.update(params, state, max_logits=LOGITS)
    match = "`max_logits` must be a dict .*got None.*max_logits=.*optax.chain passes on"
    with pytest.raises(TypeError, match=match):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="must have the names of `layers`"):
        tx.update(params, state, params, max_logits={"other": LARGEST})


def test_what_cannot_be_is_refused_before_the_first_step():
    def make(max_logit=100.0, layers=LAYERS, **how):
        return clip_attention_logits(max_logit, layers, **how)

    for wrong, error in (
        ({"max_logit": -1.0}, ValueError),
        ({"max_logit": None}, TypeError),
        ({"max_logit": "x"}, TypeError),
        ({"layers": {}}, ValueError),
        ({"layers": [1]}, TypeError),
        ({"balance": -0.1}, ValueError),
        ({"by_group": None}, TypeError),
        ({"record": "all"}, TypeError),
        ({"name": ""}, TypeError),
    ):
        (name,) = wrong
        with pytest.raises(error, match=f"`{name}`"):
            make(**wrong)
    params = GQA.params()
    with pytest.raises(ValueError, match="`max_logit` must be a prefix"):
        make(max_logit={"other": 1.0}).init(params)
    with pytest.raises(ValueError, match="must name leaves of the parameters"):
        make().init({"query": params["query"]})
    with pytest.raises(ValueError, match="must name leaves of the parameters"):
        make(record=False).init({"query": params["query"]})
    state = make(name="other").init(params)
    with pytest.raises(ValueError, match="`state` must be of this clip"):
        make().update(params, state, params, max_logits=LOGITS)
