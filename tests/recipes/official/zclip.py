"""Clip a sequence of gradients with the authors' code of ZClip.

Requires torch and a checkout of https://github.com/bluorion-com/ZClip.
"""

import functools
from typing import Any

from tests.recipes.official.autoclip import norms_left

OPTIONS = {
    "default": {},
    "uncapped": {"max_grad_norm": None},
    "mean": {"clip_option": "mean", "max_grad_norm": None},
    "percentile": {"mode": "percentile", "max_grad_norm": None, "z_thresh": 1.0},
    "skip": {"skip_update_on_spike": True, "max_grad_norm": None, "alpha": 0.9},
}


def values(checkout: Any) -> dict[str, Any]:
    official = checkout.names_of("zclip/zclip.py")["ZClip"]

    def clip(model: Any, options: dict[str, Any]) -> Any:
        return functools.partial(official(**options).step, model)

    return norms_left(clip, OPTIONS)
