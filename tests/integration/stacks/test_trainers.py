"""Run the page's lines for trainers in copies of the surrounding calls."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optclip
from tests.integration.stacks import by_hand, page

LINES = {row[0]: row[-1].strip("`") for row in page.rows("trainer")}
GRADS = {
    "kernel": np.float32([[3.0, 0.0], [4.0, 2.0]]),
    "bias": np.float32([1.0, -5.0]),
}


@dataclasses.dataclass(frozen=True)
class OptStateSpec:
    """Describe an array as AXLearn does, by a leaf that is not an array."""

    shape: tuple[int, ...]
    dtype: Any = None
    mesh_axes: Any = None


def transformation(trainer, **names):
    """Evaluate a line with the trainer's variables."""
    return eval(LINES[trainer], {"jax": jax, "optclip": optclip, **names})


def test_maxtext_line_keeps_moments_at_position_zero():
    names = {"base_opt": optax.adamw(0.1)}
    tx = transformation("MaxText, learned threshold", **names)
    _, state = tx.update(GRADS, tx.init(GRADS), GRADS)
    assert isinstance(state[0], optax.ScaleByAdamState)
    norm = optclip.metrics(state)["clip/norm"]
    np.testing.assert_allclose(norm, by_hand.norm(GRADS), rtol=1e-6)


def test_maxtext_engine_line_computes_one_norm_in_float32():
    """The call of `_update_kernel`, whose gradients are averages in bfloat16."""
    draws = np.random.default_rng(0).normal(size=(200, 1000))
    grads = [jax.numpy.bfloat16(each) for each in draws]
    names = {"grads": grads, "threshold": 1.0}
    clipped, norm = transformation("MaxText, training engine", **names)
    np.testing.assert_allclose(norm, by_hand.norm(grads), rtol=1e-6)
    np.testing.assert_allclose(by_hand.norm(clipped), 1.0, rtol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, None])
def test_axlearn_line_describes_state(dtype):
    def with_partition_fn(base, partition):
        return types.SimpleNamespace(init=base.init, partition=partition)

    clip = optclip.clip_by_norm(optclip.thresholds.quantile(0.9), record="leaves")
    names = {"OptStateSpec": OptStateSpec, "PartitionSpec": PartitionSpec}
    adapted = transformation(
        "AXLearn", tx=clip, with_partition_fn=with_partition_fn, **names
    )
    specs = jax.tree.map(lambda g: OptStateSpec(g.shape, dtype), GRADS)
    described, state = adapted.partition(specs), adapted.init(GRADS)
    assert jax.tree.structure(described) == jax.tree.structure(state)
    for spec, x in zip(jax.tree.leaves(described), jax.tree.leaves(state), strict=True):
        assert (spec.shape, spec.dtype) == (x.shape, x.dtype)
        assert spec.mesh_axes == PartitionSpec()
