"""Compute the output of drawn clipping calls in NumPy float64.

Covered are numbers as thresholds, finite real trees, masks of bools, and the scopes of
elements, leaves and the whole tree. The contracts test the other scopes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import helpers, oracles

RESPONSES = {
    "hard": oracles.hard,
    "smooth": oracles.smooth,
    "normalize": oracles.normalized,
}
# Smaller norms and thresholds count as 0; see docs/numerics.md.
LEAST = 2.0**-60
# Options that do not change the output of a finite tree.
IRRELEVANT = {"nonfinite", "record", "name"}
MASKS = ("mask", "norm_mask", "clip_mask")
COVERED = {"ord", "eps", "response", "over", "norm", "lower", "upper", *MASKS}
# The scopes of functions without `over=`; None for those that are not covered.
OVER = {
    "clip_by": "tree",
    "clip_by_global_norm": "tree",
    "clip_by_norm": "leaf",
    "clip_by_rms": "leaf",
    "clip_by_value": "element",
}


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
    over = options.pop("over", OVER.get(name))
    limits = arguments or [options.pop("lower", None), options.pop("upper", None)]
    if not all(isinstance(c, (int, float, np.floating)) for c in limits):
        return None
    leaves = jax.tree.leaves_with_path(helpers.as_xla_sees(tree))
    if over == "element" and not options:
        low, high = limits if len(limits) == 2 else (-limits[0], limits[0])
        return [oracles.by_value(x, low, high) for _, x in leaves]
    # For larger norms, the ratio of threshold to norm may be flushed to zero.
    is_large = sum(np.sum(np.abs(x)) for _, x in leaves) > 2.0**120
    if over not in ("tree", "leaf") or is_large:
        return None
    limit = float(limits[0]) if limits[0] >= LEAST else 0.0
    if name == "clip_by_rms":
        options["norm"] = "rms"
    return _by_block(leaves, over, limit, **options)


def _by_block(
    leaves, over, limit, *, ord=None, norm=None, eps=0.0, response="hard", **masks
):
    """Clip blocks of leaves, each by its norm."""
    apply = RESPONSES.get(response)
    is_in = [[_at(masks.get(k, True), path) for path, _ in leaves] for k in MASKS]
    has_bools = all(isinstance(value, bool) for mask in is_in for value in mask)
    if apply is None or not has_bools or (math.isinf(limit) and response != "hard"):
        return None
    order = {"l1": 1.0, "l2": 2.0, None: ord or 2.0}.get(norm)
    clipped = []
    rows = list(zip(leaves, *is_in, strict=True))
    for row in rows:
        (_, x), is_taken, _, is_scaled = row
        block = rows if over == "tree" else [row]
        members = [
            y.ravel() for (_, y), taken, counted, _ in block if taken and counted
        ]
        y = np.concatenate(members) if members else np.zeros(0)
        size = oracles.rms(y) if norm == "rms" else oracles.norm(y, order)
        factor = apply(size + eps, limit) if size >= LEAST else np.sign(limit)
        clipped.append(x * factor if is_taken and is_scaled else x)
    return clipped


def _at(prefix, path):
    """Return the value for a leaf in a prefix tree of one level."""
    return prefix[path[0].key] if isinstance(prefix, dict) else prefix
