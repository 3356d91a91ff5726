"""A recorded threshold is what the rule returned, in steps that are not finite too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from tests.support import covering, registry

TREE = {"a": np.float32([1, 2, 3]), "b": np.float32([[0.5, 0.1], [2, 1]])}
BAD = TREE | {"a": np.float32([math.nan, -math.inf, 1])}
STEPS = [jax.tree.map(lambda x: x * math.nan, TREE), BAD, TREE]
STEPS += [jax.tree.map(np.zeros_like, TREE), BAD]
ADD = optax.identity()
GROUPS = optclip.groups(optclip.by_path({"a": "x", "b": "y"}.get))
SETUPS = [
    (optclip.clip_by, {"over": "tree"}),
    (optclip.clip_by, {"over": "leaf", "record": "leaves"}),
    (optclip.clip_by, {"over": GROUPS}),
    (optclip.clip_by, {"over": optclip.units(), "nonfinite": "zero"}),
    (optclip.clip_by, {"over": "element"}),
    (functools.partial(optclip.skip, optax.sgd(1.0)), {"over": "tree"}),
    (functools.partial(optclip.skip, optax.sgd(1.0)), {"over": "leaf"}),
    (lambda max_norm: optclip.constrain(ADD, optclip.clip_by(max_norm)), {}),
    (lambda max_norm: optclip.with_history(optclip.clip_by(max_norm)), {}),
]


def values(tree):
    return np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("at", range(len(registry.RULES)), ids=registry.RULES)
def test_recorded_threshold_is_what_the_rule_returned(at, monkeypatch):
    """A third of the setups for each rule in turn, all with `--full`."""
    name = [*registry.RULES][at]
    rule = getattr(optclip.thresholds, name)()
    update, returned = type(rule).update, []

    def kept(self, seen, memory):
        limit, new = update(self, seen, memory)
        returned[:] = values(limit)
        return limit, new

    monkeypatch.setattr(type(rule), "update", kept)
    setups = SETUPS if covering.full else SETUPS[at % 3 :: 3]
    for make, options in SETUPS[4:5] if name in registry.OF_ELEMENTS else setups:
        argument = "max_norm" if make is not optclip.clip_by else "threshold"
        tx = make(**{argument: rule}, **options)
        state = tx.init(TREE)
        for step in STEPS:
            _, state = tx.update(step, state, TREE)
            recorded = np.array(
                [x for key, x in optclip.metrics(state).items() if "/threshold" in key]
            )
            near = np.isclose(recorded[:, None], returned, rtol=1e-6)
            assert near.any(axis=1).all(), (options, recorded, returned)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_recorded_threshold_of_loss_in_warm_up_is_infinite(loss):
    tx = optclip.skip(optax.sgd(1.0), max_loss=optclip.thresholds.mean_plus_std(6.0))
    _, state = tx.update(TREE, tx.init(TREE), value=jnp.float32(loss))
    metrics = optclip.metrics(state)
    assert metrics["skip/loss_threshold"] == math.inf
    assert metrics["skip/skipped"] == 1


def test_recorded_threshold_of_narrow_rule_is_infinite():
    """A rule of the user may return a dtype in which the largest number is smaller."""

    class Narrow:
        def init(self, norm):
            return ()

        def update(self, seen, memory):
            return jnp.bfloat16(math.inf), memory

    tx = optclip.clip_by_global_norm(Narrow(), nonfinite="zero")
    out, state = tx.update(BAD, tx.init(TREE))
    assert optclip.metrics(state)["clip/threshold"] == math.inf
    assert not np.any(values(out))


def test_recorded_coefficient_of_zero_norm_is_one_without_memory_too():
    tx = optclip.clip_by_norm(optclip.thresholds.current(), record="leaves")
    tree = TREE | {"a": 0 * TREE["a"]}
    _, state = tx.update(tree, tx.init(tree))
    assert optclip.metrics(state)["clip/coefficient/a"] == 1
