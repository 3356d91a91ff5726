"""The README is true: its example, what it says of optax, its length and its links."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optclip

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
THEIRS, OURS = optax.clip_by_global_norm(1.0), optclip.clip_by_global_norm(1.0)


def clipped(tx, tree):
    return jax.jit(lambda tree: tx.update(tree, tx.init(tree))[0])(tree)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(tree)))


def test_float16_as_the_readme_says():
    x = jnp.array([300, 400], jnp.float16)
    np.testing.assert_array_equal(clipped(THEIRS, x), [0, 0])
    np.testing.assert_allclose(clipped(OURS, x), [0.6, 0.8], rtol=1e-3)


def test_many_bfloat16_leaves_as_the_readme_says():
    draws = np.random.default_rng(0).uniform(size=(200, 64))
    tree = [jnp.asarray(x, jnp.bfloat16) for x in draws]
    assert norm(clipped(THEIRS, tree)) > 1.03
    assert abs(norm(clipped(OURS, tree)) - 1) < 3e-3


def test_shard_map_as_the_readme_says():
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto, devices=jax.devices()[:4])
    x = jnp.ones(8)

    def inside(tx):
        def clip(x):
            return tx.update(x, tx.init(x))[0]

        return jax.shard_map(clip, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    np.testing.assert_allclose(norm(jax.jit(inside(THEIRS))(x)), 2.0, rtol=1e-6)
    np.testing.assert_allclose(norm(jax.jit(inside(OURS))(x)), 1.0, rtol=1e-6)


def test_it_is_read_in_minutes():
    assert len(README.split()) <= 900


def test_the_example_prints_what_it_says(capsys):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    said = re.search(r"^# (\{.*\})$", code, re.MULTILINE).group(1)
    exec(code, {})
    assert capsys.readouterr().out.strip() == said


def test_files_it_names_exist():
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    linked += re.findall(r"`(tests/[\w/]+(?:\.py)?)`", README)
    assert len(linked) >= 10
    assert not [name for name in linked if not (ROOT / name).exists()]


def test_every_clip_is_in_the_table_of_parts():
    for name in optclip.__all__:
        if name.startswith("clip_by_"):
            assert f"`{name}(" in README
