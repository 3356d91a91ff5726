"""Clip gradients with DeepMind's code of AGC.

Requires a checkout of https://github.com/google-deepmind/deepmind-research. Names that
JAX and optax have removed are added back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Ranks for which both define the same units.
SHAPES = {"bias": (3,), "kernel": (4, 3), "conv": (2, 2, 2, 3)}
RATIOS = {"default": 0.01, "loose": 1.0}
STEPS = 8


def tree(rng: np.random.Generator, spread: float) -> dict[str, np.ndarray]:
    """Draw a tree whose units differ in size; about one leaf in four is zero."""
    leaves = {}
    for name, shape in SHAPES.items():
        scale = np.exp(spread * rng.normal(size=shape[-1:])) * (rng.random() > 0.25)
        leaves[name] = (scale * rng.normal(size=shape)).astype(np.float32)
    return leaves


def values(checkout: Any) -> dict[str, Any]:
    jax.__dict__["tree_map"] = jax.__dict__["tree_multimap"] = jax.tree.map
    optax.__dict__["ClipByGlobalNormState"] = optax.EmptyState
    official = checkout.names_of("nfnets/agc_optax.py")["adaptive_grad_clip"]
    rng = np.random.default_rng(0)
    params = [tree(rng, 2.0) for _ in range(STEPS)]
    gradients = [tree(rng, 3.0) for _ in range(STEPS)]
    results: dict[str, Any] = {"params": params, "gradients": gradients, "left": {}}
    for name, ratio in RATIOS.items():
        tx = official(ratio)
        results["left"][name] = [
            tx.update(jax.tree.map(jnp.asarray, g), tx.init(p), p)[0]
            for g, p in zip(gradients, params, strict=True)
        ]
    return jax.tree.map(lambda x: np.asarray(x).tolist(), results)
