"""Clip a sequence of updates with Levanter's code.

Requires a checkout of https://github.com/marin-community/levanter. A substitute
replaces its logger.
"""

import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support import rules

OPTIONS = {
    "default": {"rolling_interval_length": 128, "sigma_factor": 3.0},
    "tight": {"rolling_interval_length": 16, "sigma_factor": 0.5},
}


def values(checkout: Any) -> dict[str, Any]:
    tracker = types.ModuleType("levanter.tracker")
    tracker.__dict__["jit_log"] = lambda _: None
    levanter = types.ModuleType("levanter")
    levanter.__dict__["tracker"] = tracker
    sys.modules |= {"levanter": levanter, "levanter.tracker": tracker}
    names = checkout.names_of("src/levanter/optim/clip_update_norm.py")
    official = names["clip_update_by_historical_norm"]
    norms = rules.NORMS[np.isfinite(rules.NORMS)]
    results: dict[str, Any] = {"norms": norms.tolist(), "left": {}}
    for name, options in OPTIONS.items():
        tx = official(**options)
        state = tx.init(jnp.zeros(2))
        left = []
        for norm in norms:
            updates = jnp.array([0.6 * norm, -0.8 * norm], jnp.float32)
            clipped, state = tx.update(updates, state)
            left.append(float(np.linalg.norm(np.float64(clipped))))
        results["left"][name] = left
    return results
