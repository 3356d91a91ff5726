"""`metrics` returns the records of every clipping transformation in a state."""

import functools
import typing

import chex
import jax
import numpy as np
import optax
import pytest

import optclip
from tests.support import helpers, oracles

KEYS = {"norm", "threshold", "coefficient", "clipped", "rate", "nonfinite"}
TREE = helpers.gradients()
WIDE = helpers.as_float64(TREE)
SIZES = {
    "dense/bias": oracles.norm(WIDE["dense"]["bias"]),
    "dense/kernel": oracles.norm(WIDE["dense"]["kernel"]),
    "out/0": oracles.norm(WIDE["out"][0]),
}
PAIR = np.float32([3.0, 4.0])


def test_metrics_per_scope_are_one_norm_or_extremes_or_entries():
    """Compute the metrics of one step in float64, per transformation of the chain."""
    labels = {"dense": "body", "out": "head"}
    clips = {
        "tree": optclip.clip_by_global_norm(2.0, name="tree"),
        "group": optclip.clip_by_group_norm(
            {"body": 1e4, "head": 1.0}, labels, name="group"
        ),
        "leaf": optclip.clip_by_norm(2.0, name="leaf"),
        "leaves": optclip.clip_by_norm(2.0, record="leaves", name="leaves"),
        "element": optclip.clip_by_value(0.5, name="element"),
    }

    @helpers.quick_jit
    def step(tree):
        states = [clip.update(tree, clip.init(tree))[1] for clip in clips.values()]
        return optclip.metrics(states)

    found = step(TREE)
    chex.assert_shape(list(found.values()), ())
    extremes = KEYS | {"fraction"}
    keys = {f"tree/{k}" for k in KEYS}
    keys |= {f"group/{k}/{label}" for k in KEYS for label in ("body", "head")}
    keys |= {f"leaves/{k}/{path}" for k in extremes for path in SIZES}
    keys |= {f"{name}/{k}" for name in ("leaf", "element") for k in extremes}
    keys |= {f"{name}/steps" for name in clips}
    assert found.keys() == keys
    elements = np.abs(np.concatenate([x.ravel() for x in jax.tree.leaves(WIDE)]))
    total, largest = oracles.tree_norm(WIDE), max(SIZES.values())
    expected = {
        "tree/norm": total, "tree/coefficient": 2 / total, "tree/threshold": 2,
        "tree/clipped": 1, "group/clipped/body": 0, "leaves/clipped/out/0": 1,
        "tree/rate": 1, "tree/nonfinite": 0, "tree/steps": 1,
        "group/norm/head": oracles.tree_norm(WIDE["out"]),
        "group/rate/body": 0, "group/rate/head": 1, "group/threshold/body": 1e4,
        "leaf/norm": largest, "leaf/coefficient": 2 / largest,
        "leaf/fraction": np.mean([size > 2 for size in SIZES.values()]),
        "leaves/rate/dense/bias": 0, "leaves/rate/out/0": 1,
        "element/norm": elements.max(), "element/threshold": 0.5,
        "element/coefficient": 0.5 / elements.max(),
        "element/fraction": np.mean(elements > 0.5),
    }  # fmt: skip
    expected |= {f"leaves/norm/{path}": size for path, size in SIZES.items()}
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6, err_msg=key)
    assert 0 < expected["leaf/fraction"] < 1
    assert 0 < expected["element/fraction"] < 1


def test_metrics_number_clips_of_one_name_around_given_names():
    tx = optax.chain(
        optclip.clip_by_global_norm(4.0),
        optclip.clip_by_global_norm(2.0),
        optclip.clip_by_global_norm(1.0, name="clip_2"),
    )
    _, state = helpers.quick_jit(tx.update)(PAIR, tx.init(PAIR))
    found = optclip.metrics(state)
    limits = {key: float(x) for key, x in found.items() if "threshold" in key}
    assert limits == {
        "clip/threshold": 4.0, "clip_3/threshold": 2.0, "clip_2/threshold": 1.0
    }  # fmt: skip
    np.testing.assert_allclose(found["clip_3/norm"], 4.0, rtol=1e-6)


