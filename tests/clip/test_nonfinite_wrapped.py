"""The policies inside optax's wrappers, and the examples of the page about them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optclip
from tests.support import helpers
from tools.nonfinite_page import PAGE

policies = pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
# At a threshold of 1, by the words of each policy.
AFTER = {
    "propagate": {"sick": [np.nan, np.nan], "well": [np.nan]},
    "zero": {"sick": [0.0, 0.0], "well": [0.0]},
    "drop": {"sick": [0.0, 0.6], "well": [0.8]},
}
PARAMS = {"sick": jnp.zeros(2), "well": jnp.zeros(1)}
BAD = {"sick": jnp.array([jnp.nan, 6.0]), "well": jnp.array([8.0])}
GOOD = {"sick": jnp.array([0.0, 6.0]), "well": jnp.array([8.0])}


def by_global_norm(policy, **kwargs):
    return optclip.clip_by_global_norm(1.0, nonfinite=policy, **kwargs)


def step(tx, *trees):
    """The last update of a compiled run over the trees, and its state."""
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for tree in trees:
        updates, state = update(tree, state, PARAMS)
    return updates, state


def assert_leaves(found, expected):
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, err_msg=name)


@policies
def test_a_chain_passes_on_what_the_policy_leaves(policy):
    tx = optax.chain(by_global_norm(policy), optax.sgd(0.5))
    found, state = step(tx, GOOD, BAD)
    halved = {k: -0.5 * np.array(v) for k, v in AFTER[policy].items()}
    assert_leaves(found, halved)
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 1


@policies
def test_a_masked_leaf_is_not_seen(policy):
    """The clip does not see the leaf that is masked, nor its NaN."""
    tx = optax.masked(by_global_norm(policy), {"sick": False, "well": True})
    found, state = step(tx, BAD)
    helpers.assert_identical(found["sick"], BAD["sick"])
    assert found["well"] == 1.0
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 0


@policies
def test_each_part_has_its_own_policy(policy):
    """Each part has its own norm, and its own policy."""
    labels = {"sick": "a", "well": "b"}
    tx = optax.partition(
        {"a": by_global_norm(policy), "b": by_global_norm("propagate", name="b")},
        labels,
    )
    found, state = step(tx, BAD)
    alone = {"propagate": [np.nan, np.nan], "zero": [0, 0], "drop": [0, 1]}[policy]
    assert_leaves(found, {"sick": alone, "well": [1.0]})
    counted = optclip.metrics(state)
    assert int(counted["clip/nonfinite"]) == 1
    assert int(counted["b/nonfinite"]) == 0


@policies
def test_a_bad_gradient_makes_their_mean_bad(policy):
    """A NaN in one of the accumulated gradients is one in their mean.

    It stays in optax's accumulator, which is emptied by a multiplication with 0.
    """
    tx = optax.MultiSteps(by_global_norm(policy), every_k_schedule=2)
    found, state = step(tx, BAD, GOOD)
    assert_leaves(found, AFTER[policy])
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 1
    found, state = step(tx, BAD, GOOD, GOOD, GOOD)
    assert_leaves(found, AFTER[policy])
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 2


def test_multi_steps_that_skips_what_is_not_finite():
    """The remedy: it never gets into the accumulator."""
    tx = optax.MultiSteps(
        by_global_norm("propagate"),
        every_k_schedule=2,
        should_skip_update_fn=optax.skip_not_finite,
    )
    found, state = step(tx, GOOD, BAD, GOOD)
    assert_leaves(found, AFTER["drop"])
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 0


@policies
def test_apply_if_finite_comes_before_the_policy(policy):
    """It looks at what comes in, so the clip sees it only once optax gives up."""
    tx = optax.apply_if_finite(by_global_norm(policy), max_consecutive_errors=1)
    found, state = step(tx, GOOD, BAD)
    assert_leaves(found, AFTER["zero"])
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 0
    found, state = step(tx, GOOD, BAD, BAD)
    assert_leaves(found, AFTER[policy])
    assert int(optclip.metrics(state)["clip/nonfinite"]) == 1


def test_raise_reaches_through_the_wrappers():
    """The path in the message is that of the tree the clip was shown."""
    inner = optax.chain(by_global_norm("raise"), optax.sgd(0.5))
    tx = optax.partition({"a": inner, "b": optax.sgd(0.5)}, {"sick": "a", "well": "b"})
    update = checkify.checkify(jax.jit(tx.update))
    error, _ = update(BAD, tx.init(PARAMS), PARAMS)
    with pytest.raises(checkify.JaxRuntimeError, match="leaf 'sick'"):
        error.throw()
    error, (found, _) = update(GOOD, tx.init(PARAMS), PARAMS)
    assert error.get() is None
    assert_leaves(found, {"sick": [0.0, -0.5], "well": [-4.0]})


def test_the_examples_of_the_page_print_what_they_say(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        said = re.findall(r"^# (.*)$", code, re.MULTILINE)
        exec(code, {})
        assert capsys.readouterr().out.splitlines() == said
