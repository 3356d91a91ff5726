"""Test QK-Clip as a pure function and as the last transformation of a chain."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from optclip import thresholds
from tests.support import attention, covering, helpers
from tests.support.attention import GQA, KINDS, LARGEST, LAYOUTS, MHA, MLA, MQA, Model
from tests.support.steps import over_steps, unstacked

MODEL = Model()
LAYERS, LOGITS = MODEL.layers(), MODEL.largest()
PARAMS = MODEL.params()
TX = optclip.clip_attention_logits(100.0, LAYERS)
FLAX, HAIKU, _, SCANNED, MAXTEXT = LAYOUTS[:5]


@functools.cache
def compiled(model):
    """Compile the pure function once per model; thresholds are traced."""
    layers = model.layers()

    def clip(params, largest, max_logit=100.0):
        return F.clip_attention_logits(params, largest, max_logit, layers)

    return helpers.quick_jit(clip)


def gamma_of(model):
    """Return the coefficients (layers, heads) of `LARGEST` at a threshold of 100."""
    largest = LARGEST[: model.layout.layers, : model.kind.heads]
    return attention.coefficients(largest, 100.0)


@pytest.mark.covering(
    layout=LAYOUTS,
    kind=KINDS,
    # Every layout for one kind of attention, and every kind in one layout.
    where=lambda layout, kind: (
        covering.full or kind in (GQA, MLA) or layout is LAYOUTS[0]
    ),
)
def test_clip_scales_logits_of_each_head_by_its_coefficient(layout, kind):
    """MLA as `maxtext/utils/qk_clip_utils.py`."""
    model = Model(layout, kind)
    params, gamma = model.params(), gamma_of(model)
    out, found = compiled(model)(params, model.largest(), 100.0)
    np.testing.assert_allclose(np.ravel(found["attn"]), gamma.ravel(), rtol=1e-6)
    model.assert_clipped(params, out, gamma)


UNUSABLE = (0.0, -0.0, -3.0, -np.inf, np.inf, np.nan)
UNCLIPPED = [(100.0, 100.0), (100.0, 20.0), *itertools.product((100.0, 0.0), UNUSABLE)]


@pytest.mark.parametrize(("max_logit", "logit"), UNCLIPPED)
@pytest.mark.parametrize("kind", [GQA, MLA], ids=lambda kind: kind.id)
def test_clip_small_or_unusable_logits_keep_weights_bit_identical(
    kind, max_logit, logit
):
    """The published code gives NaN for a negative logit, and zeros for -inf."""
    model = Model(kind=kind)
    # A product with 1 would flush subnormal weights.
    params = jax.tree.map(
        lambda x: np.where(x > 1, np.float32(1e-41), x), model.params()
    )
    logits = np.full_like(LARGEST, logit)
    clip = compiled(model)
    out, found = clip(params, model.largest(logits), max_logit)
    helpers.assert_identical(out, params)
    np.testing.assert_array_equal(found["attn"], 1)
    logits[:, 0] = 300.0
    # A traced threshold of NaN clips nothing.
    helpers.assert_identical(clip(params, model.largest(logits), np.nan)[0], params)
    out, found = clip(params, model.largest(logits), max_logit)
    np.testing.assert_array_equal(found["attn"][1:], 1)
    after = model.parts(out)
    for part, before in model.parts(params).items():
        in_group = kind.heads // kind.groups if part[0] == "query" else 1
        assert np.all(np.isfinite(after[part]))
        assert np.any(after[part][:, 0] != before[:, 0])
        np.testing.assert_array_equal(after[part][:, in_group:], before[:, in_group:])


@pytest.mark.parametrize("max_logit", [0.0, 1e-30, 1e-12])
def test_clip_tiny_coefficients_stay_finite(max_logit):
    """A coefficient of 0 does not make others in its group infinite."""
    largest = np.array([1e20, -1.0, 1e-13, 1e20, 1e10, 1.0], np.float32)
    out, found = compiled(MODEL)(PARAMS, {"attn": largest}, max_logit)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(out))
    wanted = np.float64(found["attn"])[:, None, None] * MODEL.logits(PARAMS)
    # float32 flushes smaller weights and coefficients.
    np.testing.assert_allclose(MODEL.logits(out), wanted, rtol=1e-5, atol=1e-25)
    assert found["attn"][1] == 1
    assert found["attn"][2] == (1 if max_logit >= 1e-13 else 0)


BY_HEAD = np.array([1.0, np.inf, 10.0, 100.0, 50.0, 100.0], np.float32)


@pytest.mark.parametrize(
    ("max_logit", "limits"),
    [({"attn": 10.0}, 10.0), (BY_HEAD, BY_HEAD), ({"attn": None}, np.inf)],
    ids=["layer", "head", "none"],
)
def test_clip_takes_thresholds_per_layer_and_per_head(max_logit, limits):
    out, found = compiled(MODEL)(PARAMS, LOGITS, max_logit)
    gamma = attention.coefficients(LARGEST[:1], limits)
    np.testing.assert_allclose(found["attn"], gamma[0], rtol=1e-6)
    MODEL.assert_clipped(PARAMS, out, gamma)


def test_clip_bfloat16_weights_are_rounded_once():
    params = MODEL.params(jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(np.float32), params)
    out, exact = (compiled(MODEL)(p, LOGITS)[0] for p in (params, wide))
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), exact)
    helpers.assert_identical(out, rounded)
    assert helpers.differs(out, params)


def test_clip_float64_weights_stay_accurate_in_float64():
    with jax.enable_x64(True):
        params = MODEL.params(np.float64)
        out, _ = compiled(MODEL)(params, {"attn": LOGITS["attn"].astype(np.float64)})
    wanted = gamma_of(MODEL)[..., None, None] * MODEL.logits(params)
    np.testing.assert_allclose(MODEL.logits(out), wanted, rtol=1e-11, atol=1e-12)


def test_clip_keeps_structure_and_dtypes():
    """Keys may have other inputs than queries."""
    params = {
        "q": jnp.ones((2, 3, 6), jnp.float16),
        "k": [jnp.full((2, 5, 6), 2.0) * 1, None],
        "step": 3,
    }
    layers = {"a": optclip.Heads("q", "k/0", axis=0)}
    logits = {"a": np.array([400, 50])}
    clip = helpers.quick_jit(lambda p: F.clip_attention_logits(p, logits, 100, layers))
    out, found = clip(params)
    helpers.assert_same_types(out, params)
    assert found["a"].dtype == jnp.float32
    halves = np.array([0.5, 1])[:, None, None]
    np.testing.assert_allclose(out["q"], np.broadcast_to(halves, (2, 3, 6)))
    np.testing.assert_allclose(out["k"][0], np.broadcast_to(2 * halves, (2, 5, 6)))


def test_clip_derivatives_are_finite():
    largest = {"attn": np.array([150, np.nan, -1, np.inf, 3000, 50], np.float32)}

    def loss(params, limit):
        return optax.tree.sum(
            F.clip_attention_logits(params, largest, limit, LAYERS)[0]
        )

    gradient = helpers.quick_jit(jax.grad(loss, (0, 1)))
    for limit in (100.0, 0.0):
        slopes = jax.tree.leaves(gradient(PARAMS, limit))
        assert all(np.all(np.isfinite(x)) for x in slopes)
        assert any(np.any(x != 0) for x in slopes)


def test_clip_unusable_logits_under_debug_nans_raise_nothing():
    """No operation returns NaN, even uncompiled."""
    logits = {"attn": np.array([150.0, -np.inf, -1.0, np.inf, 50, 0], np.float32)}
    with jax.debug_nans(True):
        F.clip_attention_logits(PARAMS, logits, 100.0, LAYERS)


TREE = {
    "attn": {
        "q": np.ones((3, 4, 2)),
        "q2": np.ones((4, 2)),
        "k": np.ones((3, 4, 2)),
        "one": np.ones(()),
    },
    "ints": np.ones((4, 2), int),
    "flat": np.ones((3, 8)),
    "odd": np.ones((3, 3, 2)),
    "odd2": np.ones((3, 2)),
    "none": np.ones((3, 0, 2)),
    "wide": np.ones((3, 4, 3)),
    "narrow": np.ones((3, 4, 1)),
    "values": np.ones((3, 4, 9)),
    "tall": np.ones((5, 4, 2)),
}
Q, K = "attn/q", "attn/k"
FLAT = {"axis": 1, "rope": 1, "head_dim": 2}
# Query and key of a layer, and the layout; `tests/contracts/test_bad_input.py` has more.
MISFITS = [
    (Q, "attn/keys", {}, r"must name leaves .* 'attn/keys'. The paths are .*attn/k"),
    (Q, Q, {}, "name each leaf once, got 'attn/q' in 'a' and 'a'.* use two leaves"),
    (Q, "ints", {}, "'ints' in `layers` must be a dense floating-point array, got int"),
    (Q, "attn/one", {}, r"`axis` must be an axis of 'attn/one' of shape \(\), got -2"),
    (Q, "odd", {}, "must divide .* query heads, got 3 in 'odd' and 4 in 'attn/q'"),
    ((Q, "attn/q2"), ("odd", "odd2"), {}, "got 3 in 'odd' and 4 in 'attn/q'"),
    (Q, "none", {}, "got 0 in 'none' and 4 in"),
    ("none", "odd", {}, "got 3 in 'odd' and 0 in 'none'"),
    ("none", "odd", FLAT, "got 1 in 'odd' and 0 in 'none'"),
    (Q, "none", FLAT, "got 0 in 'none' and 2 in 'attn/q'"),
    ((Q, "odd"), K, {}, "same number of heads .* got 3 and 1 in 'odd', expected 4 as"),
    (Q, (K, "odd"), {}, "in 'odd', expected 4 as in 'attn/k' and 1 as in 'attn/q'"),
    (Q, "tall", {"stacked": 0}, "got 4 and 5 in 'tall', expected 4 as in 'tall' and 3"),
    (Q, "values", {}, r"'a' must have the same size.*rope="),
    ("wide", "narrow", {"rope": 1}, "'narrow' must have at least 2 entries.* got 1"),
    (Q, K, {"axis": -4}, "`axis` must be an axis of 'attn/q'"),
    (Q, K, {"stacked": 3}, "`stacked` must be an axis of 'attn/q'"),
    (Q, K, {"stacked": 2, "rope": 1}, "axis of heads must differ, got axis 2"),
    (Q, K, {"axis": -1, "rope": 1}, "'attn/q' must have at least 2 entries.* got 0"),
]
# Other arguments.
WRONG = [
    ({"logits": {"a": 1, "b": 1}}, ValueError, r"got \['a', 'b'\]"),
    ({"logits": {"a": np.ones((1, 4))}}, ValueError, r"got \(1, 4\)"),
    ({"logits": {"a": 1j * np.ones(4)}}, TypeError, "array of real numbers"),
    ({"logits": {"a": [1] * 4}}, TypeError, "`logits` at 'a' must be"),
    (
        {"layers": {"a": optclip.Heads(Q, K, stacked=0)}},
        ValueError,
        r"\(3, 4\) of the layers and query heads",
    ),
    ({"layers": {1: 2}}, TypeError, "A name in `layers` must be a string, got 1"),
    ({"max_logit": {"b": 1.0}}, ValueError, "`max_logit`"),
    ({"max_logit": np.ones(3)}, ValueError, "`max_logit`"),
]


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"layers": {"a": optclip.Heads(query, key, **options)}}, ValueError, match)
        for query, key, options, match in MISFITS
    ]
    + WRONG,
)
def test_clip_attention_logits_mismatched_arguments_raise(wrong, error, match):
    arguments = {
        "logits": {"a": np.ones(4)},
        "max_logit": 1.0,
        "layers": {"a": optclip.Heads(Q, K)},
    }
    with pytest.raises(error, match=match):
        F.clip_attention_logits(TREE, **(arguments | wrong))


@functools.cache
def compiled_update(model=MODEL, **options):
    """Compile the first update of the transformation."""
    tx = optclip.clip_attention_logits(100.0, model.layers(), **options)

    def update(updates, params, logits):
        return tx.update(updates, tx.init(params), params, logits=logits)

    return helpers.quick_jit(update)


def updates_of(params, size=0.1):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: (size * rng.normal(size=x.shape)).astype(x.dtype), params
    )


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (FLAX, GQA),
        (HAIKU, MHA),
        (SCANNED, MQA),
        (MAXTEXT, MLA),
    ],
    ids=["gqa", "mha", "mqa", "mla"],
)
def test_update_leads_to_clipped_parameters(layout, kind):
    model = Model(layout, kind)
    params = model.params()
    updates = updates_of(params)
    found, state = compiled_update(model)(updates, params, model.largest())
    moved = jax.tree.map(np.add, params, updates)
    new = jax.tree.map(np.add, params, found)
    gamma = gamma_of(model)
    # The difference to a weight has the rounding error of the weight.
    model.assert_clipped(moved, new, gamma, atol=1e-6)
    least = optclip.metrics(state)["attention/coefficient/attn"]
    np.testing.assert_allclose(least, gamma.min(), rtol=1e-6)


def test_update_of_unclipped_heads_is_bit_identical():
    updates = updates_of(PARAMS, 1e-9)
    largest = np.array([150.0, 20, 20, 100, 99, -1], np.float32)
    found, _ = compiled_update()(updates, PARAMS, {"attn": largest})
    after = MODEL.parts(found)
    for part, before in MODEL.parts(updates).items():
        clipped = 3 if part[0] == "query" else 1
        np.testing.assert_array_equal(after[part][:, clipped:], before[:, clipped:])
        assert np.all(after[part][:, :clipped] != before[:, :clipped])
    helpers.assert_identical(found["shared"], updates["shared"])


def ulp_of(x):
    """Return the unit in the last place of bfloat16."""
    return 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_update_of_bfloat16_weights_is_accurate(dtype):
    """Updates are accurate to half an ulp of the weight, and of a bfloat16 update."""
    params = MODEL.params(jnp.bfloat16)
    updates = jax.tree.map(lambda x: x.astype(dtype), updates_of(params, 0.01))
    largest = np.array([150, 120, 20, 190, 101, 50], np.float32)
    found, state = compiled_update(record=False)(updates, params, {"attn": largest})
    assert state == optax.EmptyState()
    assert all(x.dtype == dtype for x in jax.tree.leaves(found))
    new = jax.tree.map(
        lambda p, u: (np.float32(p) + np.float32(u)).astype(jnp.bfloat16), params, found
    )
    moved = jax.tree.map(lambda p, u: np.float64(p) + np.float64(u), params, updates)
    gamma = attention.coefficients(largest[None], 100.0)
    before, after = MODEL.parts(params), MODEL.parts(new)
    for part, wanted in MODEL.clipped(moved, gamma).items():
        room = ulp_of(wanted)
        if dtype == jnp.bfloat16:
            room = room + ulp_of(wanted - before[part])
        assert np.all(np.abs(after[part] - wanted) <= 0.51 * room)


TWO_LAYERS = {
    name: {k: np.ones((3, 2, 4), np.float32) for k in ("query", "key")} for name in "ab"
}
# The largest logits of two steps, and the record after each.
RECORDS = [
    (
        {"a": [400.0, 50.0], "b": [np.nan, 60.0]},
        {
            "norm": (400, 60),
            "threshold": (100, np.inf),
            "coefficient": (0.25, 1),
            "fraction": (0.5, 0),
            "nonfinite": (0, 1),
        },
    ),
    (
        {"a": [30.0, -2.0], "b": [np.inf, -np.inf]},
        {"norm": (30, 0), "rate": (0.5, 0), "nonfinite": (1, 2)},
    ),
]


def test_update_records_each_layer():
    layers = optclip.find_heads(TWO_LAYERS, query="query", key="key")
    tx = optclip.clip_attention_logits({"a": 100.0, "b": None}, layers)
    update, state = helpers.quick_jit(tx.update), tx.init(TWO_LAYERS)
    names = optclip.metrics(state).keys()
    for logits, expected in RECORDS:
        logits = {k: np.float32(v) for k, v in logits.items()}
        _, state = update(TWO_LAYERS, state, TWO_LAYERS, logits=logits)
        metrics = optclip.metrics(state)
        assert metrics.keys() == names
        for quantity, values in expected.items():
            found = tuple(metrics[f"attention/{quantity}/{layer}"] for layer in "ab")
            assert found == values


@pytest.mark.parametrize(
    ("max_logit", "rows", "coefficients"),
    [
        (
            optax.linear_schedule(100.0, 50.0, 2),
            [LARGEST[0]] * 3,
            [100 / 3000, 75 / 3000, 50 / 3000],
        ),
        # The second step has two heads with unusable logits, which keep their memory:
        # the third clips by their logits of the first step, and by those of the second
        # for the other heads.
        (
            thresholds.previous_norm(max_norm=100.0),
            [LARGEST[0], [np.nan, 200, -1, 400, 60, 0], 2 * LARGEST[0]],
            [100 / 3000, 100 / 3000, 100 / 400],
        ),
    ],
    ids=["schedule", "rule"],
)
def test_update_follows_schedules_and_rules(max_logit, rows, coefficients):
    tx = optclip.clip_attention_logits(max_logit, LAYERS, record="leaves", name="qk")
    params = jax.tree.map(lambda x: np.stack([x] * 3), PARAMS)
    updates, states = over_steps(tx, params, params, logits={"attn": np.float32(rows)})
    leaves = jax.tree.leaves((updates, states.clip_memory))
    assert all(np.all(np.isfinite(x)) for x in leaves)
    least = [
        optclip.metrics(state)["qk/coefficient/attn"] for state in unstacked(states)
    ]
    np.testing.assert_allclose(least, coefficients, rtol=1e-6)


@pytest.mark.parametrize(
    "max_logit", [100.0, thresholds.ema(), {"attn": thresholds.ema()}]
)
def test_tree_map_params_keeps_the_state(max_logit):
    tx = optclip.clip_attention_logits(max_logit, LAYERS)
    state = tx.init(PARAMS)
    helpers.assert_identical(optax.tree_map_params(tx, lambda x: x + 1, state), state)


def test_update_in_wrappers_matches_unwrapped_update():
    """MultiSteps passes on the logits of its last microbatch."""
    inject = optax.inject_hyperparams(optclip.clip_attention_logits)
    injected = inject(optax.constant_schedule(100.0), layers=LAYERS)
    masked = optax.masked(injected, {"query": True, "key": True, "shared": False})
    tx = optax.MultiSteps(optax.chain(optax.identity(), masked), 1)
    update = helpers.quick_jit(tx.update)
    updates, state = update(PARAMS, tx.init(PARAMS), PARAMS, logits=LOGITS)
    wanted, _ = compiled_update()(PARAMS, PARAMS, LOGITS)
    helpers.assert_close(updates, wanted, ulps=2)
    assert helpers.differs(updates["key"], PARAMS["key"])
    assert optclip.metrics(state)["attention/threshold/attn"] == 100


PARTIAL = PARAMS | {
    "key": {"kernel": PARAMS["key"]["kernel"], "bias": None},
    "more": dict.fromkeys("abcdef", np.ones(())),
}
FIVE = r"\['key/kernel', 'more/a', 'more/b', 'more/c', 'more/d'\]"


def update(updates, params, logits):
    return optax.chain(TX).update(updates, (TX.init(PARAMS),), params, logits=logits)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: update(PARAMS, None, LOGITS),
            *(ValueError, "`params` must be the parameters.* None"),
        ),
        (
            # Optax passes on unknown extra arguments, such as a misspelled one.
            lambda: TX.update(PARAMS, TX.init(PARAMS), PARAMS, max_logit=LOGITS),
            *(TypeError, "`logits` must be a dict .* None.*logits=.*optax"),
        ),
        (
            lambda: update(PARAMS, PARAMS, {"b": LARGEST}),
            *(ValueError, "must have the names of `layers`"),
        ),
        (
            lambda: update(PARTIAL, PARAMS, LOGITS),
            *(ValueError, f"the leaf 'key/bias' .* got {FIVE}"),
        ),
        (
            lambda: optclip.clip_attention_logits({"other": 1.0}, LAYERS).init(PARAMS),
            *(ValueError, "`max_logit` must be a prefix"),
        ),
        (
            lambda: TX.init({"query": PARAMS["query"]}),
            *(ValueError, "must name leaves of the parameters"),
        ),
        (
            lambda: optclip.clip_attention_logits(100.0, LAYERS, record=False).init(
                {"query": PARAMS["query"]}
            ),
            *(ValueError, "must name leaves of the parameters"),
        ),
    ],
)
def test_update_and_init_mismatched_arguments_raise(call, error, match):
    with pytest.raises(error, match=match):
        call()
