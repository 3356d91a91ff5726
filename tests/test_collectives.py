"""Each collective matters: what is done without it, by each device alone, differs.

In `shard_map`, where they are our own, each line that asks for one has in turn what the
device with the least would have had by itself. That has to show in an update or record;
or without it devices do not agree on what they have in common, and JAX or we refuse.
"""

import contextlib
import functools
import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import P, lax

import optclip
from tests import meshes

CELL = ("2x4", "mixed", "shard_map")
# What passes a collective on, for whoever asked for it.
PASSED_ON_BY = ("combine", "spanning", "largest", "combined", "_together", "spanned")


# What has nothing to hold when an element is NaN.
MEMORYLESS = {*meshes.REGISTRY, "share of parameters", "masked", "drop"}


class Calls:
    """The lines that ask for collectives while a function is traced, but one of them."""

    def __init__(self, left_out, deleted=False):
        self.left_out, self.deleted = left_out, deleted
        self.lines = []

    def wrapped(self, collective):
        def call(value, axes):
            line = asked_by()
            if line not in self.lines:
                self.lines.append(line)
            alone = self.left_out == self.lines.index(line)
            if self.deleted:
                return value if alone else collective(value, axes)
            return jax.tree.map(
                lambda whole, least: jnp.where(alone, least, whole),
                collective(value, axes),
                lax.pmin(value, axes),
            )

        return call


def asked_by():
    """The innermost line of optclip that wants a collective for itself."""
    root = Path(optclip.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_stack()
        if root in Path(frame.filename).parents and frame.name not in PASSED_ON_BY
    ]
    # A comprehension is a frame of its own on Python 3.11.
    frames = [frame for frame in frames if not frame.name.startswith("<")]
    return f"{Path(frames[-1].filename).stem}: {frames[-1].line}"


@pytest.fixture
def calls_while_traced(monkeypatch):
    """Functions traced in it have collectives of which one line's can be left out."""

    @contextlib.contextmanager
    def made(*args, **kwargs):
        calls = Calls(*args, **kwargs)
        with monkeypatch.context() as patch:
            for name in ("psum", "pmax"):
                patch.setattr(lax, name, calls.wrapped(getattr(lax, name)))
            yield calls

    return made


def three_updates(tx, tree):
    """Of gradients, of larger, and of finite ones; all that is recorded of each."""
    params = jax.tree.map(jnp.ones_like, tree)
    state, found = tx.init(params), []
    larger = jax.tree.map(lambda x: 10 * x, tree)
    finite = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 1, x), tree)
    for given in (tree, larger, finite):
        updates, state = tx.update(given, state, params)
        found.append((updates, optclip.metrics(state)))
    return tuple(zip(*found, strict=True))


def hard_trees():
    """Each leaf has the largest norm once; norms leave the range; one element is NaN."""
    usual = meshes.gradients()
    kernel = usual["kernel"]
    for tree in (usual, usual | {"kernel": 1e3 * kernel}):
        for scale in (1.0, 1e25, 1e-25):
            yield jax.tree.map(lambda x, scale=scale: scale * x, tree)
    yield usual | {"kernel": kernel.at[0, 0].set(jnp.nan)}
    # Out of range on some devices alone.
    yield usual | {"out": usual["out"].at[:, 0].multiply(1e25)}


@pytest.mark.parametrize("name", meshes.CLIPS | meshes.LEARNED)
def test_none_can_be_left_out(name, calls_while_traced):
    case = meshes.Case(name, *CELL)
    mesh = meshes.mesh_of(case)
    specs = meshes.specs_of(case, mesh.axis_names)
    tx = meshes.make(name, specs)
    trees, lines = list(hard_trees()), []

    def update(tree, left_out, **kwargs):
        with calls_while_traced(left_out, **kwargs) as calls:
            out = three_updates(tx, tree)
        lines[:] = calls.lines
        return out

    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P()), out_specs=((specs,) * 3, P())
    )
    # Else what was traced before, with the collectives as they are, is taken again.
    jax.clear_caches()
    step = jax.jit(mapped(update))
    expected = [step(tree, -1) for tree in trees]
    idle = "_running" if name in MEMORYLESS else None
    asked = [(i, line) for i, line in enumerate(lines) if line.split(":")[0] != idle]
    unseen = {}
    for i, line in asked:
        found = [step(tree, i) for tree in trees]
        if max(map(meshes.ulps_between, found, expected)) < 1000:
            unseen[i] = line
    for i, line in unseen.items():
        alone = mapped(lambda tree, _, i=i: update(tree, i, deleted=True))
        assert is_refused(alone, trees[0]), line
    assert asked
    jax.clear_caches()


def is_refused(step, tree):
    """Whether devices that do not agree on a number are told so."""
    jax.clear_caches()
    try:
        jax.eval_shape(step, tree, 0)
    except ValueError as error:
        return re.search("varies|varying|replication", str(error)) is not None
    return False
