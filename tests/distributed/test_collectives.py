"""Each collective matters: without it, devices get another result or an error.

Inside `shard_map` optclip calls the collectives itself. Each line that does so gets, in
turn, the least value of any device instead. This must show in an update or a record; or
devices disagree on a common number without it, and JAX or optclip raises.
"""

import contextlib
import linecache
import re
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import optclip
from tests.support import covering, helpers, meshes

# Matrices split on both sides are rejected; test_matrix_meshes.py tests them.
CLIPS = {c.id: c for c in meshes.CLIPS + meshes.LEARNED if not c.of_matrices}
# One for each set of lines that call collectives; all with `--full`.
KINDS = [
    "value", "norm", "norm-axis", "global-norm-3", "proportional", "drop",
    "ema by unit", "quantile by unit", "moment", "largest element",
]  # fmt: skip
# These have no memory to hold back when an element is NaN.
MEMORYLESS = {*(clip.id for clip in meshes.CLIPS), "share of parameters"} - {"skip"}
# Functions that pass on a collective of their caller.
PASSED_ON_BY = (
    "combine", "spanning", "largest", "combined", "_together", "spanned",
    "over_devices",
)  # fmt: skip
ROOT = str(Path(optclip.__file__).parent)
MESH = meshes.mesh_of("2x4", "shard_map")
SPECS = meshes.specs_of("mixed", MESH.axis_names)


def calling_line():
    """The innermost line of optclip that calls a collective for itself."""
    frame = sys._getframe()
    while (
        not frame.f_code.co_filename.startswith(ROOT)
        or frame.f_code.co_name in PASSED_ON_BY
        # On Python 3.11 a comprehension has a frame of its own.
        or frame.f_code.co_name.startswith("<")
    ):
        frame = frame.f_back
    path = frame.f_code.co_filename
    return f"{Path(path).stem}: {linecache.getline(path, frame.f_lineno).strip()}"


@contextlib.contextmanager
def collectives_without(left_out, deleted=False):
    """Trace without the collectives of one line, by number; list all the lines."""
    lines = []

    def replaced(collective):
        def call(value, axes):
            line = calling_line()
            if line not in lines:
                lines.append(line)
            alone = left_out == lines.index(line)
            if deleted:
                return value if alone else collective(value, axes)
            return jax.tree.map(
                lambda whole, least: jnp.where(alone, least, whole),
                collective(value, axes),
                lax.pmin(value, axes),
            )

        return call

    # Patched, because no option leaves a collective out.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("psum", "pmax"):
            patch.setattr(lax, name, replaced(getattr(lax, name)))
        yield lines


@pytest.fixture(autouse=True)
def untraced():
    """Without this, JAX reuses functions that were traced with other collectives."""
    jax.clear_caches()


def updates_of(tx, trees, params):
    """Updates in a scan, and all that is recorded of each."""

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

    Each leaf has the largest norm once. Some norms are out of range, on all devices or
    on some, and one element is NaN.
    """
    usual = jax.tree.map(np.asarray, meshes.gradients())
    ones = jax.tree.map(np.ones_like, usual)
    loud = usual | {"kernel": np.float32(1e3) * usual["kernel"]}
    trees = [
        jax.tree.map(lambda x, scale=scale: np.float32(scale) * x, tree)
        for tree in (usual, loud)
        for scale in (1.0, 1e25, 1e-25)
    ]
    kernel, out = usual["kernel"].copy(), usual["out"].copy()
    kernel[0, 0] = np.nan
    out[:, 0] *= np.float32(1e25)
    for tree in (*trees, usual | {"kernel": kernel}, usual | {"out": out}):
        larger = jax.tree.map(lambda x: 10 * x, tree)
        finite = jax.tree.map(lambda x: np.where(np.isnan(x), 1, x), tree)
        yield jax.tree.map(lambda *x: np.stack(x), tree, larger, finite), ones


def differ(actual, expected):
    """Whether results differ by more than rounding."""
    try:
        chex.assert_trees_all_close(actual, expected, rtol=1e-4)
    except AssertionError:
        return True
    return False


def is_rejected(tx, left_out, run):
    """Whether devices that disagree on a number get an error."""

    def updates(trees, params, _):
        with collectives_without(left_out, deleted=True):
            return updates_of(tx, trees, params)

    jax.clear_caches()
    try:
        jax.eval_shape(mapped(updates), *run, 0)
    except (TypeError, ValueError) as error:
        # By optclip, by `out_specs`, or by a scan whose state changes its type.
        return re.search("varies|varying|replication", str(error)) is not None
    return False


@pytest.mark.parametrize("name", CLIPS if covering.full else KINDS)
def test_collective_left_out_changes_result_or_raises(name):
    tx = meshes.made(CLIPS[name], SPECS)
    runs, lines = list(hard_runs()), []

    def updates(trees, params, left_out):
        with collectives_without(left_out) as calling:
            out = updates_of(tx, trees, params)
        lines[:] = calling
        return out

    step = helpers.quick_jit(mapped(updates))
    expected = [step(*run, -1) for run in runs]
    idle = "_running" if name in MEMORYLESS else None
    active = [(i, line) for i, line in enumerate(lines) if line.split(":")[0] != idle]
    assert active
    for i, line in active:
        actual = (step(*run, i) for run in runs)
        assert any(map(differ, actual, expected)) or is_rejected(tx, i, runs[0]), line


def test_kinds_call_all_collectives():
    """Otherwise a line that only another clip calls could be left out unnoticed."""
    tree = meshes.gradients()

    def lines_of(names):
        with collectives_without(-1, deleted=True) as lines:
            for name in names:
                tx = meshes.made(CLIPS[name], SPECS)
                step = jax.shard_map(
                    lambda tree, tx=tx: tx.update(tree, tx.init(tree), tree)[0],
                    mesh=MESH,
                    in_specs=(SPECS,),
                    out_specs=SPECS,
                )
                jax.eval_shape(step, tree)
        return set(lines)

    lines = lines_of(KINDS)
    assert lines
    # Functions that these share with the kinds are not traced again.
    assert lines_of(CLIPS.keys() - set(KINDS)) <= lines
