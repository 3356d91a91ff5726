"""optax's clipping functions and its norm, by optclip."""

import jax
import jax.numpy as jnp
import optax

import optclip
from optclip import functional, per_example

FILES = (
    "optax/_src/float64_test.py",
    "optax/contrib/_privacy_test.py",
    "optax/schedules/_inject_test.py",
    "optax/transforms/_clipping_test.py",
    "optax/transforms/_monitoring_test.py",
    "optax/tree_utils/_tree_math_test.py",
)
# `tree_l` are norms of trees; `overriding` injects the threshold.
SELECT = (
    "(clip or monitoring or overriding or privacy or tree_l)"
    " and not tree_clip and not unitwise"
)
PASSED = 35
KNOWN = {
    "test_clip_by_block_rms": "Off by one rounding; optax's own clipping fails too.",
    "test_per_example_global_norm_clip": "Integer leaves raise, as nothing bounds them.",
}


def clip(max_delta):
    return optclip.clip_by_value(max_delta)


def clip_by_block_rms(threshold):
    return optclip.clip_by_rms(threshold)


def clip_by_global_norm(max_norm):
    return optclip.clip_by_global_norm(max_norm)


def adaptive_grad_clip(clipping, eps=1e-3, axis=None):
    axis_of_leaf = None if axis is None else lambda path, shape: axis
    return optclip.recipes.agc(clipping, eps, axis=axis_of_leaf)


def per_example_global_norm_clip(grads, l2_norm_clip):
    clipped, info = per_example.clipped_sum(grads, l2_norm_clip, strict=False)
    return clipped, jnp.sum(info.norms > l2_norm_clip)


def per_example_layer_norm_clip(grads, global_l2_norm_clip, uniform=True):
    leaves = jax.tree.leaves(grads)
    size = sum(leaf[0].size for leaf in leaves)

    def threshold(leaf):
        fraction = 1 / len(leaves) if uniform else leaf[0].size / size
        return global_l2_norm_clip * fraction**0.5

    thresholds = jax.tree.map(threshold, grads)
    clipped, info = per_example.clipped_sum(
        grads, thresholds, over="leaf", strict=False
    )
    counts = jax.tree.map(lambda n, c: jnp.sum(n > c), info.norms, thresholds)
    return clipped, counts


def norm(tree, ord=None, squared=False):
    result = functional.global_norm(tree, ord=ord)
    return result**2 if squared else result


OWNERS = (
    (optax, clip),
    (optax, clip_by_block_rms),
    (optax, clip_by_global_norm),
    (optax, adaptive_grad_clip),
    (optax, per_example_global_norm_clip),
    (optax, per_example_layer_norm_clip),
    (optax.tree, norm),
)
