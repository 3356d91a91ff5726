"""What the authors' own code of AutoClip leaves of a sequence of norms.

Their code is not kept here: https://github.com/pseeth/autoclip, which needs torch. The
event of ignite that it waits for is put in for it.
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
    """What it asks of ignite: to be called after each backward pass."""

    def on(self, event: Any) -> Any:
        def keep(handler: Any) -> Any:
            self.handler = handler
            return handler

        return keep


def values(checkout: pathlib.Path) -> dict[str, Any]:
    # Here, because only those who make the values anew need it.
    import torch

    ignite = types.ModuleType("ignite.engine")
    ignite.__dict__["EventEnum"] = type("EventEnum", (), {})
    sys.modules |= {"ignite": types.ModuleType("ignite"), "ignite.engine": ignite}
    path = checkout / "autoclip.py"
    official = runpy.run_path(str(path))["add_autoclip_gradient_handler"]
    norms = rules.NORMS[np.isfinite(rules.NORMS)]
    found: dict[str, Any] = {"norms": norms.tolist(), "left": {}}
    for name, percentile in PERCENTILES.items():
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        engine = Engine()
        official(engine, model, percentile)
        left = []
        for norm in norms:
            model.weight.grad = torch.tensor([[0.6 * norm, -0.8 * norm]])
            engine.handler(engine)
            left.append(float(model.weight.grad.norm()))
        found["left"][name] = left
    return found
