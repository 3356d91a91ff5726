"""Which steps AXLearn's own code skips of a sequence of norms.

Its code is not kept here: https://github.com/apple/axlearn. Of its file of optimizers
the functions named below are run, with what they import of AXLearn put in for them.
"""

import __future__

import ast
import pathlib
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
    """Its transformations, whose third part plays no role here."""

    init: Any
    update: Any
    partition: Any


def norms() -> np.ndarray:
    """From about 1, where its average starts, so that nothing is skipped for ever."""
    found = rules.NORMS[rules.NORMS != 0].copy()
    found[0] = 1.0
    return found


def _official(checkout: pathlib.Path) -> dict[str, Any]:
    """Those functions alone: the file imports all of AXLearn."""
    path = checkout / "axlearn/common/optimizers.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in RUN]
    assert {getattr(node, "name", "") for node in tree.body} == RUN
    names = {
        "NamedTuple": NamedTuple,
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "PartitionedGradientTransformation": Parts,
        "maybe_instantiate": lambda given: given,
        "current_context": lambda: None,
    }
    # Its annotations name more of AXLearn; as text they do not matter.
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags), names)
    return names


def values(checkout: pathlib.Path) -> dict[str, Any]:
    official = _official(checkout)
    found: dict[str, Any] = {"norms": norms().tolist(), "skipped": {}}
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
        found["skipped"][name] = skipped
    return found
