"""Every argument that is a number accepts narrow floats and NumPy scalars."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional, per_example, recipes, responses, thresholds
from optclip._responses import _responses
from tests.support import helpers

TREE = {"w": jnp.array([[3.0, 4.0], [1.0, 2.0]]), "b": jnp.array([0.25, 0.125])}
LAYERS = {"layer": optclip.Heads("query", "key")}


def update(tx):
    return tx.update(TREE, tx.init(TREE), TREE)


def loss(w, x):
    return jnp.sum(jnp.tanh(w * x))


def private(c, **options):
    return per_example.clipped_grad(loss, c, **options)


def largest_logit(c):
    query = jnp.full((3, 2, 4), 0.5, "float8_e4m3fn")
    # float8 keys and queries of two other dtypes.
    keys = [jnp.ones((3, 2, 4), dtype) for dtype in ("bfloat16", "float8_e5m2")]
    return [functional.max_attention_logit(query, key, scale=c) for key in keys]


def heads_clipped(c):
    params = {name: jnp.ones((3, 2, 2)) for name in ("query", "key")}
    logits = {"layer": jnp.array([4.0, 0.1])}
    return functional.clip_attention_logits(params, logits, c, LAYERS)


def private_threshold(c):
    rule = per_example.QuantileThreshold(c, c, c, expected_batch_size=c)
    _, info = per_example.clipped_sum(jnp.ones((3, 2)), rule.init().threshold)
    return rule.update(rule.init(), info)


def cotangent(c):
    return jax.grad(lambda x: 5 * jnp.sum(optclip.clip_cotangent(x, c)))(TREE["w"])


SGD = optax.sgd(1.0)
FLOATS = {
    "threshold, eps": lambda c: update(optclip.clip_by_norm(c, eps=c)),
    "use_norm": lambda c: functional.clip_by_global_norm(TREE, 0.25, use_norm=c),
    "sharpness": lambda c: functional.clip_by(TREE, 2.0, response=_responses.Smooth(c)),
    "band": lambda c: functional.clip_by(
        TREE, 2.0, over="leaf", response=responses.band(c, min_norm=c, max_shrink=c)
    ),
    "relative to params": lambda c: update(
        optclip.clip_by(thresholds.relative_to_params(c, c), over="leaf")
    ),
    "acclip": lambda c: update(recipes.acclip(c, c, 1.0, c)),
    "sclip": lambda c: update(recipes.sclip(c, c)),
    "stable_adamw": lambda c: update(recipes.stable_adamw(c, c, c, c)),
    "sensitivity": lambda c: private(c, normalize_by=c).sensitivity(),
    "private threshold": private_threshold,
    "cotangent": cotangent,
    "scale, query": largest_logit,
    "max_logit": heads_clipped,
}


def all_of(c):
    return {name: function(c) for name, function in FLOATS.items()}


def test_floats_of_any_width_equal_float32():
    """JAX promotes narrow ones with no other dtype."""
    jax.eval_shape(all_of, jax.ShapeDtypeStruct((), "float4_e2m1fn"))
    clips = helpers.quick_jit(all_of)
    expected = helpers.as_float64(clips(jnp.float32(0.5)))
    # JAX has no array of np.longdouble.
    of_longdouble = helpers.quick_jit(lambda: all_of(np.longdouble(0.5)))
    for found in (clips(jnp.asarray(0.5, "float8_e4m3fn")), of_longdouble()):
        for name, values in helpers.as_float64(found).items():
            leaves = zip(*map(jax.tree.leaves, (values, expected[name])), strict=True)
            for got, wanted in leaves:
                np.testing.assert_allclose(got, wanted, 1e-5, 1e-7, err_msg=name)


def norm_of(leaves, **options):
    return optclip.norms.measure([optclip.norms.Block(leaves, **options)])


INTS = {
    "axis": lambda n: functional.clip_by_norm({"w": TREE["w"]}, 1.0, axis=n(0)),
    "axes": lambda n: functional.clip_by(
        {"w": TREE["w"]}, 1.0, over=optclip.axes((n(0), n(1)))
    ),
    "layers": lambda n: functional.clip_by(
        TREE, 1.0, over=optclip.layers("w", axis=n(1))
    ),
    "cotangent": lambda n: jax.grad(
        lambda x: jnp.sum(optclip.clip_cotangent(x, 1.0, axis=n(0)))
    )(TREE["w"]),
    "units": lambda n: functional.clip_by(
        TREE, 1.0, over=optclip.units(axis=lambda path, shape: n(0))
    ),
    "block": lambda n: norm_of([TREE["w"]], axis=(n(0),)),
    "matrices": lambda n: functional.clip_by_spectral_norm(
        TREE, 1.0, matrix_axes=(n(0), n(1))
    ),
    "ord": lambda n: functional.global_norm(TREE, ord=n(3)),
    "norm": lambda n: functional.clip_by(
        TREE, 1.0, norm=optclip.norms.Norm(n(1), n(1))
    ),
    "windows": lambda n: update(
        optclip.clip_by_norm(thresholds.mean_plus_std(2.0, n(200), n(2), n(1)))
    ),
    "steps": lambda n: update(optclip.with_history(optclip.clip_by_norm(1.0), n(200))),
    "reset": lambda n: update(optclip.with_periodic_reset(SGD, n(200), warmup=n(200))),
    "heads": lambda n: (
        optclip.Heads(
            "query", "key", axis=n(1), rope=n(0), head_dim=n(2), stacked=n(0)
        ).axis
    ),
    "examples": lambda n: per_example.clipped_grad(
        loss, 1.0, argnums=n(0), batch_argnums=(n(1),), microbatch_size=n(1)
    )(jnp.ones(2), TREE["w"]),
    "block_size": lambda n: functional.max_attention_logit(
        jnp.ones((3, 2, 4)), jnp.ones((3, 2, 4)), block_size=n(2)
    ),
}


@pytest.mark.parametrize("name", INTS)
def test_numpy_integers_give_the_program_of_python_ints(name):
    """Arithmetic with a narrow NumPy integer would wrap."""
    programs = [
        str(jax.make_jaxpr(lambda n=n: INTS[name](n))()) for n in (int, np.uint8)
    ]
    assert programs[0] == programs[1]


def test_numpy_floats_are_orders():
    found = functional.global_norm(TREE, ord=np.float32(3))
    assert found == functional.global_norm(TREE, ord=3)
