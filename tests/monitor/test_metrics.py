"""`metrics` finds every clip, tells what it did, and works inside jit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optclip
from tests.support import helpers, oracles
from tests.support.registry import numpy_tree

KEYS = {"norm", "threshold", "coefficient", "rate", "nonfinite"}


def after(tx, *trees):
    update, state = helpers.quick_jit(tx.update), tx.init(trees[0])
    for tree in trees:
        _, state = update(tree, state, tree)
    return state


def test_the_metrics_of_one_norm():
    tree = helpers.gradients()
    norm = oracles.tree_norm(numpy_tree(tree))
    found = optclip.metrics(after(optclip.clip_by_global_norm(2.0), tree))
    assert set(found) == {f"clip/{key}" for key in KEYS}
    np.testing.assert_allclose(found["clip/norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(found["clip/coefficient"], 2.0 / norm, rtol=1e-6)
    assert found["clip/threshold"] == 2.0
    assert found["clip/rate"] == 1.0
    assert found["clip/nonfinite"] == 0


def test_groups_have_a_key_each():
    tree = helpers.gradients()
    labels = {"dense": "body", "out": "head"}
    tx = optclip.clip_by_group_norm({"body": 10.0, "head": 1.0}, labels)
    found = optclip.metrics(after(tx, tree))
    assert set(found) == {f"clip/{k}/{g}" for k in KEYS for g in ("body", "head")}
    head = oracles.tree_norm(numpy_tree(tree["out"]))
    np.testing.assert_allclose(found["clip/norm/head"], head, rtol=1e-6)
    assert (found["clip/rate/body"], found["clip/rate/head"]) == (0.0, 1.0)
    assert found["clip/threshold/body"] == 10.0


def test_leaf_scope_gives_extremes_and_the_clipped_share():
    tree = helpers.gradients()
    sizes = [oracles.norm(x) for x in jax.tree.leaves(numpy_tree(tree))]
    found = optclip.metrics(after(optclip.clip_by_norm(2.0), tree))
    assert set(found) == {f"clip/{key}" for key in KEYS | {"fraction"}}
    np.testing.assert_allclose(found["clip/norm"], max(sizes), rtol=1e-6)
    np.testing.assert_allclose(found["clip/coefficient"], 2 / max(sizes), rtol=1e-6)
    share = np.mean([size > 2.0 for size in sizes])
    assert 0 < share < 1
    np.testing.assert_allclose(found["clip/fraction"], share, rtol=1e-6)


def test_leaves_have_a_key_each_on_request():
    tree = helpers.gradients()
    tx = optclip.clip_by_norm(2.0, record="leaves")
    found = optclip.metrics(after(tx, tree))
    kernel = oracles.norm(numpy_tree(tree)["dense"]["kernel"])
    np.testing.assert_allclose(found["clip/norm/dense/kernel"], kernel, rtol=1e-6)
    assert found["clip/rate/dense/bias"] == 0
    assert found["clip/rate/out/0"] == 1


def test_a_watch_tells_which_leaf_was_bad():
    watch = optclip.clip_by_norm(float("inf"), record="leaves", name="watch")
    tx = optax.chain(watch, optclip.clip_by_global_norm(1.0, nonfinite="zero"))
    state = tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    bad = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}
    updates, state = helpers.quick_jit(tx.update)(bad, state)
    found = optclip.metrics(state)
    assert found["watch/nonfinite/a"] == 0
    assert found["watch/nonfinite/b"] == 1
    assert not np.any(updates["a"])
    assert not np.any(updates["b"])


def test_element_scope_gives_the_largest_modulus_and_the_share_moved():
    x = jnp.array([-3.0, 0.1, 0.5, 4.0])
    found = optclip.metrics(after(optclip.clip_by_value(0.5), x))
    assert found["clip/norm"] == 4.0
    assert found["clip/fraction"] == 0.5
    assert found["clip/coefficient"] == 0.125
    assert found["clip/threshold"] == 0.5


def test_clips_are_found_however_nested():
    params = helpers.gradients()
    name = iter(["a", "b", "c", "d", "e"])

    def clip():
        return optclip.clip_by_global_norm(1.0, name=next(name))

    inner = optax.chain(clip(), optax.adam(1e-3), clip())
    tx = optax.MultiSteps(
        optax.chain(
            optax.masked(clip(), {"dense": True, "out": False}),
            optax.partition(
                {"x": inner, "y": optax.sgd(0.1)}, {"dense": "x", "out": "y"}
            ),
            optax.inject_hyperparams(optclip.clip_by_global_norm)(1.0, name=next(name)),
            optax.apply_if_finite(optax.chain(clip()), 3),
        ),
        every_k_schedule=2,
    )
    state = tx.init(params)
    found = helpers.quick_jit(optclip.metrics)(state)
    assert {key.split("/")[0] for key in found} == set("abcde")


def test_names_tell_clips_apart():
    tx = optax.chain(
        optclip.clip_by_value(1.0),
        optclip.clip_by_global_norm(1.0),
        optclip.clip_by_global_norm(jnp.inf, name="raw"),
    )
    found = optclip.metrics(after(tx, jnp.array([3.0, 4.0])))
    assert {key.split("/")[0] for key in found} == {"clip", "clip_2", "raw"}
    np.testing.assert_allclose(found["clip_2/norm"], np.sqrt(2), rtol=1e-6)


def test_a_given_name_is_never_taken_by_a_number():
    tx = optax.chain(
        optclip.clip_by_global_norm(4.0),
        optclip.clip_by_global_norm(2.0),
        optclip.clip_by_global_norm(1.0, name="clip_2"),
    )
    found = optclip.metrics(after(tx, jnp.array([3.0, 4.0])))
    limits = {k: float(v) for k, v in found.items() if "threshold" in k}
    assert sorted(limits.values()) == [1.0, 2.0, 4.0]
    assert limits["clip_2/threshold"] == 1.0


def test_metrics_may_be_taken_inside_jit():
    tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.sgd(0.1))

    @helpers.quick_jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optclip.metrics(state)

    params = jnp.zeros(2)
    state = tx.init(params)
    for _ in range(3):
        params, state, logged = step(params, state, jnp.array([3.0, 4.0]))
    assert float(logged["clip/norm"]) == 5.0
    chex.assert_shape(list(logged.values()), ())


def test_metrics_are_found_in_an_nnx_optimizer():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = optax.chain(optclip.clip_by_global_norm(0.1), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return optclip.metrics(optimizer.opt_state)

    logged = step(model, optimizer, jnp.ones((4, 2)))
    assert float(logged["clip/rate"]) == 1.0
    assert float(logged["clip/norm"]) > 0.1


def test_a_state_without_a_clip_says_so():
    with pytest.raises(
        ValueError, match="an optclip clip in it, or the gradient of a cotangent_probe"
    ):
        optclip.metrics(optax.adam(1e-3).init(jnp.zeros(2)))


def test_a_state_of_plain_dicts_is_read():
    """As a checkpoint comes back without a target: what is None may be left out."""
    tx = optclip.skip(optax.sgd(1.0), max_norm=10.0)
    tree = jnp.array([3.0, 4.0])
    _, state = tx.update(tree, tx.init(tree))

    def plain(x):
        if hasattr(x, "_fields"):
            pairs = x._asdict().items()
            return {key: plain(value) for key, value in pairs if value is not None}
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        return [plain(value) for value in x] if isinstance(x, (list, tuple)) else x

    assert optclip.metrics(plain(state)) == optclip.metrics(state)
