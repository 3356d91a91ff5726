"""Eager calls compile once for all numbers of any width, in work linear in leaves.

`test_jax.py` checks that transformations compile once.
"""

import cProfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional, per_example, recipes, responses, thresholds
from optclip._responses import _responses
from tests.support import helpers

TX = optclip.clip_by_global_norm(1.0, record=False)
HEADS = np.ones((5, 2, 3), np.float32)
W = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
CALLS = {
    "tree": lambda c: functional.clip_by_global_norm(W, c),
    "element": lambda c: functional.clip_by_value(W, c),
    "eps": lambda c: functional.clip_by_norm(W, 1.0, eps=c),
    "band": lambda c: functional.clip_by(
        W, 1.0, over="leaf", response=responses.detached(responses.band(c))
    ),
    "cotangent": lambda c: jax.grad(
        lambda w: 3 * jnp.sum(optclip.clip_cotangent(w, c)["a"])
    )(W),
    "max logit": lambda c: [
        functional.max_attention_logit(c * HEADS, HEADS, mask=mask, block_size=2)
        for mask in (None, "causal", np.ones((5, 5), bool))
    ],
    "smooth": lambda c: functional.clip_by(W, 1.0, response=_responses.Smooth(c)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_second_eager_call_compiles_nothing(call):
    call(0.5)
    with helpers.compilations() as compilations:
        second = call(0.25)
    assert not compilations
    expected = helpers.quick_jit(call)(jnp.float32(0.25))
    helpers.assert_close(second, expected)


def calls_of(function, *args, builtins=True):
    """Return how many functions a call calls, and its result."""
    profile = cProfile.Profile(builtins=builtins)
    result = profile.runcall(function, *args)
    return sum(entry.callcount for entry in profile.getstats()), result


# JAX runs 30 Python functions to convert an array, and 20 to pass it to a function with
# a custom derivative: 187, 392, 1,163 and 270 per leaf without these shortcuts.
@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda tree: functional.clip_by_global_norm(tree, 1.0), 130),
        (lambda tree: functional.clip_by_norm(tree, 1.0), 180),
        (lambda tree: functional.clip_by_value(tree, 1.0), 520),
        (lambda tree: TX.update(tree, TX.init(None)), 160),
    ],
    ids=["tree", "leaf", "element", "transformation"],
)
def test_eager_call_runs_few_python_functions_per_leaf(function, most):
    counts = []
    for number in (8, 16):
        tree = [jnp.ones((2, 3))] * number
        function(tree)  # Traces and compiles.
        counts.append(calls_of(function, tree, builtins=False)[0])
    assert (counts[1] - counts[0]) / 8 <= most


# The work of a call, and the size of its program, grow linearly with the leaves.

KERNEL = np.ones((4, 2, 3), np.float32)
RULE = thresholds.ema()
OPTIMIZERS = {
    "tree": optclip.clip_by_global_norm(1.0, record="leaves"),
    "leaves": optclip.clip_by_norm(RULE, record="leaves"),
    "one entry": optclip.clip_by_norm(RULE),
    "wrappers": optclip.with_history(
        optclip.skip(
            optclip.constrain(optax.sgd(1.0), optclip.clip_by_norm(1.0)), max_norm=RULE
        )
    ),
}
WORK = {
    "init": lambda tx, params, state: tx.init(params),
    "update": lambda tx, *args: jax.make_jaxpr(tx.update)(*args, args[0]),
    "metrics": lambda tx, params, state: optclip.metrics(state),
    "summary": lambda tx, params, state: str(optclip.summary(state)),
    "carry_over": lambda tx, *args: optclip.carry_over(tx, *args, tx, args[0]),
    "find_heads": lambda tx, params, state: optclip.find_heads(
        params, query="query", key="key"
    ),
}


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_work_and_program_grow_linearly_with_leaves(tx):
    work, equations = [], []
    # The first call fills caches.
    for number in (2, 10, 40):
        layers = {f"{i}": {"query": KERNEL, "key": KERNEL} for i in range(number)}
        state = tx.init(layers)
        counts = {name: calls_of(f, tx, layers, state) for name, f in WORK.items()}
        work.append({name: calls for name, (calls, _) in counts.items()})
        program = counts["update"][1].jaxpr
        equations.append(sum(1 for _ in helpers.equations(program)))
    assert equations[2] < 4.1 * equations[1]
    for name in WORK:
        assert work[2][name] < 4.4 * work[1][name], name


# Every argument that is a number accepts narrow floats and NumPy scalars.

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
