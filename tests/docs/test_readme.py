"""Tests of the README: its table, its example, its length and its links."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optclip
from tests.support import helpers, oracles

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def on_one_device(function):
    return function


def over_four_devices(function):
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto, devices=jax.devices()[:4])
    return jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


UNIFORM = np.random.default_rng(0).uniform(size=(200, 64)).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("gradients", "where", "optax_norm"),
    [
        ([np.float16([300, 400])], on_one_device, 0.0),
        (list(UNIFORM), on_one_device, 1.04),
        ([np.ones(8, np.float32)], over_four_devices, 2.0),
    ],
)
def test_norms_after_clip_are_those_of_readme(gradients, where, optax_norm):
    for tx, norm in (
        (optax.clip_by_global_norm(1.0), optax_norm),
        (optclip.clip_by_global_norm(1.0), 1.0),
    ):
        clip = where(lambda tree, tx=tx: tx.update(tree, tx.init(tree))[0])
        clipped = helpers.as_float64(helpers.quick_jit(clip)(gradients))
        np.testing.assert_allclose(oracles.tree_norm(clipped), norm, atol=5e-3)


def test_readme_has_at_most_900_words():
    assert len(README.split()) <= 900


def test_readme_example_prints_its_comment(capsys):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    comment = re.search(r"^# (\{.*\})$", code, re.MULTILINE).group(1)
    exec(code, {})
    assert capsys.readouterr().out.strip() == comment


def test_readme_links_lead_to_files():
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    linked += re.findall(r"`(tests/[\w/]+(?:\.py)?)`", README)
    assert len(linked) >= 10
    assert not [name for name in linked if not (ROOT / name).exists()]


def test_readme_lists_every_clip():
    clips = [name for name in optclip.__all__ if name.startswith("clip_by_")]
    assert not [name for name in clips if f"`{name}(" not in README]
