"""The policies for NaN and inf, by the words that every clip takes as `nonfinite=`.

propagate   a non-finite norm makes all that share it NaN: loud, as in TensorFlow
zero        all that share a non-finite norm becomes zero
drop        non-finite entries become zero, the rest is measured and clipped as ever
raise       as propagate, and an error under `jax.experimental.checkify`
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from optclip import _leaves, _sparse

POLICIES = ("propagate", "zero", "drop", "raise")


def dropped(leaf: Any) -> Any:
    """The leaf with zeros for its non-finite entries."""
    x = _leaves.values(leaf)
    kept = jnp.where(_is_bad(leaf), jnp.zeros_like(x), x)
    return _sparse.with_data(leaf, kept) if _leaves.is_sparse(leaf) else kept


def flags(leaf: Any) -> Any:
    """1.0 where an entry is not finite: what `dropped` takes out of sight."""
    found = _is_bad(leaf).astype(jnp.float32)
    return _sparse.with_data(leaf, found) if _leaves.is_sparse(leaf) else found


def _is_bad(leaf: Any) -> jax.Array:
    """Where an entry, or the sum of a sparse leaf's duplicates, is not finite."""
    x = _leaves.values(leaf)
    bad = ~jnp.isfinite(x)
    if not _leaves.is_sparse(leaf) or not _sparse.has_duplicates(leaf):
        return bad
    rest = _sparse.with_data(leaf, jnp.where(bad, jnp.zeros_like(x), x))
    return bad | ~jnp.isfinite(_sparse.sums_at_entries(rest))


def check(paths: list[Any], leaves: list[Any]) -> None:
    """Under checkify, an error that names each leaf with a non-finite entry."""
    for path, leaf in zip(paths, leaves, strict=True):
        leaf = _sparse.summed(leaf) if _leaves.is_sparse(leaf) else leaf
        # A debug check is inert outside checkify; a plain one would break jit.
        checkify.debug_check(
            jnp.all(jnp.isfinite(_leaves.values(leaf))),
            f"non-finite update in the leaf '{_leaves.path_str(path)}'"
            " (nonfinite='raise')".replace("{", "{{").replace("}", "}}"),
        )
