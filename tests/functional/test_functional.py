"""The pure layer: signatures, each function by its formula, norms in hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip import functional as F
from tests.support import helpers, oracles
from tests.support.covering import RUNS
from tests.support.registry import numpy_tree

SIGNATURES = {
    "global_norm": "(tree, *, ord, axis_name, norm_mask)",
    "clip_by_value": "(tree, lower, upper, *, nonfinite, strict, clip_mask)",
    "clip_by_norm": "(tree, max_norm, *, axis, ord, eps, strict, nonfinite, clip_mask,"
    " axis_name)",
    "clip_by_average_norm": "(tree, max_norm, *, eps, strict, nonfinite, clip_mask,"
    " axis_name)",
    "clip_by_rms": "(tree, max_rms, *, axis, eps, strict, nonfinite, clip_mask,"
    " axis_name)",
    "clip_by_group_norm": "(tree, max_norm, groups, *, ord, eps, strict, nonfinite,"
    " norm_mask, clip_mask, axis_name)",
    "clip_by_global_norm": "(tree, max_norm, *, norm, ord, eps, strict, nonfinite,"
    " norm_mask, clip_mask, axis_name)",
}


def test_names_and_arguments_are_fixed():
    public = {n for n, f in vars(F).items() if inspect.isfunction(f) and n[0] != "_"}
    assert public == set(SIGNATURES)
    for name, expected in SIGNATURES.items():
        parts = []
        for p in inspect.signature(getattr(F, name)).parameters.values():
            if p.kind is p.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            parts.append(p.name)
        assert f"({', '.join(parts)})" == expected


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_each_function_against_its_formula(kind):
    """One program of all; op by op they are run by the docstrings."""
    tree = helpers.typed(kind)
    numpy = numpy_tree(tree)
    labels = {"dense": "a", "out": "b"}
    cases = [
        (
            lambda t: F.clip_by_value(t, lower=-0.5, upper=0.25),
            oracles.by_value(numpy, -0.5, 0.25),
        ),
        (lambda t: F.clip_by_norm(t, 2.0), oracles.by_leaf(numpy, 2.0)),
        (lambda t: F.clip_by_norm(t, 2.0, axis=0), oracles.by_first_axis(numpy, 2.0)),
        (
            lambda t: F.clip_by_average_norm(t, 0.5),
            oracles.by_leaf(numpy, 0.5, oracles.average_norm),
        ),
        (lambda t: F.clip_by_rms(t, 1.5), oracles.by_leaf(numpy, 1.5, oracles.rms)),
        (
            lambda t: F.clip_by_group_norm(t, {"a": 1.0, "b": 2.0}, labels)[0],
            oracles.by_top_key(numpy, {"dense": 1.0, "out": 2.0}),
        ),
        (lambda t: F.clip_by_global_norm(t, 2.0)[0], oracles.by_tree(numpy, 2.0)),
        (
            lambda t: F.clip_by_global_norm(t, 2.0, ord=1.0)[0],
            oracles.by_tree(numpy, 2.0, 1.0),
        ),
    ]
    everything = helpers.strictly(lambda t: [function(t) for function, _ in cases])
    for found, (_, expected) in zip(jax.jit(everything)(tree), cases, strict=True):
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        helpers.assert_close(found, expected, ulps=4)


@pytest.mark.covering(p=(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, np.inf, None), run=RUNS)
def test_the_global_norm_is_that_of_any_order(p, run):
    tree = helpers.gradients()
    found = run(helpers.strictly(lambda t: F.global_norm(t, ord=p)))(tree)
    assert found.dtype == jnp.float32
    expected = oracles.tree_norm(numpy_tree(tree), 2.0 if p is None else p)
    np.testing.assert_allclose(found, expected, rtol=1e-5 if p in (0.5, 1.5) else 1e-6)


def test_a_given_norm_is_not_computed_again():
    tree = helpers.gradients()
    for norm in (7.0, jnp.float32(7.0), np.float64(7.0), 7, jnp.bfloat16(7)):
        found, returned = F.clip_by_global_norm(tree, 2.0, use_norm=norm)
        helpers.assert_close(found, jax.tree.map(lambda x: x * (2 / 7), tree), 2)
        assert returned == 7.0
    unclipped, _ = F.clip_by_global_norm(tree, 2.0, use_norm=1.5)
    helpers.assert_identical(unclipped, tree)
    reduces = str(
        jax.make_jaxpr(lambda t: F.clip_by_global_norm(t, 2.0, use_norm=7.0)[0])(tree)
    )
    assert "reduce_sum" not in reduces


def test_a_given_norm_of_zero_clips_nothing():
    found, norm = F.clip_by_global_norm(jnp.zeros(2), 1.0, use_norm=0.0)
    assert norm == 0
    assert not np.any(found)
