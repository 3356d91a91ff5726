"""Move the state of `nnx.Optimizer`, whose arrays are in variables."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optclip

CLIP = optclip.clip_by_norm(optclip.thresholds.quantile(0.5, 8), record="leaves")
ADAM = optax.chain(CLIP, optax.adam(0.1))
WRAPPED = optclip.with_history(optclip.skip(ADAM, max_norm=1e6), steps=4)
WRT = nnx.Any(nnx.Param, nnx.LoRAParam)


class Model(nnx.Module):
    def __init__(self, adapter=False):
        rngs = nnx.Rngs(0)
        split = nnx.with_metadata(nnx.initializers.ones, note="of the kernel")
        first = nnx.Linear(2, 3, kernel_init=split, rngs=rngs)
        self.layers = nnx.data((first, nnx.Linear(3, 2, rngs=rngs)))
        self.adapter = nnx.LoRA(2, 2, 3, rngs=rngs) if adapter else None

    def __call__(self, x):
        y = self.layers[0](x) + (self.adapter(x) if self.adapter else 0)
        return self.layers[1](y)


def train(model, optimizer):
    x = jnp.array([[1.0, 2.0], [3.0, -4.0]])
    for _ in range(3):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum((m(x) - 1) ** 2))(model))


def params_of(model):
    return nnx.state(model, WRT)


def pure(model):
    return nnx.to_pure_dict(params_of(model))


def bare(state):
    return jax.tree.map(
        lambda x: jax.tree.leaves(x)[0],
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def optimizer(model):
    optimizer = nnx.Optimizer(model, ADAM, wrt=WRT)
    train(model, optimizer)
    return optimizer


@pytest.mark.parametrize("new_tx", [ADAM, WRAPPED], ids=["same", "wrapped"])
@pytest.mark.parametrize("params", [params_of, pure])
@pytest.mark.parametrize("stored", [bare, lambda state: state], ids=["bare", "boxed"])
def test_carry_over_of_nnx_state_continues_as_before(
    model, optimizer, new_tx, params, stored
):
    trees = params(model), stored(optimizer.opt_state)
    moved = optclip.carry_over(ADAM, *trees, new_tx, params(model))
    copy = nnx.clone(model)
    other = nnx.Optimizer(copy, new_tx, wrt=WRT)
    nnx.update(other.opt_state, nnx.state(moved))
    train(model, optimizer)
    train(copy, other)
    chex.assert_trees_all_close(params_of(copy), params_of(model), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_carry_over_returns_variables_of_nnx_optimizer(model, optimizer):
    larger = Model(adapter=True)
    nnx.update(larger, params_of(model))
    other = nnx.Optimizer(larger, WRAPPED, wrt=WRT)
    trees = params_of(model), optimizer.opt_state, WRAPPED, params_of(larger)
    moved = optclip.carry_over(ADAM, *trees)
    chex.assert_trees_all_equal_structs(moved, other.opt_state)
    before, after = (optax.tree.get(s, "nu") for s in (optimizer.opt_state, moved))
    chex.assert_trees_all_equal(after["layers"], before["layers"])
    np.testing.assert_array_equal(jax.tree.leaves(after["adapter"])[0], 0)
    other.opt_state = moved
    train(larger, other)
    assert optclip.metrics(other.opt_state)["clip/steps"] == 6


def test_carry_over_of_momentum_puts_new_count_in_variable(model):
    """No array of the old state tells the type of the count's variable."""
    momentum = optax.sgd(0.1, 0.9)
    optimizer = nnx.Optimizer(model, momentum, wrt=WRT)
    trees = params_of(model), optimizer.opt_state, ADAM, params_of(model)
    optimizer.opt_state = optclip.carry_over(momentum, *trees)
    optimizer.tx = ADAM
    train(model, optimizer)
    assert optclip.metrics(optimizer.opt_state)["clip/steps"] == 3
