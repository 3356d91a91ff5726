"""Describe what the thresholds of a state learned from, to compare it with a saved one.

The variables of a state have only shapes, which other norms and rules have too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._arrays import _leaves, _validate
from .._clip import layout_of
from .._transforms import Noted
from .._wrappers import rule_text

Description = list[dict[str, Any]]


def described(noted: Iterable[Noted], names: Sequence[str]) -> Description:
    """Describe each clipping that learns: its norm and scope, its rules and leaves.

    Leaves are positions in the model, since another process may name layers otherwise.
    """
    places = {name: i for i, name in enumerate(names)}
    return [
        {
            "norm": engine.measured,
            "rules": [rule_text(rule) for rule in engine.rules.learning],
            "variables": [
                [places.get(_leaves.path_str(x.path)) for x in block.leaves]
                for block in layout_of(engine.clip, params).blocks
            ],
        }
        for engine, params, _ in noted
        if engine.rules.learning
    ]


def encoded(description: Description) -> np.ndarray:
    """Return a description as an array, which Keras stores."""
    return np.frombuffer(json.dumps(description).encode(), np.uint8)


def check_saved(saved: Any, expected: Description) -> None:
    """Raise if the thresholds of a saved state learned from something else.

    Args:
      saved: The description in the file, encoded; None if it has none.
      expected: The description of the optimizer that loads it.
    """
    before = [] if saved is None else json.loads(np.asarray(saved).tobytes())
    for old, new in itertools.zip_longest(before, expected, fillvalue={}):
        for key in new | old:
            if old.get(key) != new.get(key):
                raise ValueError(
                    f"The saved thresholds must have learned with the {key}"
                    f" {_validate.shown(new.get(key))}, as in this optimizer, got"
                    f" {_validate.shown(old.get(key, 'no description'))}. Use the"
                    " saved clip. To start with a new state instead, load the weights"
                    " before `compile`."
                )
