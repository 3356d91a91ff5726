"""Record which steps AXLearn's code skips in a sequence of norms.

Requires a checkout of https://github.com/apple/axlearn. Only the functions named below
run, with substitutes for their imports from AXLearn.
"""

import __future__

import ast
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.support import rules

OPTIONS = {
    "default": {"multipliers": (20, 40, 100), "decay": 0.99},
    "tight": {"multipliers": (1.5, 3), "decay": 0.9},
}
RUN = {
    "SkipClipState",
    "drop_norm_by_grad_norm_ema",
    "skip_and_clip_by_global_norm",
}


class Parts(NamedTuple):
    """Stand in for AXLearn's transformations; `partition` is not used."""

    init: Any
    update: Any
    partition: Any


def norms() -> np.ndarray:
    """Return norms that start at 1 like the average, else every step may be skipped."""
    norms = rules.NORMS[rules.NORMS != 0].copy()
    norms[0] = 1.0
    return norms


def _official(checkout: Any) -> dict[str, Any]:
    """Compile only those functions, since the file imports all of AXLearn."""
    path = checkout.folder / "axlearn/common/optimizers.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in RUN]
    assert {getattr(node, "name", "") for node in tree.body} == RUN
    names = {
        "NamedTuple": NamedTuple,
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "PartitionedGradientTransformation": Parts,
        "maybe_instantiate": lambda config: config,
        "current_context": lambda: None,
    }
    # Annotations name more of AXLearn, so they are not evaluated.
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags), names)
    return names


def values(checkout: Any) -> dict[str, Any]:
    official = _official(checkout)
    results: dict[str, Any] = {"norms": norms().tolist(), "skipped": {}}
    for name, options in OPTIONS.items():
        drop = official["drop_norm_by_grad_norm_ema"](options["multipliers"])
        tx = official["skip_and_clip_by_global_norm"](
            Parts(*optax.identity(), None),
            drop_norm=drop,
            grad_norm_ema_decay=options["decay"],
        )
        state = tx.init(jnp.zeros(2))
        skipped = []
        for norm in norms():
            count = int(state.nonvalid_count)
            updates = jnp.array([0.6 * norm, -0.8 * norm], jnp.float32)
            _, state = tx.update(updates, state)
            skipped.append(int(state.nonvalid_count) > count)
        results["skipped"][name] = skipped
    return results
