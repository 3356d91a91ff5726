"""The state format of 0.1, which later versions restore.

0.1.0 wrote `golden_state_0_1.json`: the state after five steps, and the clipped
sixth. Do not write it again: the state of another version proves nothing.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from optclip import _thresholds, thresholds
from tests.support.helpers import quick_jit

GOLDEN = pathlib.Path(__file__).with_name("golden_state_0_1.json")
PARAMS = {"body": [jnp.ones((2, 3)), jnp.ones(3)], "head": jnp.ones((3, 2))}


def optimizer():
    """Chain memories over the tree, leaves, slices and elements."""
    return optax.chain(
        optclip.clip_by_global_norm(thresholds.zscore(1.0, warmup=2), name="tree"),
        optclip.clip_by_norm(thresholds.ema(warmup=2, max_norm=2.0), name="leaf"),
        optclip.clip_by_norm(
            thresholds.quantile(0.5, 4), record="leaves", name="named"
        ),
        optclip.clip_by_norm(
            thresholds.mean_plus_std(0.5, window=4), axis=0, name="slice"
        ),
        optclip.clip_by_value(_thresholds.second_moment(0.5, warmup=2), name="element"),
    )


def by_path(state):
    """Return the arrays of a state under their paths, as lists."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(x).tolist() for path, x in leaves}


def test_golden_state_of_0_1_restores_and_clips_as_then():
    golden = json.loads(GOLDEN.read_text())
    tx = optimizer()
    like = tx.init(PARAMS)
    assert by_path(like).keys() == golden["state"].keys()

    def restored(path, x):
        array = np.asarray(golden["state"][jax.tree_util.keystr(path)], x.dtype)
        assert array.shape == x.shape
        return array

    state = jax.tree.map_with_path(restored, like)
    random = np.random.default_rng(5)
    grads = jax.tree.map(
        lambda p: np.float32(9.0 * random.uniform(-1, 1, p.shape)), PARAMS
    )
    clipped, after = quick_jit(tx.update)(grads, state)
    for path, expected in golden["clipped"].items():
        np.testing.assert_allclose(by_path(clipped)[path], expected, rtol=1e-5)
    metrics = optclip.metrics(after)
    clips = ("tree", "leaf", "named", "slice", "element")
    assert all(
        any(metrics[key] < 1 for key in metrics if key.startswith(f"{clip}/coeff"))
        for clip in clips
    )
