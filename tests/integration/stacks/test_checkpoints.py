"""Restore Orbax and Flax checkpoints, including those of earlier versions."""

import json

import chex
import jax
import numpy as np
import pytest
from flax import serialization

import optclip
from tests.integration.stacks import checkpoints, page
from tests.integration.stacks.checkpoints import by_orbax, restore

VERSIONS = sorted(path.name for path in checkpoints.GOLDEN.iterdir())


def assert_close(numbers, expected, rtol):
    # A later version may have further metrics.
    assert numbers.keys() >= expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(
            numbers[key], value, rtol=rtol, atol=1e-6, err_msg=key
        )


def test_page_restores_the_run():
    names = page.names("Checkpoints with Orbax")
    chex.assert_trees_all_equal(names["restored"], names["run"])
    logged = optclip.metrics(names["run"]["opt_state"])
    assert logged["clip/steps"] == 40
    assert 0 < logged["clip/rate"] < 1


def test_checkpoint_restored_without_target_has_metrics_and_rejects_steps():
    names = page.names("Checkpoints with Orbax")
    bare = restore(names["path"])
    whole = restore(names["path"], names["like"])
    assert bare["opt_state"][0]["clip_step"] == 20
    chex.assert_trees_all_equal(
        *(optclip.metrics(s["opt_state"]) for s in (bare, whole))
    )
    with pytest.raises(TypeError, match="`state` must be a ClipState"):
        names["step"](bare, names["targets"][0])


def test_page_restores_nnx_run_whose_raw_checkpoint_has_its_metrics():
    names = page.run("Flax NNX checkpoints", page.run("Flax NNX"))
    old, new = (names[name].opt_state for name in ("optimizer", "new_optimizer"))
    expected = optclip.metrics(old)
    for state in (new, restore(names["path"])):
        chex.assert_trees_all_equal(optclip.metrics(state), expected)


def test_page_continues_on_another_number_of_devices():
    names = page.names("Another number of devices")
    tx, start = names["tx"], names["start"]
    assert names["updates"].sharding.device_set == set(jax.devices()[:4])
    params, state = start(jax.devices())
    for _ in range(2):
        updates, state = tx.update(params, state, params)
    np.testing.assert_allclose(names["updates"], updates, rtol=1e-5)
    assert optclip.metrics(state)["clip/rate"] == 1
    bare = restore(names["path"], tx.init(names["params"]))
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(tx.update)(names["params"], bare, names["params"])


def by_orbax_of_shapes(state, like, path):
    return by_orbax(state, jax.eval_shape(lambda: like), path)


def by_flax(state, like, path):
    (path / "state").write_bytes(serialization.to_bytes(state))
    return serialization.from_bytes(like, (path / "state").read_bytes())


@pytest.mark.parametrize("save", [by_orbax_of_shapes, by_flax])
def test_restored_state_continues_bit_identically(save, tmp_path):
    """The run has all kinds of state."""
    run = checkpoints.go_on(checkpoints.start(), 0, 6)
    restored = save(run, checkpoints.start(), tmp_path)
    chex.assert_trees_all_equal(restored, run)
    chex.assert_trees_all_equal(
        checkpoints.go_on(restored, 6, 12), checkpoints.go_on(run, 6, 12)
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_checkpoint_of_version_continues_to_its_numbers(version):
    folder = checkpoints.GOLDEN / version
    expected = json.loads((folder / "numbers.json").read_text())
    run = restore(folder / "state", checkpoints.start())
    assert_close(checkpoints.numbers(run), expected["saved"], 1e-6)
    last = checkpoints.BEFORE + checkpoints.AFTER
    end = checkpoints.numbers(checkpoints.go_on(run, checkpoints.BEFORE, last))
    # The preceding transformation clips norms to .97, whose median is the threshold, so
    # rounding decides whether a step counts as clipped.
    tie = "clip/rate"
    assert abs(end[tie] - expected["end"].pop(tie)) <= 2.1 / last
    # Versions of XLA round differently, which accumulates over the steps.
    assert_close({k: x for k, x in end.items() if k != tie}, expected["end"], 1e-4)
    rates = {k.split("/")[0]: x for k, x in end.items() if "/rate" in k and 0 < x < 1}
    assert rates.keys() >= checkpoints.SOMETIMES
    assert all(end[f"{name}/rate"] == 1 for name in checkpoints.ALWAYS)
    assert end["skip/skipped"] == 3
    assert expected["saved"]["skip/skipped"] == 1


def test_this_version_has_a_checkpoint():
    """If not, run python -m tools.checkpoint."""
    assert optclip.__version__ in VERSIONS
