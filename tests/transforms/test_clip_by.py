"""The clip for optax: lifted from the pure one, and what it may be asked for."""

import numpy as np
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers


def test_functional_and_transform_are_the_same_clip(run):
    """Written once and lifted: bit for bit."""
    tree = helpers.mixed_gradients()
    tx = optclip.clip_by_global_norm(2.0, ord=3.0, nonfinite="drop")
    lifted = run(lambda t: tx.update(t, tx.init(t))[0])(tree)
    pure = run(lambda t: F.clip_by_global_norm(t, 2.0, ord=3.0, nonfinite="drop")[0])
    helpers.assert_identical(lifted, pure(tree))


def test_two_bounds_need_elements():
    bounds = optclip.thresholds.bounds(-1.0, 2.0)
    with pytest.raises(ValueError, match="Two bounds are for single elements"):
        optclip.clip_by(bounds)
    with pytest.raises(ValueError, match="Two bounds are for single elements"):
        optclip.clip_by(bounds, over="element", response="smooth")


GRADIENTS = {
    "dict": {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)},
    "list": [np.ones(3, np.float32)],
    "array": np.ones((2, 3), np.float32),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_given_to_a_transformation_are_sent_to_the_function(kind):
    words = "one number.*clip gradients at once call optclip.functional.clip_by_global"
    with pytest.raises(TypeError, match=f"(?s)`max_norm` must be {words}"):
        optclip.clip_by_global_norm(GRADIENTS[kind])
    with pytest.raises(TypeError, match=f"(?s)`threshold` must be {words}"):
        optclip.clip_by(GRADIENTS[kind])
