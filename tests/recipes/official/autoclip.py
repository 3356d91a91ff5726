"""Clip a sequence of gradients with the authors' code of AutoClip.

Requires torch and a checkout of https://github.com/pseeth/autoclip. A substitute calls
its handler instead of ignite.
"""

import sys
import types
from typing import Any

import numpy as np

from tests.support import rules

PERCENTILES = {"paper": 10, "median": 50, "most": 90}


class Engine:
    """Stand in for ignite's engine, and store the handler to call."""

    def on(self, event: Any) -> Any:
        def store(handler: Any) -> Any:
            self.handler = handler
            return handler

        return store


def norms_left(make: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return norms, and those left by `make(model, option)()` for each option."""
    import torch

    norms = rules.NORMS[np.isfinite(rules.NORMS)]
    results: dict[str, Any] = {"norms": norms.tolist(), "left": {}}
    for name, option in options.items():
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        clip = make(model, option)
        results["left"][name] = []
        for norm in norms:
            model.weight.grad = torch.tensor([[0.6 * norm, -0.8 * norm]])
            clip()
            results["left"][name].append(float(model.weight.grad.norm()))
    return results


def values(checkout: Any) -> dict[str, Any]:
    ignite = types.ModuleType("ignite.engine")
    ignite.__dict__["EventEnum"] = type("EventEnum", (), {})
    sys.modules |= {"ignite": types.ModuleType("ignite"), "ignite.engine": ignite}
    official = checkout.names_of("autoclip.py")["add_autoclip_gradient_handler"]

    def clip(model: Any, percentile: float) -> Any:
        engine = Engine()
        official(engine, model, percentile)
        return lambda: engine.handler(engine)

    return norms_left(clip, PERCENTILES)
