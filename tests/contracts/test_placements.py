"""Every transformation on leaves in host memory, and on leaves of several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import optclip
from optclip import functional, per_example, thresholds
from tests.support import covering, helpers
from tests.support.registry import ENTRIES, FACTORIES, SHARING, by_trait

TREE = helpers.gradients()
# Options with a path of their own through the placement of leaves.
OPTIONS = {
    "norms of leaves": optclip.clip_by_global_norm(1.0, record="leaves"),
    "strict": optclip.clip_by_norm(1.0, strict=True),
    "zero": optclip.clip_by_norm(1.0, nonfinite="zero"),
    "zero elements": optclip.clip_by_value(1.0, nonfinite="zero"),
    "smooth elements": optclip.clip_by(1.0, over="element", response="smooth"),
    "scaled": optclip.clip_by_norm(thresholds.scaled(thresholds.ema(), 2.0, low=0.1)),
    "of": optclip.clip_by(thresholds.of(0.5, thresholds.ema()), over=optclip.axes(0)),
}
# Their moments are optax's, which fails on leaves in host memory or on two devices.
WITH_MOMENTS = {
    "recipes.acclip", "recipes.axlearn_skip", "recipes.megatron_skip",
    "recipes.olmo_skip", "recipes.spam", "recipes.spectra", "recipes.stable_adamw",
    "recipes.stable_spam",
}  # fmt: skip
TRANSFORMATIONS = OPTIONS | {
    name: make() for name, make in FACTORIES.items() if name not in WITH_MOMENTS
}
# Run eagerly, each operation of each device is a program: these have every scope, kind
# of state, and rule with a memory per leaf.
FEW = (
    "recipes.agc", "quantile", "moment", "skip", "constrain", "history",
    "norms of leaves", "strict",
)  # fmt: skip
SPREAD = [*(entry.id for entry in by_trait(ENTRIES, "scope", "state")), *FEW]
SPREAD = TRANSFORMATIONS if covering.full else SPREAD


def update_of(tx):
    tx = optax.with_extra_args_support(tx)

    def update(tree):
        return tx.update(tree, tx.init(tree), tree, value=jnp.float32(1))[0]

    return update


def by_backward_pass(tree):
    def clip(tree):
        return optclip.clip_cotangent(tree, 1.0, relative="median")

    return jax.vjp(clip, tree)[1](tree)[0]


def loss(params, example):
    params = jax.device_put(params, jax.memory.Space.Device)
    return sum(jnp.sum(example * jnp.tanh(x)) for x in jax.tree.leaves(params))


def by_example(method):
    clip = per_example.clipped_grad(loss, 1.0, method=method, normalize_by=2.0)
    return lambda tree: clip(tree, jnp.ones(2))[0]


HEADS = {"layer": optclip.Heads("key", "query")}
LOGITS = {"layer": jnp.array([50.0, 400.0])}


def by_head_after_step(tree):
    tx = optclip.clip_attention_logits(100.0, HEADS)
    return tx.update(tree, tx.init(tree), tree, logits=LOGITS)[0]


LAYER = {"key": jnp.ones((3, 2, 4)), "query": jnp.ones((3, 2, 4))}
CALLS = {
    **{name: (update_of(tx), TREE) for name, tx in TRANSFORMATIONS.items()},
    **{f"functional {e.id}": (e.pure, TREE) for e in by_trait() if e.pure},
    "integers": (lambda x: functional.clip_by_value(x, 1), jnp.arange(3)),
    "cotangents": (by_backward_pass, TREE),
    "vmap": (by_example("vmap"), TREE),
    "ghost": (by_example("ghost"), TREE),
    "sum": (lambda tree: per_example.clipped_sum(tree, 1.0)[0], LAYER),
    "heads": (
        lambda tree: functional.clip_attention_logits(tree, LOGITS, 100.0, HEADS),
        LAYER,
    ),
    "heads after step": (by_head_after_step, LAYER),
}


def first_on_host(tree):
    """Return a tree with its first and third leaf in host memory."""
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    leaves, treedef = jax.tree.flatten(tree)
    leaves[::2] = jax.device_put(leaves[::2], host)
    return treedef.unflatten(leaves)


@pytest.mark.parametrize("name", CALLS)
def test_result_stays_in_memory_of_its_leaf(name):
    """Tracing is enough: JAX rejects operations of arrays in two memories then."""
    call, tree = CALLS[name]
    places = []

    def clip(tree):
        out = call(tree)
        # Functions that return norms return the clipped tree first.
        clipped = out[0] if isinstance(out, tuple) else out
        for each in (clipped, tree):
            kinds = map(jax.typeof, jax.tree.leaves(each))
            places.append([kind.memory_space for kind in kinds])
        return out

    jax.make_jaxpr(clip)(first_on_host(tree))
    assert places[0] == places[1]
    assert jax.memory.Space.Host in places[1]


def spread_out(tree):
    """Return a tree with a leaf in host memory, and its leaves on two devices."""
    leaves, treedef = jax.tree.flatten(first_on_host(tree))
    leaves[1] = jax.device_put(leaves[1], jax.devices()[1])
    return treedef.unflatten(leaves)


@pytest.mark.parametrize("name", SPREAD)
def test_leaves_on_two_devices_stay_there_unless_they_share_a_norm(name):
    # Each shape would be another program of each operation.
    tree = spread_out(jax.tree.map(lambda x: np.full((2, 4), 5, np.float32), TREE))
    tx = optax.with_extra_args_support(TRANSFORMATIONS[name])

    def two_steps():
        state = tx.init(tree)
        _, state = tx.update(tree, state, tree, value=jnp.float32(1))
        return tx.update(tree, state, tree, value=jnp.float32(1))

    if name in SHARING or name == "norms of leaves":
        advice = (
            r"on the same devices or mesh, got the leaf.*(use_norm=|optax\.partition)"
        )
        with pytest.raises(ValueError, match=advice):
            two_steps()
        return
    clipped, state = two_steps()
    # Before JAX 0.9, operations of optax return arrays in device memory.
    for new, old in zip(*map(jax.tree.leaves, (clipped, tree)), strict=True):
        assert new.devices() == old.devices()
    optclip.metrics(state)


@pytest.mark.parametrize(
    ("entry", "place", "compiled"),
    [
        *(
            (entry, first_on_host, helpers.quick_jit)
            for entry in by_trait(ENTRIES, "scope")
        ),
        *(
            (e, spread_out, lambda f: f)
            for e in ENTRIES
            if e.id in ("value", "rms-axis")
        ),
    ],
)
def test_leaves_in_host_memory_or_on_two_devices_are_clipped(entry, place, compiled):
    tree = place(TREE)
    clipped = compiled(update_of(entry.make()))(tree)
    for new, old in zip(*map(jax.tree.leaves, (clipped, tree)), strict=True):
        assert new.sharding == old.sharding
    exact = helpers.as_float64(TREE)
    helpers.assert_close(clipped, entry.expected(exact), 8 + entry.roundings)
    assert helpers.differs(clipped, TREE)


@pytest.mark.parametrize("place", [lambda x: x, first_on_host])
def test_norm_over_two_devices_is_passed(place):
    tree, norm = spread_out(TREE), place(jnp.float32(20))
    clipped, _ = functional.clip_by_global_norm(tree, 10.0, use_norm=norm)
    helpers.assert_close(clipped, jax.tree.map(lambda x: x / 2, TREE))


def test_metrics_and_loss_in_host_memory_are_read():
    tx = optclip.clip_by(1.0, over=optclip.layers("key"), record="leaves")
    tx = optclip.skip(tx, max_loss=2.0)
    _, state = tx.update(LAYER, tx.init(LAYER), value=first_on_host(jnp.float32(1)))
    found = optclip.metrics(jax.tree.map(first_on_host, state))
    assert found["clip/norm/key/2"] == 8**0.5
    assert found["clip/rate/key/2"] == found["skip/loss"] == 1


def test_learned_thresholds_of_many_leaves_on_two_devices():
    devices = jax.devices()[:2]
    tree = {i: jax.device_put(jnp.full(4, i + 1.0), devices[i % 2]) for i in range(6)}
    tx = optclip.clip_by_norm(thresholds.ema(0.5, warmup=0))
    state = tx.init(tree)
    for _ in range(2):
        out, state = tx.update(tree, state)
    for i, x in out.items():
        assert x.devices() == {devices[i % 2]}
        np.testing.assert_allclose(x, (i + 1) / 2, rtol=1e-6)


def test_leaf_on_mesh_is_clipped_by_threshold_on_another_device():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    leaf = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("data")))
    limit = jax.device_put(jnp.ones(()), jax.devices()[3])
    out = functional.clip_by_norm(leaf, limit)
    assert out.sharding == leaf.sharding
    np.testing.assert_allclose(out, 0.5)


def test_leaves_of_two_typed_meshes_share_no_norm_in_jit():
    kind = (jax.sharding.AxisType.Explicit,)
    tree = {}
    for name in ("one", "two"):
        mesh = jax.make_mesh((2,), (name,), axis_types=kind, devices=jax.devices()[:2])
        place = jax.NamedSharding(mesh, jax.P(name))
        tree[name] = jax.device_put(jnp.ones(4), place)
    with pytest.raises(
        ValueError, match=r"must be on the same devices or mesh.*use_norm"
    ):
        jax.jit(lambda t: functional.clip_by_global_norm(t, 1.0))(tree)
