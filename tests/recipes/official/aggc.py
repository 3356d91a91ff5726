"""Clip three groups with the authors' code of AGGC.

Requires torch and a checkout of https://github.com/ZhiyuanLi218/AGGC. The code computes
norms in float32, so the gradients are multiples of 1/64, and its norms are saved too.
"""

from typing import Any

from tests.recipes.official.spam import START, gradients, listed

GROUPS = ("q_proj", "k_proj", "v_proj")
STEPS = 100
OPTIONS = {
    "shrink": {"high_mult": 0.6, "ema_beta": 0.95, "max_down_scale": 0.9},
    "both": {
        "low_mult": 0.5,
        "high_mult": 1.5,
        "raise_small": True,
        "max_up_scale": 1.1,
        "max_down_scale": 0.1,
    },
    "scheduled": {
        "low_mult": 0.98,
        "high_mult": 0.7,
        "raise_small": True,
        "bounds_schedule": "linear",
        "high_mult_late": 2.0,
        "low_mult_late": 0.5,
        "max_up_scale": 4.0,
    },
}


def values(checkout: Any) -> dict[str, Any]:
    import torch

    official = checkout.names_of("GRPO/verl/utils/grad_clip.py")
    inputs = gradients(STEPS)
    results: dict[str, Any] = {
        "norms": [],
        "scales": {},
    }
    for name, options in OPTIONS.items():
        parts = {group: torch.nn.Linear(2, 1, bias=False) for group in GROUPS}
        model = torch.nn.ModuleDict(parts).to(torch.float64)
        clipper = official["PerModuleGradClipper"](
            options=official["PerModuleGradNormOptions"](
                enable=True, auto_bounds=True, **options
            ),
            local_rank=1,  # Rank 0 writes files.
        )
        clipper.attach(model)
        clipper.on_train_begin(STEPS)
        norms, scales = [], []
        for step, gradient in enumerate(torch.tensor(inputs)):
            model.zero_grad()
            weights = torch.cat([p.flatten() for p in model.parameters()])
            assert weights.numel() == len(START)
            torch.sum(weights * gradient).backward()
            reports = clipper.on_before_optimizer_step(step)
            clipper.on_step_end(step)
            by_group = {report["module"]: report for report in reports}
            norms.append([by_group[group]["norm"] for group in GROUPS])
            scales.append([by_group[group]["scale"] for group in GROUPS])
        # Norms are computed before scaling, so they are the same for all options.
        results["norms"] = listed(norms)
        results["scales"][name] = listed(scales)
    return results
