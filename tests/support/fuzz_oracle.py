"""Compute the output of drawn clipping calls in NumPy float64.

It covers numbers as thresholds, finite real trees, and one norm per element, per leaf or
for the whole tree, with any order, response and eps.
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
ORDERS = {"l1": 1.0, "l2": 2.0}
# Smaller norms and thresholds count as 0; see docs/numerics.md.
LEAST = 2.0**-60
# Options that do not change the output of a finite tree.
IRRELEVANT = {"nonfinite", "record", "name"}
COVERED = {"ord", "eps", "response", "over", "norm", "lower", "upper"}
# The scopes of functions without `over=`.
OVER = {
    "clip_by": "tree",
    "clip_by_global_norm": "tree",
    "clip_by_norm": "leaf",
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
    leaves = jax.tree.leaves(helpers.as_xla_sees(tree))
    if over == "element" and not options:
        low, high = limits if len(limits) == 2 else (-limits[0], limits[0])
        return [oracles.by_value(x, low, high) for x in leaves]
    order = options.get("ord") or ORDERS.get(options.get("norm", "l2"))
    response = RESPONSES.get(options.get("response", "hard"))
    # For larger norms, the ratio of threshold to norm may be flushed to zero.
    is_large = sum(np.sum(np.abs(x)) for x in leaves) > 2.0**120
    no_limit = math.isinf(limits[0]) and response is not oracles.hard
    if (
        over not in ("tree", "leaf")
        or None in (order, response)
        or is_large
        or no_limit
    ):
        return None
    limit = float(limits[0]) if limits[0] >= LEAST else 0.0

    def factor(values):
        norm = oracles.norm(values, order)
        bent = response(norm + options.get("eps", 0.0), limit)
        return bent if norm >= LEAST else np.sign(limit)

    if over == "leaf":
        return [x * factor(x) for x in leaves]
    shared = factor(np.concatenate([x.ravel() for x in leaves]))
    return [x * shared for x in leaves]
