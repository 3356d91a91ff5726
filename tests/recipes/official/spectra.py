"""Train parameters with the authors' code of SPECTRA around torch's AdamW.

Requires torch and a checkout of https://github.com/mlolab/llm-spectral-clipping.
Kernels are `(outputs, inputs)` there. The authors' training loop clips gradients; here
the same two functions of theirs do. A leaf with three axes stands for a stack of
layers, each of which is a matrix in their code.
"""

import importlib
import sys
from typing import Any

import numpy as np

STEPS, WARMUP, DECAY = 240, 40, 60
RATE, B2, WEIGHT_DECAY, MAX_GRADIENT = 0.02, 0.95, 0.1, 0.1
SHOWN = (20, 40, 120, 200, 240)
SHAPES = {
    "kernel": (5, 3), "narrow": (2, 4), "embed": (5, 2), "layers": (2, 3, 2),
    "bias": (8,),
}  # fmt: skip
WARMED_UP = {"apply_to": "all", "clip_c": 0.8, "warmup_steps": WARMUP, "base_lr": RATE}
DECAYED = {"total_steps": STEPS, "clip_decay_fract": 0.25, "clip_final_scale": 0.4}
OPTIONS = {
    "matrices": {},
    "all": {"apply_to": "all", "clip_c": 0.4},
    "linear": {**WARMED_UP, **DECAYED, "clip_decay_type": "linear"},
    "gradients": {**WARMED_UP, **DECAYED, "clip_decay_type": "cosine"},
}


def rate(step: Any) -> Any:
    """Return the learning rate: a warm-up, a constant and a decay to 0, as theirs."""
    return RATE * np.clip(step / WARMUP, 0, 1) * np.clip((STEPS - step) / DECAY, 0, 1)


def gradients() -> dict[str, np.ndarray]:
    """Return the gradients of all steps: waves with spikes, by a formula."""
    waves = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        x = np.arange(1, 1 + STEPS * np.prod(shape), dtype=np.float64)
        waves[name] = np.sin(x * x * (0.37 + 0.1 * i)).reshape(STEPS, *shape)
        waves[name] += 0.5 * np.cos(np.arange(waves[name].size)).reshape(STEPS, *shape)
        waves[name][[29, 150]] *= 100.0
    # Steps with a norm above c. Their code does not clip vectors of smaller norms,
    # while optclip clips them smoothly.
    waves["bias"] = 1.0 + 0.2 * np.sin(waves["bias"])
    return waves


def start() -> dict[str, np.ndarray]:
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    return {k: np.cos(np.arange(n)).reshape(SHAPES[k]) for k, n in sizes.items()}


def values(checkout: Any) -> dict[str, Any]:
    import torch

    # Compilation is slow and does not change the results.
    torch.compile = lambda function: function
    sys.path.insert(0, str(checkout.folder / "src"))
    clip = importlib.import_module("optim.post_process").clip_sigvals
    official = importlib.import_module("optim.spectra").SPECTRA
    tensors = {k: torch.tensor(x) for k, x in gradients().items()}
    results: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        params = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in start().items()}
        adam = torch.optim.AdamW(
            params.values(), betas=(0.9, B2), weight_decay=WEIGHT_DECAY
        )
        tx = official(adam, ns_float32=True, **options)
        constant = {**options, "clip_c": MAX_GRADIENT, "clip_decay_type": "constant"}
        before = official(adam, **constant)
        results[name] = {k: [] for k in SHAPES}
        for step in range(STEPS):
            now = adam.param_groups[0]["lr"] = float(rate(step))
            before._step_count = step
            for k, p in params.items():
                p.grad = tensors[k][step].clone()
                if name == "gradients" and p.ndim > 1:
                    c = before._get_current_clip_c(now)
                    p.grad = clip(p.grad, clip_c=c, use_float32=True)
            tx.step()
            if step + 1 in SHOWN:
                for k, p in params.items():
                    results[name][k].append(np.round(p.detach(), 9).tolist())
    return results
