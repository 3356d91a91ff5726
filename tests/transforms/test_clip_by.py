"""`clip_by` is the pure clip lifted to optax, and checks its arguments."""

import numpy as np
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers


def test_clip_by_global_norm_equals_the_pure_function(run):
    tree = helpers.mixed_gradients()
    tx = optclip.clip_by_global_norm(2.0, ord=3.0, nonfinite="drop")
    updates = run(lambda t: tx.update(t, tx.init(t))[0])(tree)
    pure = run(lambda t: F.clip_by_global_norm(t, 2.0, ord=3.0, nonfinite="drop")[0])
    helpers.assert_identical(updates, pure(tree))


@pytest.mark.parametrize("options", [{}, {"over": "element", "response": "smooth"}])
def test_clip_by_two_bounds_over_norms_or_softly_raises(options):
    bounds = optclip.thresholds.bounds(-1.0, 2.0)
    with pytest.raises(ValueError, match="Two bounds are for single elements"):
        optclip.clip_by(bounds, **options)


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize("gradients", [{"b": ONES}, [ONES], ONES])
def test_clip_by_gradients_as_threshold_names_the_function(gradients):
    words = "one number.*clip gradients at once call optclip.functional.clip_by_global"
    with pytest.raises(TypeError, match=f"(?s)`max_norm` must be {words}"):
        optclip.clip_by_global_norm(gradients)
    with pytest.raises(TypeError, match=f"(?s)`threshold` must be {words}"):
        optclip.clip_by(gradients)
