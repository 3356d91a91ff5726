"""Benchmark `scopes`: clipping over other scopes and with learned thresholds.

Scopes are measured on the tree of GPT-2 alone and compared with global-norm clipping.
Rules are measured in an AdamW step whose gradients never change, so the result is
known: a rule over past norms does not clip them, and a rule in its warm-up clips them
like a fixed threshold.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from benchmarks import exact, step, trees
from benchmarks.donated_buffers import DonatedTree
from benchmarks.stepping import Stepping
from benchmarks.timing import Row, race
from optclip import recipes, thresholds

GROUPS = 3
LONG = 1_000_000  # a warm-up that no benchmark leaves
# Clips nothing. With inf, XLA would remove the clipping from the program.
FAR = 1e30


def rows(tiny: bool) -> Iterator[Row]:
    shapes = trees.workloads(tiny)["gpt2"]
    rounds = 2 if tiny else 15
    for dtype in ("float32",) if tiny else ("float32", "bfloat16"):
        source = trees.numbers(shapes, dtype)
        for row in _scopes(source, rounds):
            yield {"what": "clipping alone", "dtype": dtype, **row}
        for row in _rules(source, rounds):
            yield {"what": "AdamW step", "dtype": dtype, **row}
    for shape in [(16, 24)] if tiny else [(512, 512), (768, 3072), (1024, 1024)]:
        for row in _matrices(shape, rounds):
            yield {"what": "{} x {}".format(*shape), "dtype": "float32", **row}


def _scopes(source: Any, rounds: int) -> list[Row]:
    donated, arrays = DonatedTree(source), jax.tree.leaves(source)
    contenders = {
        name: donated.clip(tx, exact.clip_error(arrays, factors(arrays, arrays)))
        for name, (tx, factors) in clips(source).items()
    }
    return race(contenders, rounds, against="optclip, global norm")


def clips(source: Any) -> step.Clips:
    """Build clipping by scope, with thresholds at half the smallest norm or less."""
    leaves, structure = jax.tree.flatten(source)
    sizes = [x.size for x in leaves]
    leaf = math.sqrt(min(sizes)) / 2
    axis = math.sqrt(min(x.shape[-1] for x in leaves)) / 2
    group = math.sqrt(min(sum(sizes[i::GROUPS]) for i in range(GROUPS))) / 2
    names = [f"group {i % GROUPS}" for i in range(len(leaves))]
    labels = structure.unflatten(names)
    whole = exact.FRACTION * math.sqrt(sum(sizes))
    by_labels = optax.partition(
        {name: optax.clip_by_global_norm(group) for name in set(names)}, labels
    )
    by_whole = exact.by(whole, exact.global_norm)
    by_leaf = exact.by(leaf, exact.leaf_norms)
    by_axis = exact.by(axis, partial(exact.slice_norms, axis=-1))
    by_rms, by_value = (exact.by(0.5, f) for f in (exact.leaf_rms, exact.magnitudes))
    by_group = exact.by(group, partial(exact.group_norms, count=GROUPS))
    return {
        "optclip, global norm": (optclip.clip_by_global_norm(whole), by_whole),
        "optclip, per leaf": (optclip.clip_by_norm(leaf), by_leaf),
        "optclip, per last axis": (optclip.clip_by_norm(axis, axis=-1), by_axis),
        "optclip, RMS": (optclip.clip_by_rms(0.5), by_rms),
        "optax, RMS": (optax.clip_by_block_rms(0.5), by_rms),
        "optclip, per group": (optclip.clip_by_group_norm(group, labels), by_group),
        "optax, per group": (by_labels, by_group),
        "optclip, value": (optclip.clip_by_value(0.5), by_value),
        "optax, value": (optax.clip(0.5), by_value),
    }


def _matrices(shape: tuple[int, int], rounds: int) -> list[Row]:
    source = trees.numbers(shape, "float32")
    u, values, v = np.linalg.svd(source.astype(np.float64), full_matrices=False)
    limit, donated = float(values[0]) / 2, DonatedTree(source)
    capped = (u * np.minimum(values, limit)) @ v

    def error(tree: Any) -> float:
        """Return the spectral error minus the documented tolerance."""
        relative = np.linalg.norm(np.asarray(tree) - capped, 2) / limit
        return float(np.maximum(0.0, relative - 1e-4))

    contenders = {}
    for method in ("eigh", "newton_schulz"):
        tx = optclip.clip_by_singular_value(limit, method=method)
        contenders[f"optclip, singular values, {method}"] = donated.clip(tx, error)
    for method in ("exact", "power_iteration"):
        tx = optclip.clip_by_spectral_norm(limit, method=method)
        contenders[f"optclip, spectral norm, {method}"] = donated.clip(
            tx, lambda _: 0.0
        )
    polar = optclip.clip_by_singular_value(
        limit, response="normalize", method="newton_schulz"
    )
    contenders["optclip, orthogonalization"] = donated.clip(polar, lambda _: 0.0)
    muon = optax.contrib.scale_by_muon()
    contenders["optax, muon"] = donated.clip(muon, lambda _: 0.0)
    return race(contenders, rounds, against="optax, muon")


def _rules(source: Any, rounds: int) -> list[Row]:
    gradients = jax.device_put(source)
    stepping = Stepping(
        gradients,
        step.OPTIMIZERS["adamw"](),
        step.SOURCES["made"],
        gradients,
        jnp.ones(()),
    )
    limit = exact.FRACTION * trees.exact_norm(jax.tree.leaves(source))
    contenders = {
        name: stepping.contender(*each) for name, each in rules(limit).items()
    }
    return race(contenders, rounds, against="optclip, fixed")


def rules(limit: float) -> step.Clips:
    """Build a fixed threshold and the rules with their default windows."""
    tree, leaf = optclip.clip_by_global_norm, optclip.clip_by_norm
    fixed = exact.by(limit, exact.global_norm)
    zscore = thresholds.zscore(warmup=LONG, max_norm=limit)
    ema = thresholds.ema(warmup=LONG, max_norm=limit)
    return {
        "unclipped": (optax.identity(), exact.unclipped),
        "optclip, fixed": (tree(limit), fixed),
        "optclip, fixed, per leaf": (leaf(FAR), exact.unclipped),
        "optclip, autoclip": (recipes.autoclip(), exact.unclipped),
        "optclip, mean_std_clip": (recipes.mean_std_clip(), exact.unclipped),
        "optclip, zclip": (tree(zscore), fixed),
        "optclip, adagc": (leaf(ema), fixed),
    }
