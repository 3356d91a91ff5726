"""Run the authors' code of Stable-SPAM on a sequence of gradients.

Requires torch and a checkout of https://github.com/TianjinYellow/StableSPAM. `cut` is
the gradient after clipping elements, and `scaled` after scaling by the norm too. A
reset also resets the step count of the bias correction of both averages.
"""

import pathlib
import runpy
from typing import Any

from tests.recipes.official.spam import START, gradients, listed

OPTIONS = {
    "plain": {"update_proj_gap": 0},
    "quick": {"update_proj_gap": 0, "gamma1": 0.85, "gamma2": 0.99, "gamma3": 0.9},
    "resets": {"update_proj_gap": 25},
}


def values(checkout: pathlib.Path) -> dict[str, Any]:
    import torch

    path = checkout / "galore_torch" / "stablespam.py"
    official = runpy.run_path(str(path))["StableSPAM"]
    inputs = gradients(60)
    results: dict[str, Any] = {
        "start": START,
        "gradients": inputs.tolist(),
        "cut": {},
        "scaled": {},
        "parameters": {},
    }
    for name, options in OPTIONS.items():
        weights = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
        probe = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
        optimizer = official([weights], lr=0.01, weight_decay=0.1, **options)
        # Without momentum, the first moment is the scaled gradient.
        bare = official([probe], betas=(0.0, 0.999), **options)
        cut, scaled, parameters = [], [], []
        for gradient in inputs:
            weights.grad, probe.grad = torch.tensor(gradient), torch.tensor(gradient)
            # Read before the step, since a reset replaces the moment.
            moment = bare.state[probe].get("exp_avg")
            optimizer.step()
            bare.step()
            moment = bare.state[probe]["exp_avg"] if moment is None else moment
            cut.append(weights.grad.tolist())
            scaled.append(moment.tolist())
            parameters.append(weights.detach().tolist())
        results["cut"][name] = listed(cut)
        results["scaled"][name] = listed(scaled)
        if name != "quick":
            results["parameters"][name] = listed(parameters)
    return results
