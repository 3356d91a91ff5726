"""The named clips: each is `clip_by` over its scope, by its norm; their errors."""

import numpy as np
import pytest

import optclip
from tests.support import helpers

ONES = np.ones(3, np.float32)
BOUNDS = optclip.thresholds.bounds(-1.0, 2.0)
AT_ONCE = "one number.*clip gradients at once call optclip.functional.clip_by_global"
REJECTED = [
    (optclip.clip_by_value, (), {}, "got neither: .*Give limit alone"),
    (optclip.clip_by_value, (1.0,), {"lower": -1.0}, "got both: .*Give limit alone"),
    (optclip.clip_by_value, (1.0,), {"upper": 1.0}, "got both: .*Give limit alone"),
    (optclip.clip_by, (BOUNDS,), {}, "Two bounds are for single elements"),
    (
        optclip.clip_by,
        (BOUNDS,),
        {"over": "element", "response": "smooth"},
        "Two bounds are for single elements",
    ),
    # Gradients in the place of the threshold.
    *(
        (make, (gradients,), {}, f"`{name}` must be {AT_ONCE}")
        for make, name in (
            (optclip.clip_by_global_norm, "max_norm"),
            (optclip.clip_by, "threshold"),
        )
        for gradients in ({"b": ONES}, [ONES], ONES)
    ),
]


@pytest.mark.parametrize(("make", "arguments", "options", "words"), REJECTED)
def test_clip_by_wrong_arguments_raises(make, arguments, options, words):
    error = ValueError if "bounds" in words else TypeError
    with pytest.raises(error, match=f"(?s){words}"):
        make(*arguments, **options)


LABELS = {"dense": "body", "out": "head"}
AXES, GROUPS = optclip.axes(0), optclip.groups(LABELS)
# A named clip, its arguments, and those of the same `clip_by`.
NAMED = {
    "value": (optclip.clip_by_value, {}, {"over": "element"}),
    "norm": (optclip.clip_by_norm, {"ord": 3.0}, {"over": "leaf", "norm": 3.0}),
    "slices": (optclip.clip_by_norm, {"axis": 0}, {"over": AXES}),
    "average": (optclip.clip_by_average_norm, {}, {"over": "leaf", "norm": "average"}),
    "rms": (optclip.clip_by_rms, {"axis": 0}, {"over": AXES, "norm": "rms"}),
    "group": (
        optclip.clip_by_group_norm,
        {"groups": LABELS, "ord": 1.0},
        {"over": GROUPS, "norm": "l1"},
    ),
    "global": (optclip.clip_by_global_norm, {"ord": np.inf}, {"norm": "inf"}),
}


def test_named_clip_equals_clip_by():
    tree, pairs = helpers.gradients(), {}
    for name, (make, arguments, general) in NAMED.items():
        options = {"response": "smooth", "strict": True, "name": "x"}
        options |= {"eps": 0.1} if name != "value" else {}
        clip = optclip.clip_by(0.3, **general, **options)
        pairs[name] = make(0.3, **arguments, **options), clip

    @helpers.quick_jit
    def both(tree):
        return {
            name: [tx.update(tree, tx.init(tree)) for tx in pair]
            for name, pair in pairs.items()
        }

    for (updates, state), (expected, general_state) in both(tree).values():
        assert helpers.differs(updates, tree)
        helpers.assert_identical(updates, expected)
        records = optclip.metrics(state), optclip.metrics(general_state)
        helpers.assert_identical(*records)
