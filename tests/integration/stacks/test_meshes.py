"""Train Flax models on a mesh of 8 devices, with sharding metadata on parameters."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import P
from jax.sharding import AxisType

import optclip
from optclip import thresholds
from tests.integration.stacks import by_hand, checkpoints, page
from tests.integration.stacks.checkpoints import by_orbax
from tests.support import meshes

SPECS = {"bias": P(), "kernel": P("model", None)}
RULES = {"bias": thresholds.ema(warmup=0), "kernel": thresholds.zscore(warmup=1)}
GROUPS = optclip.by_path(lambda path: "bias" if path.endswith("bias") else "kernel")
# All kinds of state, with groups of these parameters.
CLIPS = [optclip.clip_by_group_norm(RULES, GROUPS), *checkpoints.clips()[1:-1]]
CLIPS += [optclip.clip_by_spectral_norm(0.5, method="power_iteration", name="vectors")]
TX = optclip.skip(optax.chain(*CLIPS, optax.adam(0.05)), max_norm=30.0)
# A history of skipped steps, learned thresholds and limited parameters.
CHAINED = meshes.chained()
X = jnp.sin(jnp.arange(32.0).reshape(4, 8))
INIT = jax.nn.initializers.normal(1.0)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        yield mesh


@nnx.jit
def nnx_step(model, optimizer):
    def loss_of(model):
        return jnp.mean(model(X) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads, value=loss)


def test_nnx_on_mesh_restores_and_continues(tmp_path):
    split = nnx.with_partitioning(INIT, tuple(SPECS["kernel"]))
    model = nnx.Linear(8, 16, kernel_init=split, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    fresh = nnx.Optimizer(model, TX, wrt=nnx.Param)
    for _ in range(2):
        nnx_step(model, optimizer)
    saved = nnx.state(optimizer)
    nnx.update(fresh, by_orbax(saved, nnx.state(fresh), tmp_path))
    chex.assert_trees_all_equal(nnx.state(fresh), saved)
    copy = nnx.clone(model)
    nnx_step(model, optimizer)
    nnx_step(copy, fresh)
    chex.assert_trees_all_equal(nnx.state(fresh), nnx.state(optimizer))
    logged = optclip.metrics(nnx.as_pure(optimizer.opt_state))
    assert not [key for key in logged if key.endswith("value")]
    for state in (optimizer.opt_state, nnx.state(optimizer)):
        chex.assert_trees_all_equal(optclip.metrics(state), logged)


def test_linen_on_mesh_restores_and_continues(mesh, tmp_path):
    split = nn.with_partitioning(INIT, tuple(SPECS["kernel"]))
    model = nn.Dense(16, kernel_init=split)

    def start():
        params = model.init(jax.random.key(0), X)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    shapes = jax.eval_shape(start)
    places = nn.get_sharding(shapes, mesh)
    state = jax.jit(start, out_shardings=places)()

    @functools.partial(jax.jit, out_shardings=places)
    def step(state):
        def loss_of(params):
            return jnp.mean(model.apply({"params": params}, X) ** 2)

        return state.apply_gradients(grads=jax.grad(loss_of)(state.params))

    saved = step(step(state))

    def placed(place, box):
        def shape(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(shape, box)

    like = jax.tree.map(placed, places, shapes)
    restored = by_orbax(saved, like, tmp_path)
    chex.assert_trees_all_equal(restored, saved)
    chex.assert_trees_all_equal(step(restored), step(saved))
    logged = optclip.metrics(saved.opt_state)
    assert not [key for key in logged if key.endswith("value")]


@jax.jit
def chained_step(state, params, size):
    return CHAINED.update(jax.tree.map(lambda x: size * x, params), state, params)


def chained_run(params, state, sizes):
    for size in sizes:
        places = jax.tree.map(lambda x: x.sharding, state)
        updates, state = jax.block_until_ready(chained_step(state, params, size))
        for x, old in zip(*map(jax.tree.leaves, (state, places)), strict=True):
            assert x.sharding.is_equivalent_to(old, x.ndim)
    return updates, state


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_state_of_eight_devices_continues_on_fewer(kind, tmp_path):
    specs = {"bias": P("model"), "kernel": P(None, "model"), "out": P("model", None)}
    results = []
    for number in (8, 4, 1):
        devices = jax.devices()[:number]
        mesh = jax.make_mesh((number,), ("model",), axis_types=(kind,), devices=devices)
        with jax.set_mesh(mesh):
            params = jax.device_put(meshes.gradients(), specs)
            state = CHAINED.init(params)
            if number == 8:
                saved = chained_run(params, state, [1.0, 3.0, jnp.nan, 1.0])[1]
            restored = by_orbax(saved, state, tmp_path / str(number))
            results.append(jax.device_get(chained_run(params, restored, [40.0, 2.0])))
    chex.assert_trees_all_close(results[1:], results[:1] * 2, rtol=1e-6)


@pytest.mark.parametrize("title", ["Flax NNX on a mesh", "Flax Linen on a mesh"])
def test_page_block_on_mesh_trains(title):
    """The block continues the block without a mesh, whose step it uses."""
    names = page.run(title, page.run(title.removesuffix(" on a mesh")))
    # Each step is awaited: on a CPU, many started at once wait for each other's threads,
    # and XLA ends the process after 40 s.
    batch, losses = (names["x"], names["y"]), [names["loss"]]
    if "optimizer" in names:
        run = names["optimizer"]
        for _ in range(60):
            losses.append(float(names["step"](names["model"], run, *batch)[0]))
    else:
        run = names["state"]
        for _ in range(60):
            run, loss, _ = names["sharded_step"](run, *batch)
            losses.append(float(loss))
    by_hand.check_trained(losses, run.opt_state)
    leaves = jax.tree.leaves(names["model"] if "optimizer" in names else run.params)
    (kernel,) = [x for x in leaves if x.shape == (8, 16)]
    assert kernel.sharding.spec == P(None, "model")
