"""The records of backward passes, as one flat dict of scalars."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves
from optclip.typing import CotangentRecord, PyTree


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
    totals = {field: jnp.sum(value) for field, value in record._asdict().items()}
    number, bad = totals["cotangent_norms"], totals["cotangent_nonfinite"]
    norm = jnp.max(record.cotangent_norm, initial=0)
    # Where chains of clips were added, so were the largest norms.
    is_known = jnp.all(record.cotangent_chains <= 1)
    return {
        "norm": jnp.where(is_known, norm, jnp.full_like(norm, jnp.nan)),
        "coefficient": _mean(totals["cotangent_coefficients"], number - bad),
        "fraction": _mean(totals["cotangent_clipped"], number, none=0.0),
        "nonfinite": bad.astype(jnp.int32),
    }


def _mean(total: jax.Array, number: jax.Array, none: float = 1.0) -> jax.Array:
    """A mean over a number of norms, or what there is to say of none."""
    found = total / jnp.maximum(number, 1)
    return jnp.where(number > 0, found, jnp.full_like(found, none))
