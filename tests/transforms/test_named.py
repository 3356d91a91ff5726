"""The named clips: each is `clip_by` over its scope, by its norm."""

import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip.norms import AVERAGE, RMS, Norm
from tests.support import helpers


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({}, "neither"),
        ({"limit": 1.0, "lower": -1.0}, "both"),
        ({"limit": 1.0, "upper": 1.0}, "both"),
    ],
)
def test_a_value_clip_takes_a_limit_or_bounds_not_both(arguments, given):
    with pytest.raises(TypeError, match=f"got {given}: .*Give limit alone"):
        optclip.clip_by_value(**arguments)


def test_bounds_may_be_schedules():
    tx = optclip.clip_by_value(lower=lambda step: -1.0 - step, upper=2.0)
    x = jnp.array([-9.0, 9.0])
    state, update = tx.init(x), helpers.quick_jit(tx.update)
    for expected in ([-1.0, 2.0], [-2.0, 2.0]):
        found, state = update(x, state)
        np.testing.assert_array_equal(found, expected)


LABELS = {"dense": "body", "out": "head"}
LEAF, AXES, ELEMENT = "leaf", optclip.axes(0), "element"
# A named clip, and the same by `clip_by`.
NAMED = {
    "value": (optclip.clip_by_value, {}, {"over": ELEMENT}),
    "norm": (optclip.clip_by_norm, {"ord": 3.0}, {"over": LEAF, "norm": Norm(3.0)}),
    "slices": (optclip.clip_by_norm, {"axis": 0}, {"over": AXES}),
    "average": (optclip.clip_by_average_norm, {}, {"over": LEAF, "norm": AVERAGE}),
    "rms": (optclip.clip_by_rms, {"axis": 0}, {"over": AXES, "norm": RMS}),
    "group": (
        optclip.clip_by_group_norm,
        {"groups": LABELS, "ord": 1.0},
        {"over": optclip.groups(LABELS), "norm": Norm(1.0)},
    ),
    "global": (optclip.clip_by_global_norm, {"ord": np.inf}, {"norm": Norm(np.inf)}),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_clip_is_clip_by_over_its_scope_by_its_norm(name):
    make, own, general = NAMED[name]
    tree = helpers.gradients()
    options = {"response": "smooth", "eps": 0.1, "strict": True, "name": "x"}
    if name == "value":
        del options["eps"]
    pair = make(0.3, **own, **options), optclip.clip_by(0.3, **general, **options)

    @helpers.quick_jit
    def both(tree):
        return [tx.update(tree, tx.init(tree)) for tx in pair]

    (found, state), (expected, wanted) = both(tree)
    assert helpers.differs(found, tree)
    helpers.assert_identical(found, expected)
    helpers.assert_identical(optclip.metrics(state), optclip.metrics(wanted))
