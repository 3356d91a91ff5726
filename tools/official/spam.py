"""What the authors' own code of SPAM does to a sequence of gradients.

Their code is not kept here: https://github.com/TianjinYellow/SPAM-Optimizer, which
needs torch. `scales` are the factors on its updates after a reset.
"""

import contextlib
import pathlib
import runpy
import sys
from typing import Any

import numpy as np

OPTIONS = {
    "default": {},
    "resets": {"threshold": 100, "DeltaT": 50},
    "short": {"threshold": 100, "DeltaT": 50, "warmup_steps": 10},
}
START = [1.0, -2.0, 0.5, 0.0, 3.0, -0.25]
DIGITS = 13


def gradients(steps: int) -> np.ndarray:
    """The first of 120: heavy tails in 64ths, spikes, a step of zeros, a late element."""
    found = np.random.default_rng(2).standard_t(2.5, size=(120, len(START)))
    found[[29, 52, 84]] *= 1000.0
    found[40] = 0.0
    found[:25, 5] = 0.0
    return np.round(found[:steps] * 64) / 64


def listed(values: Any) -> Any:
    """As lists of floats of so many digits."""
    if np.ndim(values):
        return [listed(value) for value in values]
    return float(f"{float(values):.{DIGITS}g}")


def values(checkout: pathlib.Path) -> dict[str, Any]:
    # Here, because only those who make the values anew need it.
    import torch

    path = checkout / "galore_torch" / "SPAM.py"
    official = runpy.run_path(str(path))["AdamW"]
    inputs = gradients(120)
    found: dict[str, Any] = {
        "start": START,
        "gradients": inputs.tolist(),
        "clipped": {},
        "scales": {},
        "parameters": {},
    }
    for name, options in OPTIONS.items():
        weights = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
        clipped, scales, parameters = [], [], []
        # It prints as it goes.
        with contextlib.redirect_stdout(sys.stderr):
            optimizer = official([weights], lr=0.01, weight_decay=0.1, **options)
            for gradient in inputs:
                decay = optimizer.warmup.get_dr(optimizer.state["current_step"])
                scales.append(1.0 - decay)
                weights.grad = torch.tensor(gradient)
                optimizer.step()
                clipped.append(weights.grad.tolist())
                parameters.append(weights.detach().tolist())
        found["scales"][name] = listed(scales)
        if name != "short":
            found["clipped"][name] = listed(clipped)
        if name == "resets":
            found["parameters"][name] = listed(parameters)
    return found
