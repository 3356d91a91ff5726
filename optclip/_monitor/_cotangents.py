"""Convert the records of backward passes to a flat dict of scalars."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._arrays import _leaves
from .._typing import CotangentRecord, PyTree, is_cotangent_record

FIELDS = ("largest_norm", "mean_coefficient", "clipped", "fraction", "nonfinite")


def records_of(tree: PyTree) -> list[tuple[str, CotangentRecord]]:
    """Return the records in a tree with their paths, `cotangent` for an empty path."""
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_cotangent_record)
    return [
        (_leaves.path_str(path) or "cotangent", value)
        for path, value in pairs
        if is_cotangent_record(value)
    ]


def entries_of(record: CotangentRecord) -> dict[str, jax.Array]:
    """Return the metrics of one record, summed over its steps if it has several."""
    number = jnp.sum(record.cotangent_norms)
    largest = jnp.max(record.cotangent_norm, initial=0)
    # Adding the records of parallel chains also added their largest norms, so the
    # metric is NaN. It is computed, since a NaN constant would trip jax.debug_nans.
    is_known = jnp.all(record.cotangent_chains <= 1).astype(jnp.float32)
    clipped = jnp.sum(record.cotangent_clipped)
    return {
        "largest_norm": largest * (is_known / is_known),
        "mean_coefficient": jnp.sum(record.cotangent_coefficients) / number,
        "clipped": clipped.astype(jnp.int32),
        "fraction": clipped / number,
        "nonfinite": jnp.sum(record.cotangent_nonfinite).astype(jnp.int32),
    }
