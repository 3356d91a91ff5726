"""Compare the page's private training with NumPy, jax_privacy and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.experimental import aggregating

from optclip import per_example
from tests.integration.stacks import page

# jax_privacy 2.0.0 uses a deprecated name of optax.
pytestmark = pytest.mark.filterwarnings(
    "ignore:optax.global_norm is deprecated:DeprecationWarning"
)

DROPOUT = "Flax NNX models with dropout"


@pytest.fixture(scope="module")
def private():
    return page.run("DP-SGD")


def test_private_loop_trains_within_budget(private):
    loss = private["loss_of"](private["params"], private["x"], private["y"])
    assert loss < private["first"] / 3
    assert 1 < private["epsilon"] < 8


def test_clipped_grad_nnx_module_with_dropout_names_leaf():
    names = page.names(DROPOUT)
    grad_of = per_example.clipped_grad(lambda model, x: model(x).sum(), 1.0)
    with pytest.raises(TypeError, match=r"'layers/2/rngs/count/value'.*nnx\.split"):
        grad_of(names["model"], names["x"])


def test_clipped_grad_dropout_keys_give_each_example_a_mask():
    names = page.names(DROPOUT)
    x, y = (jnp.repeat(names[name][:1], 4, axis=0) for name in ("x", "y"))
    keys = names["keys"][jnp.array([0, 0, 1, 2])]
    _, info = names["grad_of"](names["params"], x, y, keys)
    same, again, *others = np.asarray(info.values)
    assert same == again
    assert len({same, *others}) == 3
    assert (info.coefficients < 1).any()


def test_aggregate_in_optax_process_equals_clipped_grad(private):
    x, y, params = private["x"][:32], private["y"][:32], private["start"]
    each = jax.vmap(jax.grad(private["loss_of"]), (None, 0, 0))(params, x, y)
    clip = per_example.aggregate(1.0, normalize_by=32)
    tx = aggregating.process(optax.identity(), clip, optax.sgd(0.1))
    updates, _ = tx.update(each, tx.init(params), params)
    f = per_example.clipped_grad(
        private["loss_of"], 1.0, batch_argnums=(1, 2), normalize_by=32
    )
    wanted, _ = f(params, x, y)
    jax.tree.map(
        lambda u, g: np.testing.assert_allclose(u, -0.1 * g, 1e-5), updates, wanted
    )
