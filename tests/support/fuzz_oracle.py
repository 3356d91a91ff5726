"""What the calls of the fuzzer must give, in NumPy float64, where a formula says it.

Covered are thresholds that are numbers, trees of finite real arrays, every scope but
units, the responses that have an oracle, `eps`, and masks that are bools or trees. For
matrices it is an SVD.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import fuzz, helpers, oracles

RESPONSES = {
    "hard": oracles.hard, "smooth": oracles.smooth, "normalize": oracles.normalized,
}  # fmt: skip
NORMS = ("l1", "l2", "rms", 2)
MATRICES = ("clip_by_spectral_norm", "clip_by_singular_value")
# They do not change what a finite tree becomes.
IRRELEVANT = {"nonfinite", "record", "name"}
TOLD = {
    "ord",
    "axis",
    "eps",
    "response",
    "mask",
    "clip_mask",
    "norm_mask",
    "over",
    "norm",
    "lower",
    "upper",
}


def is_plain(tree: Any) -> bool:
    """Whether there are numbers in a tree, all of them finite and in real arrays."""
    leaves = [x for x in jax.tree.leaves(tree) if not isinstance(x, (bool, int))]
    if not all(hasattr(x, "dtype") for x in leaves):
        return False
    # These count in a norm too, but have no oracle here.
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves):
        return False
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    finite = [np.all(np.isfinite(helpers.as_float64(x))) for x in floating]
    return bool(finite) and all(finite)


def formula(name: str, tree: Any, arguments: Any, options: Any) -> list[Any] | None:
    """The floating leaves that the clip must give; None if no oracle covers the call."""
    given = {k: v for k, v in options.items() if k not in IRRELEVANT}
    if given.pop("strict", False) or given.keys() - TOLD or not is_plain(tree):
        return None
    if given.get("norm", "l2") not in NORMS:
        return None
    if name == "clip_by_value" and not arguments:
        arguments = [given.pop(side, None) for side in ("lower", "upper")]
    bounds = arguments if name != "clip_by_group_norm" else arguments[:1]
    if not all(isinstance(c, (int, float, np.floating)) for c in bounds):
        return None
    leaves = floating(tree)
    if name in MATRICES:
        return _by_matrix(name, leaves, float(bounds[0]), given)
    if name == "clip_by_value" or given.get("over") == "element":
        if given.keys() - {"over"}:
            return None
        low, high = (-bounds[0], bounds[0]) if len(bounds) == 1 else bounds
        return [oracles.by_value(x, float(low), float(high)) for _, x in leaves]
    if "axis" in given and given["axis"] is not None:
        return _by_slice(name, leaves, float(bounds[0]), given)
    return _by_block(name, leaves, float(bounds[0]), arguments[1:], given)


def norm(tree: Any, options: Any) -> float | None:
    """The global norm of a tree; None if no oracle covers it."""
    if options.keys() - {"ord"} or not is_plain(tree):
        return None
    return oracles.tree_norm([x for _, x in floating(tree)], options.get("ord") or 2.0)


def floating(tree: Any) -> list[tuple[Any, np.ndarray]]:
    """The paths of the floating leaves, and these as XLA sees them, in float64."""
    return jax.tree.leaves_with_path(helpers.as_xla_sees(tree))


def _by_matrix(name: str, leaves: Any, limit: float, given: Any) -> list[Any] | None:
    taken = [_told(given.get("mask"), path) for path, _ in leaves]
    if given.keys() - {"mask", "response"} or None in taken:
        return None
    # A threshold counts as 0 below the first, a norm as inf far above the second.
    largest = max((np.max(np.abs(x), initial=0) for _, x in leaves), default=0)
    if 0 < limit < 2.0**-60 or largest > 1e30:
        return None
    response = given.get("response", "hard")
    if name == "clip_by_spectral_norm":
        known, oracle = ("hard",), oracles.by_matrix
    else:
        # Others make more of what float32 leaves in place of a zero.
        known = ("hard",) if math.isinf(limit) else ("hard", "smooth")
        kept = RESPONSES.get(response)
        oracle = functools.partial(oracles.by_singular_value, response=kept)
    if response not in known:
        return None
    found = [oracle(x, limit) for _, x in leaves]
    pairs = zip(found, leaves, taken, strict=True)
    return [clipped if mine else x for clipped, (_, x), mine in pairs]


def _by_slice(name: str, leaves: Any, limit: float, given: Any) -> list[Any] | None:
    axis = np.ravel(given["axis"])
    if given.keys() - {"ord", "axis"} or len(axis) != 1:
        return None

    def clipped(x: np.ndarray) -> np.ndarray:
        if not x.size:
            return x
        first = np.moveaxis(x, axis[0], 0)
        measure = _measure(name, given)
        (found,) = oracles.by_first_axis([first], limit, measure)
        return np.moveaxis(found, 0, axis[0])

    return [clipped(x) for _, x in leaves]


def _by_block(
    name: str, leaves: Any, limit: float, groups: Any, given: Any
) -> list[Any] | None:
    response = RESPONSES.get(given.get("response", "hard"))
    if response is None or (math.isinf(limit) and response is not oracles.hard):
        return None
    labels = _labels(name, leaves, groups, given.get("over", "tree"))
    taken, counts, scales = (
        [_told(given.get(key), path) for path, _ in leaves]
        for key in ("mask", "norm_mask", "clip_mask")
    )
    if labels is None or None in (*taken, *counts, *scales):
        return None
    counts = [a and b for a, b in zip(taken, counts, strict=True)]
    scales = [a and b for a, b in zip(taken, scales, strict=True)]
    out = []
    for label, (_, x), scaled in zip(labels, leaves, scales, strict=True):
        members = zip(labels, counts, leaves, strict=True)
        parts = [
            np.ravel(y) for k, counted, (_, y) in members if k == label and counted
        ]
        n = _measure(name, given)(np.concatenate(parts) if parts else np.zeros(0))
        factor = response(n + given.get("eps", 0.0), limit) if n else 1.0
        out.append(x * factor if scaled and label is not None else x)
    return out


def _measure(name: str, given: Any) -> Any:
    p = given.get("ord") or 2.0
    if given.get("norm") == "l1":
        p = 1.0
    if name == "clip_by_rms" or given.get("norm") == "rms":
        return oracles.rms
    if name == "clip_by_average_norm":
        return oracles.average_norm
    return lambda x: oracles.norm(x, p)


def _labels(name: str, leaves: Any, groups: Any, over: Any) -> list[Any] | None:
    """For each leaf what it shares a norm with."""
    if name == "clip_by_global_norm" or (name == "clip_by" and over == "tree"):
        return ["all"] * len(leaves)
    if name != "clip_by_group_norm":
        plain = name != "clip_by" or over == "leaf"
        return list(range(len(leaves))) if plain else None
    if groups[0] is fuzz.APART:
        return list(range(len(leaves)))
    if groups[0] is fuzz.TOGETHER:
        return ["all"] * len(leaves)
    labels = [_entry(groups[0], path) for path, _ in leaves]
    return None if any(callable(label) for label in labels) else labels


def _told(mask: Any, path: Any) -> bool | None:
    if mask is None:
        return True
    found = _entry(mask, path)
    return found if isinstance(found, bool) else None


def _entry(prefix: Any, path: Any) -> Any:
    """What a prefix tree of one level says of a leaf."""
    if isinstance(prefix, dict):
        return prefix[path[0].key]
    return prefix[path[0].idx] if isinstance(prefix, tuple) else prefix
