"""Compare private training and ghost norms with NumPy, jax_privacy and optax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.experimental import aggregating

from optclip import per_example
from tests.integration.stacks import page
from tests.support import per_example_oracle

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


# Ghost norms of an unchanged model: a scanned transformer of Flax.

BATCH, T, WIDTH, WORDS, LAYERS = 4, 6, 16, 30, 2


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        z = nn.LayerNorm(dtype=None)(h)
        h = h + nn.MultiHeadDotProductAttention(num_heads=2)(z)
        return h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(h))), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(WORDS, WIDTH)
        h = embed(ids)
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        h, _ = layers()(h, None)
        return embed.attend(h)


def test_ghost_norms_of_flax_linen_transformer():
    model = Transformer()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, WORDS, (BATCH, T)))
    params = model.init(jax.random.key(0), ids[0])

    def loss(p, ids):
        return jnp.mean(jax.nn.logsumexp(model.apply(p, ids), axis=-1))

    # The gradient of the bias of keys is 0 up to rounding.
    per_example_oracle.check(loss, params, ids, rtol=2e-6, run=jax.jit, least=0.1)
    kinds = jax.tree.leaves(per_example_oracle.kinds_of(loss, params, ids))
    assert kinds.count("formula") >= 6
