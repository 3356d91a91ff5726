"""Run the authors' code of SPAM on a sequence of gradients.

Requires torch and a checkout of https://github.com/TianjinYellow/SPAM-Optimizer.
`scales` are the factors on the updates after a reset.
"""

import contextlib
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
    """Return heavy-tailed gradients in multiples of 1/64.

    They have spikes, a step of zeros, and an element that is zero at first.
    """
    draws = np.random.default_rng(2).standard_t(2.5, size=(120, len(START)))
    draws[[29, 52, 84]] *= 1000.0
    draws[40] = 0.0
    draws[:25, 5] = 0.0
    return np.round(draws[:steps] * 64) / 64


def listed(values: Any) -> Any:
    """Convert to lists of floats with `DIGITS` digits."""
    if np.ndim(values):
        return [listed(value) for value in values]
    return float(f"{float(values):.{DIGITS}g}")


def values(checkout: Any) -> dict[str, Any]:
    import torch

    official = checkout.names_of("galore_torch/SPAM.py")["AdamW"]
    inputs = gradients(120)
    results: dict[str, Any] = {
        "gradients": inputs.tolist(),
        "clipped": {},
        "scales": {},
    }
    for name, options in OPTIONS.items():
        weights = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
        clipped, scales = [], []
        # The optimizer prints in every step.
        with contextlib.redirect_stdout(sys.stderr):
            optimizer = official([weights], lr=0.01, weight_decay=0.1, **options)
            for gradient in inputs:
                decay = optimizer.warmup.get_dr(optimizer.state["current_step"])
                scales.append(1.0 - decay)
                weights.grad = torch.tensor(gradient)
                optimizer.step()
                clipped.append(weights.grad.tolist())
        results["scales"][name] = listed(scales)
        if name != "short":
            results["clipped"][name] = listed(clipped)
    return results
