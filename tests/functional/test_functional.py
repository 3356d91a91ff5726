"""The pure layer: signatures, each function by its formula, norms in hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers, oracles
from tests.support.covering import RUNS
from tests.support.registry import ENTRIES, numpy_tree

SHARED = "response, eps, strict, nonfinite, mask"
EXPERT = f"{SHARED}, norm_mask, clip_mask, axis_name)"
SIGNATURES = {
    "clip_attention_logits": "(params, max_logits, max_logit, layers, *, balance, by_group)",
    "max_attention_logit": "(query, key, *, scale, mask, axis_name, block_size)",
    "clip_by_spectral_norm": "(tree, max_norm, *, matrix_axes, response, eps, nonfinite, mask, axis_name)",
    "clip_by_singular_value": "(tree, max_value, *, response, matrix_axes, method, nonfinite, mask, axis_name)",
    "clip_by": f"(tree, threshold, *, over, norm, {EXPERT}",
    "global_norm": "(tree, *, ord, axis_name, mask)",
    "clip_by_value": "(tree, limit, *, lower, upper, strict, nonfinite, mask)",
    "clip_by_norm": f"(tree, max_norm, *, axis, ord, {SHARED}, axis_name)",
    "clip_by_average_norm": f"(tree, max_norm, *, {SHARED}, axis_name)",
    "clip_by_rms": f"(tree, max_rms, *, axis, {SHARED}, axis_name)",
    "clip_by_group_norm": f"(tree, max_norm, groups, *, ord, {EXPERT}",
    "clip_by_global_norm": f"(tree, max_norm, *, use_norm, ord, {EXPERT}",
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


GRADIENTS = {
    "dict": {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)},
    "list": [np.ones(3, np.float32)],
    "array": np.ones((2, 3), np.float32),
}


FUNCTIONS = {
    "clip_by_global_norm": "max_norm",
    "clip_by_norm": "max_norm",
    "clip_by_rms": "max_rms",
    "clip_by_average_norm": "max_norm",
    "clip_by_value": "limit",
    "clip_by": "threshold",
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.float64(1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_threshold_before_the_gradients_is_to_be_exchanged(name, number, kind, run):
    words = f"must come first, then `{FUNCTIONS[name]}`, .* Exchange the two arguments"
    with pytest.raises(TypeError, match=f"(?s){words}"):
        run(lambda tree: getattr(F, name)(number, tree))(GRADIENTS[kind])


def test_a_number_may_be_a_tree():
    assert F.clip_by_value(3.0, upper=2.0) == 2
    assert F.clip_by_global_norm(3.0, np.float32(2.0))[0] == 2


def test_a_response_with_a_schedule_has_no_step_in_a_pure_clip():
    moving = optclip.responses.band(lambda step: 0.5)
    with pytest.raises(ValueError, match="`response` must be without a schedule.*step"):
        F.clip_by(jnp.ones(2), 1.0, response=moving)


@pytest.mark.covering(entry=[entry for entry in ENTRIES if entry.pure])
def test_pure_function_called_again_outside_jit_compiles_nothing(entry):
    first, second = helpers.mixed_gradients(0), helpers.mixed_gradients(1)
    entry.pure(first)
    with helpers.compilations() as found:
        clipped = entry.pure(second)
    assert not found
    # Those of the tree and of groups return the norms too.
    clipped = clipped[0] if isinstance(clipped, tuple) else clipped
    assert helpers.differs(clipped, second)


def test_compilations_are_counted():
    with helpers.compilations() as found:
        jax.jit(lambda x: x * 41.0)(jnp.ones(43))
    assert found
