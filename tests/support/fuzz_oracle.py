"""Compute the output of drawn clipping calls in NumPy float64.

Covered are numbers as thresholds, finite real trees, masks of bools, and the scopes of
elements, leaves, groups, the whole tree and slices along one axis.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import helpers, oracles, strategies

RESPONSES = {
    "hard": oracles.hard,
    "smooth": oracles.smooth,
    "normalize": oracles.normalized,
}
# Smaller norms and thresholds count as 0, and larger norms are not finite; see
# docs/numerics.md.
LEAST = 2.0**-60
LARGEST = float(np.finfo(np.float32).max)
# Options that do not change the output of a finite tree.
IRRELEVANT = {"nonfinite", "record", "name"}
MASKS = ("mask", "norm_mask", "clip_mask")
COVERED = {"ord", "axis", "eps", "response", "over", "norm", "lower", "upper", *MASKS}


def is_finite(tree):
    """Return whether a tree has floating leaves, all of them real and finite."""
    leaves = [x for x in jax.tree.leaves(tree) if not isinstance(x, (bool, int))]
    if not all(hasattr(x, "dtype") for x in leaves):
        return False
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    return bool(floating) and all(
        not jnp.iscomplexobj(x) and np.all(np.isfinite(helpers.as_float64(x)))
        for x in floating
    )


def formula(name, tree, arguments, options):
    """Return the expected floating leaves, or None if no formula covers the call."""
    name = name.removeprefix("functional.")
    options = {k: v for k, v in options.items() if k not in IRRELEVANT}
    if options.pop("strict", False) or options.keys() - COVERED or not is_finite(tree):
        return None
    if name == "clip_by_value":
        sides = [options.pop(side, None) for side in ("lower", "upper")]
        limits = arguments or sides
    else:
        limits = arguments[:1]
    if not all(isinstance(c, (int, float, np.floating)) for c in limits):
        return None
    leaves = jax.tree.leaves_with_path(helpers.as_xla_sees(tree))
    if name == "clip_by_value" or options.get("over") == "element":
        low, high = limits if len(limits) == 2 else (-limits[0], limits[0])
        plain = not options.keys() - {"over"}
        return [oracles.by_value(x, low, high) for _, x in leaves] if plain else None
    # For larger norms, the ratio of threshold to norm may be flushed to zero.
    if sum(np.sum(np.abs(x)) for _, x in leaves) > 2.0**120:
        return None
    limit = float(limits[0]) if limits[0] >= LEAST else 0.0
    if options.get("axis") is not None:
        return _by_slice(name, leaves, limit, options)
    return _by_block(name, leaves, limit, arguments[1:], options)


def _by_slice(name, leaves, limit, options):
    axis = np.ravel(options["axis"])
    if options.keys() - {"ord", "axis"} or len(axis) != 1:
        return None
    measure = _measure(name, options)

    def clip(x):
        first = np.moveaxis(x, axis[0], 0)
        clipped = oracles.by_first_axis(first, limit, measure) if x.size else first
        return np.moveaxis(clipped, 0, axis[0])

    return [clip(x) for _, x in leaves]


def _by_block(name, leaves, limit, groups, options):
    response = RESPONSES.get(options.get("response", "hard"))
    labels = _labels(name, leaves, groups, options.get("over", "tree"))
    masks = [[_at(options.get(k, True), path) for path, _ in leaves] for k in MASKS]
    has_bools = all(isinstance(value, bool) for mask in masks for value in mask)
    no_limit = math.isinf(limit) and response is not oracles.hard
    measure = _measure(name, options)
    if None in (response, labels, measure) or no_limit or not has_bools:
        return None
    clipped = []
    rows = list(zip(labels, leaves, *masks, strict=True))
    for label, (_, x), is_taken, _, is_scaled in rows:
        members = [y.ravel() for k, (_, y), a, b, _ in rows if k == label and a and b]
        norm = measure(np.concatenate(members)) if members else 0.0
        eps = options.get("eps", 0.0)
        factor = response(norm + eps, limit) if norm >= LEAST else np.sign(limit)
        is_clipped = is_taken and is_scaled and label is not None
        clipped.append(x * factor if is_clipped else x)
    return clipped


def _measure(name, options):
    """Return the norm of a block, or None if no formula covers it."""
    if "spectral" in name or "singular" in name:
        return None
    if name == "clip_by_average_norm":
        return oracles.average_norm
    if name == "clip_by_rms" or options.get("norm") == "rms":
        return oracles.rms
    orders = {"l1": 1.0, "l2": 2.0, None: options.get("ord") or 2.0}
    order = orders[options.get("norm")]
    return lambda x: oracles.norm(x, order)


def _labels(name, leaves, groups, over):
    """Return the label of each leaf's block, or None if no formula covers the scope."""
    if name == "clip_by_group_norm":
        (groups,) = groups
        if callable(groups):
            over = "leaf" if groups is strategies.APART else "tree"
        else:
            return [_at(groups, path) for path, _ in leaves]
    elif name not in ("clip_by", "clip_by_global_norm"):
        over = "leaf"
    if over == "tree":
        return ["all"] * len(leaves)
    return list(range(len(leaves))) if over == "leaf" else None


def _at(prefix, path):
    """Return the value for a leaf in a prefix tree of one level."""
    return prefix[path[0].key] if isinstance(prefix, dict) else prefix
