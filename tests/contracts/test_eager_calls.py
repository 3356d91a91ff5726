"""Eager calls compile once for all numbers, and run little Python.

`test_jax.py` checks that transformations compile once.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional, responses
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


def _python_calls(function, tree):
    function(tree)  # Traces and compiles.
    events = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        function(tree)
    finally:
        sys.setprofile(before)
    return events.count("call")


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
    few, many = (
        _python_calls(function, [jnp.ones((2, 3))] * number) for number in (8, 16)
    )
    assert (many - few) / 8 <= most
