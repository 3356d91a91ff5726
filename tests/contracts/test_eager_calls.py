"""Eager calls compile once and run little Python; work is linear in the leaves.

`test_jax.py` checks that transformations compile once.
"""

import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional, responses, thresholds
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


def calls_of(function, *args):
    """Return how often a call calls functions of each kind, and its result."""
    events = collections.Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.update([event]))
    try:
        result = function(*args)
    finally:
        sys.setprofile(before)
    return events, result


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
        counts.append(calls_of(function, tree)[0]["call"])
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
        work.append({k: x["call"] + x["c_call"] for k, (x, _) in counts.items()})
        program = counts["update"][1].jaxpr
        equations.append(sum(1 for _ in helpers.equations(program)))
    assert equations[2] < 4.1 * equations[1]
    for name in WORK:
        assert work[2][name] < 4.4 * work[1][name], name
