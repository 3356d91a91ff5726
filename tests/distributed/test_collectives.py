"""Each collective matters: what is done without it, by each device alone, differs.

In `shard_map`, where they are our own, each line that asks for one has in turn what the
device with the least would have had by itself. That has to show in an update or record;
or without it devices do not agree on what they have in common, and JAX or we refuse.
"""

import contextlib
import re
import traceback
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import optclip
from tests.support import covering, helpers, meshes

# Those of matrices are refused where both sides are split; `test_matrix_meshes` has them.
CLIPS = {c.id: c for c in meshes.CLIPS + meshes.LEARNED if not c.of_matrices}
# One for each set of lines that are asked; with `--full` all.
KINDS = [
    "value", "norm", "norm-axis", "global-norm-3", "proportional", "drop",
    "ema by unit", "quantile by unit", "moment", "largest element",
]  # fmt: skip
# What has nothing to hold when an element is NaN.
MEMORYLESS = {*(clip.id for clip in meshes.CLIPS), "share of parameters"} - {"skip"}
# What passes a collective on, for whoever asked for it.
PASSED_ON_BY = (
    "combine", "spanning", "largest", "combined", "_together", "spanned", "over_devices",
)  # fmt: skip
MESH = meshes.mesh_of("2x4", "shard_map")
SPECS = meshes.specs_of("mixed", MESH.axis_names)


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
        for frame in traceback.extract_stack(limit=40)
        if root in Path(frame.filename).parents and frame.name not in PASSED_ON_BY
    ]
    # A comprehension is a frame of its own on Python 3.11.
    frames = [frame for frame in frames if not frame.name.startswith("<")]
    return f"{Path(frames[-1].filename).stem}: {frames[-1].line}"


@contextlib.contextmanager
def calls_while_traced(left_out, deleted=False):
    """Functions traced in it have collectives of which one line's can be left out."""
    calls = Calls(left_out, deleted)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("psum", "pmax"):
            patch.setattr(lax, name, calls.wrapped(getattr(lax, name)))
        yield calls


def updates_of(tx, trees, params):
    """One after the other in a scan, and all that is recorded of each."""

    def step(state, tree):
        updates, state = tx.update(tree, state, params)
        return state, (updates, optclip.metrics(state))

    return lax.scan(step, tx.init(params), trees)[1]


def mapped(function):
    """`function` of steps of gradients, of parameters, and of one number."""
    rows = {key: P(None, *spec) for key, spec in SPECS.items()}
    return jax.shard_map(
        function, mesh=MESH, in_specs=(rows, SPECS, P()), out_specs=(rows, P())
    )


def hard_runs():
    """Three steps each: of gradients, of larger, and of finite ones.

    Each leaf has the largest norm once; norms leave the range; one element is NaN; norms
    are out of range on some devices alone.
    """
    usual = jax.tree.map(np.asarray, meshes.gradients())
    ones = jax.tree.map(np.ones_like, usual)
    loud = usual | {"kernel": np.float32(1e3) * usual["kernel"]}
    trees = [
        jax.tree.map(lambda x, scale=scale: np.float32(scale) * x, tree)
        for tree in (usual, loud)
        for scale in (1.0, 1e25, 1e-25)
    ]
    kernel = usual["kernel"].copy()
    kernel[0, 0] = np.nan
    out = usual["out"].copy()
    out[:, 0] *= np.float32(1e25)
    for tree in (*trees, usual | {"kernel": kernel}, usual | {"out": out}):
        larger = jax.tree.map(lambda x: 10 * x, tree)
        finite = jax.tree.map(lambda x: np.where(np.isnan(x), 1, x), tree)
        yield jax.tree.map(lambda *x: np.stack(x), tree, larger, finite), ones


def differ(found, expected):
    """By more than rounding does."""
    try:
        chex.assert_trees_all_close(found, expected, rtol=1e-4)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", CLIPS if covering.full else KINDS)
def test_none_can_be_left_out(name):
    tx = meshes.made(CLIPS[name], SPECS)
    runs, lines = list(hard_runs()), []

    def updates(trees, params, left_out):
        with calls_while_traced(left_out) as calls:
            out = updates_of(tx, trees, params)
        lines[:] = calls.lines
        return out

    # Else what was traced before, with the collectives as they are, is taken again.
    jax.clear_caches()
    step = helpers.quick_jit(mapped(updates))
    expected = [step(*run, -1) for run in runs]
    idle = "_running" if name in MEMORYLESS else None
    asked = [(i, line) for i, line in enumerate(lines) if line.split(":")[0] != idle]
    assert asked
    for i, line in asked:
        found = (step(*run, i) for run in runs)
        seen = any(map(differ, found, expected))
        assert seen or is_refused(tx, i, runs[0]), line
    jax.clear_caches()


def is_refused(tx, left_out, run):
    """Whether devices that do not agree on a number are told so."""

    def updates(trees, params, _):
        with calls_while_traced(left_out, deleted=True):
            return updates_of(tx, trees, params)

    jax.clear_caches()
    try:
        jax.eval_shape(mapped(updates), *run, 0)
    except (TypeError, ValueError) as error:
        # Ours, that of `out_specs`, and that of a scan whose state gets another type.
        return re.search("varies|varying|replication", str(error)) is not None
    return False


def test_the_kinds_ask_for_all():
    """Else a collective that only another clip asks for could be left out unseen."""
    tree = meshes.gradients()

    def lines_of(names):
        with calls_while_traced(-1) as calls:
            for name in names:
                tx = meshes.made(CLIPS[name], SPECS)
                step = jax.shard_map(
                    lambda tree, tx=tx: tx.update(tree, tx.init(tree), tree)[0],
                    mesh=MESH, in_specs=(SPECS,), out_specs=SPECS,
                )  # fmt: skip
                jax.eval_shape(step, tree)
        return set(calls.lines)

    jax.clear_caches()
    found = lines_of(KINDS)
    assert found
    # What these have in common with the kinds is not traced again.
    assert lines_of(CLIPS.keys() - set(KINDS)) <= found
    jax.clear_caches()
