"""`check_norms` compares a record with the gradients of its step, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optclip
from tests.support import helpers
from tests.support.running_rules import UserRule

GRADS = {
    "bias": np.array([3.0, -1.0], np.float32),
    "head": {"kernel": np.full((2, 3), 2.0, np.float32)},
    "step": np.int32(4),
}
FLOATS = {"bias": GRADS["bias"], "head": GRADS["head"]}
NORMS = ["bias", "head/kernel"]
LABELS = {"bias": "small", "head": {"kernel": "large"}}


def after(tx, grads=GRADS):
    return tx.update(grads, tx.init(grads), grads)[1]


def clip(**options):
    return optclip.clip_by_global_norm(1.0, record="leaves", **options)


RIGHT = {
    "tree": (clip(), {}, NORMS),
    "tree alone": (optclip.clip_by_global_norm(1.0), {}, [""]),
    "leaves": (optclip.clip_by_norm(1.0, record="leaves"), {}, NORMS),
    "groups": (
        optclip.clip_by_group_norm({"small": 1.0, "large": 1.0}, LABELS),
        {"over": optclip.groups(LABELS)},
        ["large", "small"],
    ),
    "chain in skip": (optclip.skip(optax.chain(clip(), optax.sgd(1.0))), {}, NORMS),
    "by name": (
        optclip.skip(optax.chain(clip(), optax.sgd(1.0)), record="leaves"),
        {"name": "skip"},
        NORMS,
    ),
    "history": (optclip.with_history(optax.chain(clip(), optax.sgd(1.0))), {}, NORMS),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_norms_have_ratio_1(case):
    tx, options, keys = RIGHT[case]
    check = optclip.check_norms(after(tx, FLOATS), FLOATS, **options)
    assert [*check.ratios] == keys
    np.testing.assert_allclose([*check.ratios.values(), check.total], 1, rtol=1e-6)
    assert check.ok
    assert "cover the whole arrays, on all devices." in str(check)


def test_tree_of_integers_has_no_norms():
    state = after(optclip.clip_by_norm(1.0, record="leaves"), {"step": GRADS["step"]})
    assert optclip.check_norms(state, {"step": GRADS["step"]}).ratios == {}


def test_integers_and_duplicates_of_sparse_leaves():
    indices = np.array([[0], [0], [2]])
    sparse = BCOO((np.float32([1.0, 2.0, 5.0]), indices), shape=(3,))
    grads = {**GRADS, "rows": sparse, "none": None}
    check = optclip.check_norms(after(clip(), grads), grads)
    assert check.ok
    assert [*check.ratios] == [*NORMS, "rows"]


@pytest.mark.parametrize("masking", ["mask", "optax.masked"])
def test_leaf_outside_of_norm_has_ratio_0_unless_masked(masking):
    mask = {"bias": True, "head": {"kernel": False}, "step": False}
    tx = clip(mask=mask) if masking == "mask" else optax.masked(clip(), mask)
    check = optclip.check_norms(after(tx), GRADS)
    assert not check.ok
    assert check.ratios["head/kernel"] == 0
    assert check.findings[0].startswith("`head/kernel`: 0: left out of the norm.")
    check = optclip.check_norms(after(tx), GRADS, mask=mask)
    assert check.ok
    assert [*check.ratios] == ["bias"]


KERNEL = np.float32([[3, 4, 0], [1, 2, 5]])
HEADS = {
    "tied": KERNEL.T,
    "near": np.nextafter(KERNEL.T, 9),
    "opposite": -KERNEL.T,
    "same norm": np.float32([[0, 5, 0], [1, 2, 5]]),
}


@pytest.mark.parametrize("case", HEADS)
def test_tied_leaves_are_asked_for(case):
    kernel, head, tied = KERNEL, HEADS[case], case == "tied"
    grads = {"embed": kernel, "head": head, "a": jnp.zeros(2), "b": jnp.zeros(2)}
    check = optclip.check_norms(after(clip(), grads), grads)
    assert check.ok
    assert len(check.questions) == tied
    if tied:
        assert check.questions[0].startswith("`embed` and `head` hold the same numbers")
        assert check.questions[0] in helpers.unwrapped(str(check))


@pytest.mark.parametrize(
    ("factor", "words"),
    [(0.5, "2 times as large"), (2.0, "0.5 times as large"), (np.sqrt(0.3), "1.826")],
)
def test_other_gradients_are_found(factor, words):
    scaled = {"a": factor * np.ones(3), "b": factor * np.full(2, 5.0)}
    grads = {"a": np.ones(3), "b": np.full(2, 5.0)}
    check = optclip.check_norms(after(clip(), grads), scaled)
    np.testing.assert_allclose(check.total, factor**-2, rtol=1e-6)
    assert len(check.findings) == 1
    assert f"measured gradients {words}" in check.findings[0]


def test_nonfinite_gradients_are_found():
    grads = {"a": np.ones(3), "b": np.array([np.inf, 1.0])}
    check = optclip.check_norms(after(clip(), grads), grads)
    assert not check.ok
    assert check.ratios["a"] == pytest.approx(1)
    assert check.findings[0].startswith("`b`: nan: not finite")


@pytest.mark.parametrize(("before", "now"), [(1, 0), (np.inf, 1), (1, np.inf), (0, 1)])
def test_leaves_that_are_zero_or_not_finite_on_one_side_are_found(before, now):
    recorded, passed = (
        {"a": x * np.ones(3), "b": x * np.ones(2)} for x in (before, now)
    )
    check = optclip.check_norms(after(clip(), recorded), passed)
    assert not check.ok
    words = "not finite, or 0 only in these gradients" if before else "left out"
    assert f"`a`: {check.total}: {words}" in str(check).replace("`a`: 0:", "`a`: 0.0:")


@pytest.mark.parametrize("size", [1e-17, 1e-19, 1e-25, 1e-40, 1e30, 1e200])
@pytest.mark.parametrize("number", [0, 1, 1000])
def test_leaves_of_extreme_size_are_no_mistake(size, number):
    """Squares of elements below 2**-60 are lost in float32, and above 1e154 anywhere."""
    dtype = np.float64 if size > 1e38 else np.float32
    grads = {"a": np.full(number, size, dtype), "b": np.ones(2, dtype)}
    with jax.enable_x64(dtype == np.float64):
        assert optclip.check_norms(after(clip(), grads), grads).ok


def test_half_of_a_leaf_that_is_missing_is_named():
    """No name is broken into lines, so that it can be copied."""
    name = "block/" * 15 + "kernel"
    grads = {name: np.ones(4), "b": np.ones(2)}
    check = optclip.check_norms(after(clip(), grads | {name: np.ones(2)}), grads)
    words = "half of it is missing. Pass axis_name=specs, () for whole arrays."
    assert check.findings == [f"`{name}`: 0.5: {words}"]
    assert f"`{name}`:" in str(check)
    tx, whole = optclip.clip_by_global_norm(1.0), dict.fromkeys("ab", np.ones(4))
    check = optclip.check_norms(after(tx, whole | {"b": np.zeros(4)}), whole)
    assert 'record="leaves" shows in which leaf' in check.findings[0]


def test_leaves_that_are_measured_before_they_are_rounded_are_no_mistake():
    @jax.jit
    def step(x):
        grads = {"a": x * jnp.bfloat16(1.37)}
        return grads, after(clip(), grads)

    grads, state = step(jnp.array([1.234, 2.2, 0.3], jnp.bfloat16))
    check = optclip.check_norms(state, grads)
    assert check.ok, str(check)


@pytest.mark.parametrize("name", ["clip", "clip_2"])
def test_records_of_one_name_have_the_names_of_metrics(name):
    state = after(optax.chain(clip(), clip()), FLOATS)
    norm = float(optclip.metrics(state)["clip/norm"])
    grads = jax.tree.map(lambda x: x / norm if name == "clip_2" else x, FLOATS)
    assert optclip.check_norms(state, grads, name=name).ok


def test_chain_restored_as_list_is_no_list_of_stages():
    grads = [GRADS["bias"], GRADS["head"]["kernel"]]
    state = after(optax.chain(clip(), optax.sgd(1.0)), grads)
    assert optclip.check_norms([*state], grads).ratios.keys() == {"0", "1"}


def test_rule_whose_memory_is_a_random_key():
    rule = UserRule(jax.random.key(0), lambda _, key: (1.0, key))
    state = after(optclip.clip_by_global_norm(rule, record="leaves"), FLOATS)
    assert optclip.check_norms(state, FLOATS).ok


def test_first_record_is_checked_and_others_are_named():
    tx = optax.chain(clip(), optax.scale(2.0), clip(name="scaled"))
    state = after(tx, FLOATS)
    check = optclip.check_norms(state, FLOATS)
    assert (check.ok, check.name, check.others) == (True, "clip", ["scaled"])
    assert "Not checked, pass name=: 'scaled'." in str(check)
    check = optclip.check_norms(state, FLOATS, name="scaled")
    assert (check.ok, check.name, check.others) == (False, "scaled", ["clip"])
    # `skip` records one norm, and clipping inside it those of leaves.
    inside = optclip.skip(optax.chain(clip(), optax.sgd(1.0)))
    assert optclip.check_norms(after(inside, FLOATS), FLOATS).name == "clip"


# One of several norms, and the largest, which is not the norm of the tree.
@pytest.mark.parametrize(
    "tx", [optclip.clip_by_norm(1.0), optclip.clip_by_value(1.0), optclip.recipes.agc()]
)
def test_record_of_one_of_several_norms_raises(tx):
    with pytest.raises(ValueError, match='record="leaves"'):
        optclip.check_norms(after(tx), GRADS)


def test_gradients_of_another_step_are_named_once_without_advice_on_axes():
    other = {"a": np.ones(3), "b": np.array([2.0, 5.0]), "c": np.ones(2)}
    grads = {"a": np.ones(3) / 2, "b": np.array([2.0, 4.0]), "c": np.ones(2)}
    check = optclip.check_norms(after(clip(), grads), other)
    assert len(check.findings) == 1
    assert check.findings[0].startswith("`a`: 0.25, `b`: 0.6897: not the norm of these")
    assert "axis_name" not in str(check)


ERRORS = {
    "no step": (lambda: (clip().init(GRADS), GRADS), {}, "after a step"),
    "no record": (
        lambda: (optax.EmptyState(), GRADS),
        {},
        "`opt_state` must be an optimizer state with a record of optclip, got Empty",
    ),
    "unknown": (lambda: (after(clip()), GRADS), {"name": "x"}, "got 'x'"),
    "largest": (
        lambda: (after(optclip.clip_by_norm(1.0)), GRADS),
        {"over": "leaf"},
        "rec",
    ),
    "labels": (
        lambda: (after(RIGHT["groups"][0], FLOATS), FLOATS),
        {},
        r"lacks \['large', 'small'\].* over=optclip\.groups\(labels\)",
    ),
    "leaf": (
        lambda: (after(clip()), {"bias": GRADS["bias"]}),
        {},
        "lacks .'head/kernel'",
    ),
    "layers": (
        lambda: (
            after(
                optclip.clip_by(
                    1.0, over=optclip.layers("head/kernel"), record="leaves"
                )
            ),
            GRADS,
        ),
        {},
        "whole leaves",
    ),
    "slices": (
        lambda: (
            after(optclip.clip_by(1.0, over=optclip.units(), record="leaves")),
            GRADS,
        ),
        {"over": optclip.units()},
        "whole leaves",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_checked_raises(case):
    make, options, words = ERRORS[case]
    with pytest.raises(ValueError, match=words):
        optclip.check_norms(*make(), **options)


def test_skipped_step_raises():
    tx = optclip.skip(optax.chain(clip(), optax.sgd(1.0)), max_norm=1.0)
    with pytest.raises(ValueError, match="after a skipped step"):
        optclip.check_norms(after(tx), GRADS)


def test_traced_state_raises():
    with pytest.raises(TypeError, match="outside jax.jit"):
        jax.jit(lambda state: optclip.check_norms(state, GRADS).total)(after(clip()))
