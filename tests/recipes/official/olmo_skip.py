"""Record which steps OLMo-core's code skips in sequences of losses and norms.

Requires torch and a checkout of https://github.com/allenai/OLMo-core. A single file
runs, with substitutes for two helpers that it imports.
"""

import sys
import types
from typing import Any

import numpy as np

OPTIONS = {
    "default": {},
    "short": {"rolling_interval_length": 20, "sigma_factor": 3},
    "shortest": {"rolling_interval_length": 6, "sigma_factor": 2},
}
SEQUENCES = ("losses", "norms")


def sequences(steps: int) -> dict[str, np.ndarray]:
    """Return decreasing losses and stationary norms, both with spikes.

    All are multiples of 1/1024.
    """
    rng = np.random.default_rng(3)
    losses = 4.0 * np.exp(-np.arange(steps) / 60) + 0.1 * rng.standard_normal(steps)
    norms = np.abs(rng.standard_t(2.5, size=steps)) + 0.5
    losses[[30, 100, 101]] += 40.0
    norms[[45, 90, 130]] *= 200.0
    # A constant stretch with a single larger loss.
    losses[70:90], norms[70:90] = 1.0, 1.0
    losses[88] += 0.5
    rounded = np.round(np.stack([losses, norms]) * 1024) / 1024
    return dict(zip(SEQUENCES, rounded, strict=True))


def values(checkout: Any) -> dict[str, Any]:
    import torch

    helpers = types.ModuleType("olmo_core.utils")
    helpers.__dict__["get_default_device"] = lambda: torch.device("cpu")
    helpers.__dict__["move_to_device"] = lambda tensor, device: tensor.to(device)
    sys.modules["olmo_core"] = types.ModuleType("olmo_core")
    sys.modules["olmo_core.utils"] = helpers
    names = checkout.names_of("src/olmo_core/optim/skip_step_optimizer.py")
    official = names["SkipStepOptimizer"]

    inputs = sequences(150)
    results: dict[str, Any] = {name: inputs[name].tolist() for name in SEQUENCES}
    results["skipped"] = {}
    for name, options in OPTIONS.items():
        optimizer = official([torch.nn.Parameter(torch.zeros(6))], {}, **options)
        skipped = []
        for loss, norm in zip(*(inputs[name] for name in SEQUENCES), strict=True):
            optimizer.latest_loss = torch.tensor(loss)
            optimizer.latest_grad_norm = torch.tensor(norm)
            skipped.append(bool(optimizer.step_skipped))
        results["skipped"][name] = skipped
    return results
