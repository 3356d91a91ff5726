"""Clip a sequence of gradients with the authors' code of ZClip.

Requires torch and a checkout of https://github.com/bluorion-com/ZClip.
"""

import pathlib
import runpy
from typing import Any

import numpy as np

from tests.support import rules

OPTIONS = {
    "default": {},
    "uncapped": {"max_grad_norm": None},
    "mean": {"clip_option": "mean", "max_grad_norm": None},
    "percentile": {"mode": "percentile", "max_grad_norm": None, "z_thresh": 1.0},
    "skip": {"skip_update_on_spike": True, "max_grad_norm": None, "alpha": 0.9},
}


def values(checkout: pathlib.Path) -> dict[str, Any]:
    import torch

    path = checkout / "zclip" / "zclip.py"
    official = runpy.run_path(str(path))["ZClip"]
    norms = rules.NORMS[np.isfinite(rules.NORMS)]
    results: dict[str, Any] = {"norms": norms.tolist(), "left": {}}
    for name, options in OPTIONS.items():
        clip = official(**options)
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        left = []
        for norm in norms:
            model.weight.grad = torch.tensor([[0.6 * norm, -0.8 * norm]])
            clip.step(model)
            left.append(float(model.weight.grad.norm()))
        results["left"][name] = left
    return results
