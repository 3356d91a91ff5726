"""What the authors' own code of Stable-SPAM does to a sequence of gradients.

Their code is not kept here: https://github.com/TianjinYellow/StableSPAM, which needs
torch. `cut` is after its limit on elements, `scaled` after its norm as well. Each reset
also puts back its count of steps, which corrects the averages of both for their start.
"""

import pathlib
import runpy
from typing import Any

from tools.official.spam import START, gradients, listed

OPTIONS = {
    "plain": {"update_proj_gap": 0},
    "quick": {"update_proj_gap": 0, "gamma1": 0.85, "gamma2": 0.99, "gamma3": 0.9},
    "resets": {"update_proj_gap": 25},
}


def values(checkout: pathlib.Path) -> dict[str, Any]:
    # Here, because only those who make the values anew need it.
    import torch

    path = checkout / "galore_torch" / "stablespam.py"
    official = runpy.run_path(str(path))["StableSPAM"]
    inputs = gradients(60)
    found: dict[str, Any] = {
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
        # Without momentum, its first moment is the gradient as it was scaled.
        bare = official([probe], betas=(0.0, 0.999), **options)
        cut, scaled, parameters = [], [], []
        for gradient in inputs:
            weights.grad, probe.grad = torch.tensor(gradient), torch.tensor(gradient)
            # Held from before the step, as a reset puts another in its place.
            moment = bare.state[probe].get("exp_avg")
            optimizer.step()
            bare.step()
            moment = bare.state[probe]["exp_avg"] if moment is None else moment
            cut.append(weights.grad.tolist())
            scaled.append(moment.tolist())
            parameters.append(weights.detach().tolist())
        found["cut"][name] = listed(cut)
        found["scaled"][name] = listed(scaled)
        if name != "quick":
            found["parameters"][name] = listed(parameters)
    return found
