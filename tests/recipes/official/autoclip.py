"""Clip a sequence of gradients with the authors' code of AutoClip.

Requires torch and a checkout of https://github.com/pseeth/autoclip. A substitute calls
its handler instead of ignite.
"""

import pathlib
import runpy
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


def values(checkout: pathlib.Path) -> dict[str, Any]:
    import torch

    ignite = types.ModuleType("ignite.engine")
    ignite.__dict__["EventEnum"] = type("EventEnum", (), {})
    sys.modules |= {"ignite": types.ModuleType("ignite"), "ignite.engine": ignite}
    path = checkout / "autoclip.py"
    official = runpy.run_path(str(path))["add_autoclip_gradient_handler"]
    norms = rules.NORMS[np.isfinite(rules.NORMS)]
    results: dict[str, Any] = {"norms": norms.tolist(), "left": {}}
    for name, percentile in PERCENTILES.items():
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        engine = Engine()
        official(engine, model, percentile)
        left = []
        for norm in norms:
            model.weight.grad = torch.tensor([[0.6 * norm, -0.8 * norm]])
            engine.handler(engine)
            left.append(float(model.weight.grad.norm()))
        results["left"][name] = left
    return results