class LenientTuple(typing.NamedTuple):
    """Answer None for attributes that do not exist, as the buffers of rejax."""

    data: typing.Any

    def __getattr__(self, name):
        return None


class Meta(type):
    def __getattr__(cls, name):
        return ("clip_record", "skip_norm")


class LenientType(tuple, metaclass=Meta):
    """Answer with fields that only the type claims to have."""

    __slots__ = ()


@pytest.mark.parametrize("other", [LenientTuple(0), LenientType((0,))])
def test_metrics_and_summary_read_no_attributes_of_other_nodes(other):
    tx = optclip.clip_by_global_norm(4.0)
    _, state = tx.update(PAIR, tx.init(PAIR))
    assert optclip.metrics({"a": other, "opt": state}) == optclip.metrics(state)
    assert optclip.summary([other, state]) == optclip.summary(state)
    with pytest.raises(ValueError, match="`opt_state` must be"):
        optclip.metrics(other)


@pytest.mark.parametrize("wrap", [optclip.with_periodic_reset, optclip.recipes.uclip])
def test_metrics_and_summary_of_wrapper_without_record_raise(wrap):
    """The wrapper is an optclip transformation, but records nothing itself."""
    state = wrap(optax.sgd(1.0)).init(PAIR)
    for read in (optclip.metrics, optclip.summary):
        with pytest.raises(ValueError, match="a record.*wrappers.*record nothing"):
            read(state)


def restored(state, *, numbered=False, boxed=False):
    """Return a state as Orbax or msgpack restore it without a target.

    Named tuples are dicts with sorted keys, without None; tuples are lists or, with
    `numbered`, dicts from "0" on. Flax NNX stores each array in a box.
    """
    parts = functools.partial(restored, numbered=numbered, boxed=boxed)
    if hasattr(state, "_fields"):
        state = {k: x for k, x in state._asdict().items() if x is not None}
    elif isinstance(state, (list, tuple)):
        if not numbered:
            return [parts(x) for x in state]
        state = {str(i): x for i, x in enumerate(state)}
    if not isinstance(state, dict):
        return {"value": np.asarray(state)} if boxed else np.asarray(state)
    return {key: parts(state[key]) for key in sorted(state)}


def clip(threshold):
    return optclip.clip_by_global_norm(threshold)


WRAPPED = {
    "chain": optax.chain(*(clip(12.0 - i) for i in range(12))),
    "skip": optclip.skip(clip(2.0), max_norm=10.0, name="clip"),
    "leaves": optclip.skip(
        optclip.clip_by_norm(2.0, record="leaves"), max_norm=10.0, record="leaves"
    ),
    "skip of chain": optclip.skip(optax.chain(clip(3.0), clip(2.0)), name="clip"),
    "after": optclip.clip_after(clip(10.0), clip(2.0)),
    "before": optclip.clip_before(clip(10.0), clip(2.0)),
    "feedback": optclip.recipes.uclip(optax.chain(clip(10.0), clip(2.0))),
    "reset": optclip.with_periodic_reset(optclip.clip_after(clip(10.0), clip(2.0))),
    "optax": optax.chain(
        optax.masked(clip(4.0), True),
        optax.MultiSteps(clip(3.0), 2).gradient_transformation(),
        optax.apply_if_finite(clip(2.0), 5),
        optax.contrib.sam(clip(1.0), clip(0.5), sync_period=2),
    ),
}


@functools.cache
def states():
    """Return a state of each wrapper; the leaf has the name of a box of Flax NNX."""
    tree = {"value": PAIR}
    return helpers.quick_jit(
        lambda: {
            k: tx.update(tree, tx.init(tree), tree)[1] for k, tx in WRAPPED.items()
        }
    )()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("form", [(), ("numbered",), ("numbered", "boxed")])
def test_metrics_of_state_restored_without_target_keep_their_order(name, form):
    state = states()[name]
    plain = restored(state, **dict.fromkeys(form, True))
    found, expected = optclip.metrics(plain), optclip.metrics(state)
    assert list(found.items()) == list(expected.items())
    assert optclip.summary(plain) == optclip.summary(state)
    assert name != "leaves" or optclip.check_norms(plain, {"value": PAIR}).ok
    assert len({float(x) for k, x in expected.items() if "threshold" in k}) > 1
