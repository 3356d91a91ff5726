"""Thresholds that `clip_by` and the named clips reject."""

import numpy as np
import pytest

import optclip

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
