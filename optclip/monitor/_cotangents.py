"""The records of backward passes, as one flat dict of scalars."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves
from optclip.typing import CotangentRecord, PyTree

FIELDS = ("largest_norm", "mean_coefficient", "clipped", "fraction", "nonfinite")


def is_record(value: Any) -> bool:
    """Whether this is what `clip_cotangent` did."""
    return isinstance(value, CotangentRecord)


def records_of(tree: PyTree) -> list[tuple[str, CotangentRecord]]:
    """Every record in a tree, with its path; `cotangent` where that is empty."""
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_record)
    return [
        (_leaves.path_str(path) or "cotangent", value)
        for path, value in pairs
        if is_record(value)
    ]


def entries_of(record: CotangentRecord) -> dict[str, jax.Array]:
    """What one record says, of all its steps if it has one entry a step."""
    number = jnp.sum(record.cotangent_norms)
    largest = jnp.max(record.cotangent_norm, initial=0)
    # Where chains of clips were added, so were the largest norms: NaN, which is made
    # there alone, or jax.debug_nans would not let the others pass.
    is_known = jnp.all(record.cotangent_chains <= 1).astype(jnp.float32)
    clipped = jnp.sum(record.cotangent_clipped)
    return {
        "largest_norm": largest * (is_known / is_known),
        "mean_coefficient": jnp.sum(record.cotangent_coefficients) / number,
        "clipped": clipped.astype(jnp.int32),
        "fraction": clipped / number,
        "nonfinite": jnp.sum(record.cotangent_nonfinite).astype(jnp.int32),
    }
