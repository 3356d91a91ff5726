"""Train Flax models on a mesh of 8 devices, with sharding metadata on parameters."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import P
from jax.sharding import AxisType

import optclip
from optclip import recipes, thresholds
from tests.integration.stacks import by_hand, page
from tests.integration.stacks.checkpoints import assert_identical, by_orbax
from tests.support import covering
from tests.support.registry import ENTRIES

SPECS = {"bias": P(), "kernel": P("model", None)}
RULES = {
    "ema": thresholds.ema(warmup=0),
    "moment": thresholds.moment(),
    "quantile": thresholds.quantile(0.5, window=3),
    "second moment": thresholds.second_moment(warmup=1),
    "largest": thresholds.ema_of_max(),
    "zscore": thresholds.zscore(warmup=1),
}
SCOPES = {"leaf": "leaf", "unit": optclip.units(), "element": "element"}
GROUPS = optclip.by_path(lambda path: "bias" if path.endswith("bias") else "kernel")


class EachPair(NamedTuple):
    """Remember the last two norms, as a user's rule with two numbers per norm."""

    def init(self, norm):
        return jax.tree.map(lambda n: (jnp.zeros_like(n), jnp.ones_like(n)), norm)

    def update(self, seen, memory):
        new = jax.tree.map(lambda n, pair: (n, pair[0]), seen.norm, memory)
        return jax.tree.map(lambda n, pair: n / 2 + pair[1], seen.norm, memory), new


def clips(**of_slices):
    """Return the registry, each rule over each scope, recipes and wrappers."""
    by_name = {
        entry.id: entry.make(**(of_slices if entry.by_axis else {}))
        for entry in ENTRIES
    }
    for scope, over in SCOPES.items():
        how = of_slices if scope == "unit" else {}
        for rule in RULES:
            tx = optclip.clip_by(RULES[rule], over=over, **how)
            by_name[f"{rule} by {scope}"] = tx
    return by_name | {
        "group-norm": optclip.clip_by_group_norm(RULES["ema"], GROUPS),
        "group-rules": optclip.clip_by_group_norm(
            {"bias": RULES["ema"], "kernel": RULES["zscore"]}, GROUPS
        ),
        "bounds": optclip.clip_by_value(lower=-0.1, upper=RULES["second moment"]),
        "record of leaves": optclip.clip_by_norm(1.0, record="leaves"),
        "record of agc": recipes.agc(record="leaves", **of_slices),
        "adagc": recipes.adagc(),
        "olmo_ratio": recipes.olmo_ratio(),
        "stable_spam": recipes.stable_spam(),
        "carry": optclip.with_error_feedback(optclip.clip_by_norm(RULES["ema"])),
        "skip": optclip.skip(optax.adam(0.1), max_norm=RULES["quantile"], over="leaf"),
        "reset": optclip.with_periodic_reset(recipes.adagc(), every=2),
        "after": optclip.clip_after(
            optax.scale_by_adam(),
            optclip.clip_by_norm(thresholds.of_gradients(RULES["ema"])),
        ),
        "user's memory": optclip.clip_by_norm(EachPair()),
    }


CLIPS = clips()
PARAMS = {"bias": np.ones(16, np.float32), "kernel": np.ones((8, 16), np.float32)}


def kind_of_state(name):
    state = jax.eval_shape(CLIPS[name].init, PARAMS)
    return str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), state))


# One transformation per kind of state; all with `--full`.
NAMES = sorted({kind_of_state(name): name for name in CLIPS}.values())
if covering.full:
    NAMES = list(CLIPS)
# The memory by element is sharded with one dimension more than the parameters; the
# power iteration rejects a matrix that shard_map splits.
IN_SHARD_MAP = [
    name
    for name in NAMES
    if name not in ("quantile by element", "spectral-norm-by-iteration")
]
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


@pytest.mark.parametrize("name", NAMES)
def test_nnx_on_mesh_restores_and_continues(name, tmp_path):
    tx = optax.chain(CLIPS[name], optax.sgd(0.1))
    split = nnx.with_partitioning(INIT, tuple(SPECS["kernel"]))
    model = nnx.Linear(8, 16, kernel_init=split, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    fresh = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        nnx_step(model, optimizer)
    saved = nnx.state(optimizer)
    nnx.update(fresh, by_orbax(saved, nnx.state(fresh), tmp_path))
    assert_identical(nnx.state(fresh), saved)
    copy = nnx.clone(model)
    nnx_step(model, optimizer)
    nnx_step(copy, fresh)
    assert_identical(nnx.state(fresh), nnx.state(optimizer))
    logged = optclip.metrics(nnx.as_pure(optimizer.opt_state))
    assert not [key for key in logged if key.endswith("value")]
    for state in (optimizer.opt_state, nnx.state(optimizer)):
        assert_identical(optclip.metrics(state), logged)


@pytest.mark.parametrize("name", NAMES)
def test_linen_on_mesh_restores_and_continues(name, mesh, tmp_path):
    tx = optax.chain(optax.with_extra_args_support(CLIPS[name]), optax.sgd(0.1))
    split = nn.with_partitioning(INIT, tuple(SPECS["kernel"]))
    model = nn.Dense(16, kernel_init=split)

    def start():
        params = model.init(jax.random.key(0), X)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

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
    assert_identical(restored, saved)
    assert_identical(step(restored), step(saved))
    logged = optclip.metrics(saved.opt_state)
    assert not [key for key in logged if key.endswith("value")]


@pytest.mark.parametrize("name", IN_SHARD_MAP)
def test_tree_map_params_returns_specs_for_shard_map(name, mesh):
    tx = clips(axis_name=SPECS)[name]
    state = tx.init(PARAMS)
    specs = optax.tree_map_params(
        tx,
        lambda _, spec: spec,
        state,
        SPECS,
        transform_non_params=lambda _: P(),
    )
    kinds = (SPECS, specs, SPECS)
    step = jax.jit(
        jax.shard_map(tx.update, mesh=mesh, in_specs=kinds, out_specs=kinds[:2])
    )
    alone = jax.jit(CLIPS[name].update)
    # Products of a split matrix use the Gram matrix of its other side.
    room = 1e-4 if name == "singular-value-by-products" else 1e-5
    expected = state
    for scale in (1.0, 3.0):
        grads = {
            "bias": scale * jnp.arange(16.0),
            "kernel": scale * jnp.outer(jnp.arange(8.0), jnp.sin(jnp.arange(16.0))),
        }
        updates, state = step(grads, state, PARAMS)
        wanted, expected = alone(grads, expected, PARAMS)
        chex.assert_trees_all_close(updates, wanted, rtol=room, atol=1e-6)
        chex.assert_trees_all_close(state, expected, rtol=room, atol=1e-6)


@pytest.mark.parametrize("title", ["Flax NNX on a mesh", "Flax Linen on a mesh"])
def test_page_block_on_mesh_trains(title):
    names = page.run(title)
    run = names.get("optimizer") or names["state"]
    by_hand.check_trained(names["losses"], run.opt_state)
    leaves = jax.tree.leaves(names["model"] if "optimizer" in names else run.params)
    (kernel,) = [x for x in leaves if x.shape == (8, 16)]
    assert kernel.sharding.spec == P(None, "model")
