"""Run the authors' code of Stable-SPAM on a sequence of gradients.

Requires torch and a checkout of https://github.com/TianjinYellow/StableSPAM. `cut` is
the gradient after clipping elements, and `scaled` after scaling by the norm too.
"""

from typing import Any

from tests.recipes.official.spam import START, gradients, listed

OPTIONS = {
    "plain": {"update_proj_gap": 0},
    "quick": {"update_proj_gap": 0, "gamma1": 0.85, "gamma2": 0.99, "gamma3": 0.9},
}


def values(checkout: Any) -> dict[str, Any]:
    import torch

    official = checkout.names_of("galore_torch/stablespam.py")["StableSPAM"]
    inputs = gradients(60)
    results: dict[str, Any] = {
        "gradients": inputs.tolist(),
        "cut": {},
        "scaled": {},
    }
    for name, options in OPTIONS.items():
        weights = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
        probe = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
        optimizer = official([weights], lr=0.01, weight_decay=0.1, **options)
        # Without momentum, the first moment is the scaled gradient.
        bare = official([probe], betas=(0.0, 0.999), **options)
        cut, scaled = [], []
        for gradient in inputs:
            weights.grad, probe.grad = torch.tensor(gradient), torch.tensor(gradient)
            # Read before the step, since a reset replaces the moment.
            moment = bare.state[probe].get("exp_avg")
            optimizer.step()
            bare.step()
            moment = bare.state[probe]["exp_avg"] if moment is None else moment
            cut.append(weights.grad.tolist())
            scaled.append(moment.tolist())
        results["cut"][name] = listed(cut)
        results["scaled"][name] = listed(scaled)
    return results
