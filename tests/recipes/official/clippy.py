"""Shrink a few steps with TensorFlow Recommenders' code of Clippy.

Requires TensorFlow and a checkout of https://github.com/tensorflow/recommenders.
"""

from typing import Any

import numpy as np

OPTIONS = {
    "paper": {"relative": 0.5, "absolute": 0.01},
    "theirs": {"relative": 0.1, "absolute": 1e-7},
}
STEPS, SIZE = 24, 6


def values(checkout: Any) -> dict[str, Any]:
    folder = "tensorflow_recommenders/experimental/optimizers"
    names = checkout.names_of(f"{folder}/clippy_adagrad.py")
    official = names["shrink_by_references"]
    rng = np.random.default_rng(0)
    size = np.exp(rng.normal(-1.0, 1.0, size=(STEPS, 1)))
    steps = (size * rng.normal(size=(STEPS, SIZE))).astype(np.float32)
    params = rng.normal(0.0, 3.0, size=(STEPS, SIZE)).astype(np.float32)
    # Zero parameters, zero steps, and both.
    steps[::5, 0] = params[::7, 1] = steps[3] = params[4] = 0.0
    results: dict[str, Any] = {"steps": steps.tolist(), "params": params.tolist()}
    results["left"] = {
        name: [
            official(step, [w], [options["relative"]], options["absolute"])[0]
            .numpy()
            .tolist()
            for step, w in zip(steps, params, strict=True)
        ]
        for name, options in OPTIONS.items()
    }
    return results
