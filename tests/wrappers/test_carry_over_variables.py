"""Move the state of `nnx.Optimizer`, whose arrays are in variables."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optclip
from tests.support import carried, helpers

CLIP = optclip.clip_by_norm(optclip.thresholds.quantile(0.5, 8), record="leaves")
ADAM = optax.chain(CLIP, optax.adam(0.1))
WRAPPED = optclip.with_history(optclip.skip(ADAM, max_norm=1e6), steps=4)
WRT = nnx.Any(nnx.Param, nnx.LoRAParam)


class Model(nnx.Module):
    def __init__(self, adapter):
        rngs = nnx.Rngs(0)
        split = nnx.with_metadata(nnx.initializers.ones, note="of the kernel")
        first = nnx.Linear(2, 3, kernel_init=split, rngs=rngs)
        self.layers = nnx.data((first, nnx.Linear(3, 2, rngs=rngs)))
        self.adapter = nnx.LoRA(2, 2, 3, rngs=rngs) if adapter else None

    def __call__(self, x):
        return self.layers[1](self.layers[0](x) + self.adapter(x))


def params_of(model):
    return nnx.state(model, WRT)


def pure(model):
    return nnx.to_pure_dict(params_of(model))


@pytest.mark.parametrize("params", [params_of, pure])
@pytest.mark.parametrize(
    ("tx", "new_tx"),
    # No array in the state of momentum tells the type of a count's variable.
    [(ADAM, ADAM), (ADAM, WRAPPED), (optax.sgd(0.1, 0.9), ADAM)],
    ids=["same", "wrapped", "from momentum"],
)
def test_carry_over_state_of_nnx_optimizer_continues(tx, new_tx, params):
    model, larger = Model(adapter=False), Model(adapter=True)
    like, other = (
        nnx.Optimizer(*each, wrt=WRT) for each in ((model, tx), (larger, new_tx))
    )
    bare = carried.numbered(tx.init(pure(model)))
    boxed = jax.tree.unflatten(
        jax.tree.structure(like.opt_state), jax.tree.leaves(bare)
    )
    expected, text = carried.carried(tx, pure(model), bare, new_tx, pure(larger))
    for state in (bare, boxed):
        trees = params(model), state, new_tx, params(larger)
        moved, same = carried.called(tx, *trees)
        helpers.assert_identical(*map(jax.tree.leaves, (moved, expected)))
        assert same == text
    nnx.update(other.opt_state, nnx.state(moved))
    if params is params_of:
        structures = [jax.tree.structure(x) for x in (moved, other.opt_state)]
        assert structures[0] == structures[1] or tx is not ADAM
        other.update(larger, nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(larger))
        steps = [optclip.metrics(x)["clip/steps"] for x in (moved, other.opt_state)]
        assert steps[1] == steps[0] + 1
