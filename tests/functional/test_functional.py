"""Test the pure functions: their formulas, given norms, and exchanged arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional as F
from tests.support import covering, helpers, oracles
from tests.support.registry import BY_SCOPE, numpy_tree


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_pure_functions_equal_their_formulas(kind):
    tree = helpers.typed(kind)
    numpy = numpy_tree(tree)
    labels = {"dense": "a", "out": "b"}
    limits = {"a": 1.0, "b": 2.0}

    @helpers.quick_jit
    @helpers.strictly
    def clipped(tree):
        return [
            F.clip_by_value(tree, lower=-0.5, upper=0.25),
            F.clip_by_norm(tree, 2.0),
            F.clip_by_norm(tree, 2.0, axis=0),
            F.clip_by_average_norm(tree, 0.5),
            F.clip_by_rms(tree, 1.5),
            F.clip_by_group_norm(tree, limits, labels)[0],
            F.clip_by_global_norm(tree, 2.0)[0],
            F.clip_by_global_norm(tree, 2.0, ord=1.0)[0],
        ]

    expected = [
        oracles.by_value(numpy, -0.5, 0.25),
        oracles.by_leaf(numpy, 2.0),
        oracles.by_first_axis(numpy, 2.0),
        oracles.by_leaf(numpy, 0.5, oracles.average_norm),
        oracles.by_leaf(numpy, 1.5, oracles.rms),
        oracles.by_top_key(numpy, {"dense": 1.0, "out": 2.0}),
        oracles.by_tree(numpy, 2.0),
        oracles.by_tree(numpy, 2.0, 1.0),
    ]
    for found, wanted in zip(clipped(tree), expected, strict=True):
        helpers.assert_same_types(found, tree)
        assert helpers.differs(found, tree)
        helpers.assert_close(found, wanted, ulps=4)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, np.inf, None])
def test_global_norm_of_each_order_equals_numpy(p):
    tree = helpers.gradients()
    norm = helpers.quick_jit(helpers.strictly(lambda t: F.global_norm(t, ord=p)))(tree)
    assert norm.dtype == jnp.float32
    expected = oracles.tree_norm(numpy_tree(tree), 2.0 if p is None else p)
    np.testing.assert_allclose(norm, expected, rtol=1e-5 if p in (0.5, 1.5) else 1e-6)


@pytest.mark.parametrize(
    "norm", [7.0, jnp.float32(7), np.float64(7), 7, jnp.bfloat16(7)]
)
def test_global_norm_clipping_uses_the_norm_given(norm):
    tree = helpers.gradients()
    found, returned = F.clip_by_global_norm(tree, 2.0, use_norm=norm)
    expected = jax.tree.map(lambda x: np.asarray(x) * (2 / 7), tree)
    helpers.assert_close(found, expected, 2)
    assert returned == 7.0


def test_global_norm_clipping_with_given_norm_computes_none():
    tree = helpers.gradients()
    clip = jax.make_jaxpr(lambda t: F.clip_by_global_norm(t, 2.0, use_norm=7.0)[0])
    assert "reduce_sum" not in str(clip(tree))


@pytest.mark.parametrize("norm", [0.0, 1.5])
def test_global_norm_clipping_with_given_norm_below_threshold_is_identity(norm):
    tree = helpers.gradients()
    found, returned = F.clip_by_global_norm(tree, 2.0, use_norm=norm)
    helpers.assert_identical(found, tree)
    assert returned == norm


GRADIENTS = {
    "dict": {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)},
    "list": [np.ones(3, np.float32)],
    "array": np.ones((2, 3), np.float32),
}
THRESHOLDS = {
    "clip_by_global_norm": "max_norm",
    "clip_by_norm": "max_norm",
    "clip_by_rms": "max_rms",
    "clip_by_average_norm": "max_norm",
    "clip_by_value": "limit",
    "clip_by": "threshold",
}


@pytest.mark.covering(
    name=tuple(THRESHOLDS),
    number=(1, 1.0, np.float32(1), np.float64(1)),
    kind=tuple(GRADIENTS),
    run=covering.RUNS,
)
def test_threshold_before_gradients_error_asks_for_exchange(name, number, kind, run):
    words = f"must come first, then `{THRESHOLDS[name]}`, .* Exchange the two arguments"
    with pytest.raises(TypeError, match=f"(?s){words}"):
        run(lambda tree: getattr(F, name)(number, tree))(GRADIENTS[kind])


def test_number_is_clipped_as_a_tree():
    assert F.clip_by_value(3.0, upper=2.0) == 2
    assert F.clip_by_global_norm(3.0, np.float32(2.0))[0] == 2


def test_scheduled_response_in_pure_function_is_rejected():
    moving = optclip.responses.band(lambda step: 0.5)
    with pytest.raises(ValueError, match="`response` must be without a schedule.*step"):
        F.clip_by(np.ones(2), 1.0, response=moving)


# The contract of the transformations has every entry.
@pytest.mark.parametrize("entry", [e for e in BY_SCOPE if e.pure], ids=lambda e: e.id)
def test_pure_function_called_again_outside_jit_compiles_nothing(entry):
    first, second = helpers.gradients(0), helpers.gradients(1)
    entry.pure(first)
    with helpers.compilations() as compiled_again:
        clipped = entry.pure(second)
    assert not compiled_again
    # Global and group norms are returned too.
    clipped = clipped[0] if isinstance(clipped, tuple) else clipped
    assert helpers.differs(clipped, second)


def test_compilations_counts_a_new_program():
    with helpers.compilations() as compiled:
        jax.jit(lambda x: x * 41.0)(np.ones(43, np.float32))
    assert compiled
