"""Test that moved states keep the memory and the devices of their arrays."""

import jax
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import thresholds
from tests.support import carried

CLIP = optclip.clip_by_norm(thresholds.quantile(0.5, 4), record="leaves")
TX = optax.chain(CLIP, optax.adam(0.1))
TREE = {"bias": np.ones(8, np.float32), "kernel": np.ones((8, 4), np.float32)}
GROWN = {**TREE, "adapter": np.ones((8, 2), np.float32)}
BEFORE, AFTER = (
    carried.labeled(TX, dict(zip(TREE, labels, strict=True))) for labels in ("xx", "xy")
)
CHANGES = {
    "nothing": (TX, TX, TREE),
    "leaf": (TX, TX, GROWN),
    "skip": (TX, optclip.skip(TX, max_norm=thresholds.ema()), TREE),
    "history": (TX, optclip.with_history(TX, 2), GROWN),
    "labels": (BEFORE, AFTER, TREE),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("devices", [1, 8])
def test_carry_over_keeps_memory_and_shardings(change, memory, devices):
    tx, new_tx, new_tree = CHANGES[change]
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def placed(tree, memory):
        return jax.tree.map(lambda x: jax.device_put(x, sharding_of(x, memory)), tree)

    def sharding_of(x, memory):
        spec = P("data") if x.shape[:1] == (8,) else P()
        return NamedSharding(mesh, spec, memory_kind=memory)

    tree, new_tree = (placed(x, "device") for x in (TREE, new_tree))
    state = placed(carried.numbered(tx.init(tree)), memory)
    moved, _ = carried.carried(tx, tree, state, new_tx, new_tree)
    for path, x in carried.arrays(moved).items():
        expected = sharding_of(x, memory)
        assert x.sharding.memory_kind == memory, path
        # A new array that is bound to no device is copied to all of them.
        assert not x.committed or x.sharding.is_equivalent_to(expected, x.ndim), path
