"""States are written over the donated ones, and may have counts that are floats."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import _thresholds, recipes, thresholds
from tests.support import covering, helpers
from tests.support.registry import ENTRIES, by_trait

# No leaf is a scalar, whose donated array could become a number of the record.
TREE = {"w": np.ones((8, 4), np.float32), "b": np.ones(8, np.float32)}
SPECS = {"w": P("data"), "b": P()}
LOSS_RULE = thresholds.mean_plus_std(6.0, window=4)
SKIP = optclip.skip(
    optax.chain(optclip.clip_by_norm(1.0, record="leaves"), optax.adamw(1e-3)),
    max_norm=thresholds.ema(), max_loss=LOSS_RULE, record="leaves", name="a/b",
    learn_skipped=False, max_consecutive=3,
)  # fmt: skip
# `MultiSteps` of optax 0.2.8 does not pass the loss on when it skips a step.
BY_NORM = optclip.skip(optclip.clip_by_norm(1.0), max_norm=thresholds.ema())
GROUPS = optclip.groups({"w": "matrix", "b": "vector"})


def of_rule(rule, over):
    return optclip.clip_by(rule, over=over, record=over == "element" or "leaves")


RULES = {
    "quantile": thresholds.quantile(0.5, window=4),
    "previous_norm": thresholds.previous_norm(),
    "mean_over_rms": thresholds.mean_over_rms(),
    "zscore": thresholds.zscore(),
    "ema_of_max": _thresholds.ema_of_max(),
}
WRAPPED = {
    "skip": SKIP,
    "accumulate": optax.MultiSteps(BY_NORM, 2),
    "apply_if_finite": optax.apply_if_finite(SKIP, 3),
    "masked": optax.masked(SKIP, {"w": True, "b": False}),
    "inject": optax.inject_hyperparams(optclip.clip_by_norm)(max_norm=2.0),
    "clip_after": optclip.clip_after(optax.adam(1e-3), optclip.clip_by_norm(1.0)),
    "constrain": optclip.constrain(
        optax.adam(1e-3), optclip.clip_by_norm(thresholds.initial_norm())
    ),
    "feedback": optclip.recipes.uclip(optclip.clip_by_norm(1.0)),
    "reset": optclip.with_periodic_reset(SKIP, 10),
    "history": optclip.with_history(SKIP, 3),
    "history in MultiSteps": optax.MultiSteps(optclip.with_history(BY_NORM, 3), 2),
    "olmo_skip": recipes.olmo_skip(optax.adam(1e-3)),
    **{
        f"{name} {over}": of_rule(RULES[name], over)
        for i, name in enumerate(RULES)
        for over in covering.rotated(("leaf", GROUPS), i)
    },
}
EVERY = {
    **{f"{entry.id} leaves": entry.make(record="leaves") for entry in by_trait()},
    **WRAPPED,
}


def update_of(tx):
    tx = optax.with_extra_args_support(tx)

    def update(updates, state):
        return tx.update(updates, state, updates, value=jnp.float32(1))

    return update


@pytest.mark.parametrize("name", EVERY)
def test_state_is_written_over_donated_state(name):
    update, state = update_of(EVERY[name]), jax.eval_shape(EVERY[name].init, TREE)
    lowered = jax.jit(update, donate_argnums=(0, 1)).lower(TREE, state)
    aliased = re.findall(r"tf\.aliasing_output = (\d+)", lowered.as_text())
    leaves = jax.tree.leaves_with_path(lowered.out_info)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    lost = {name for i, name in enumerate(names) if str(i) not in aliased}
    assert lost <= {"[1].last_finite"}  # A field of optax's `apply_if_finite`.


MESHES = ("auto", "explicit", "shard_map")
ON_MESHES = {
    **{entry.id: entry for entry in by_trait()},
    **{
        name: WRAPPED[name]
        for name in ("skip", "accumulate", "quantile leaf", "history")
    },
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for i, name in enumerate(ON_MESHES)
        for mode in covering.rotated(MESHES, i)
    ],
)
def test_state_on_mesh_is_written_over_donated_state(name, mode):
    """XLA decides there, since the shardings of the results are not known before."""
    entry = ON_MESHES[name]
    is_mapped = mode == "shard_map"
    by_axis = is_mapped and getattr(entry, "by_axis", False)
    # A power iteration needs whole matrices on each device.
    of_matrices = getattr(entry, "of_matrices", False)
    specs = {"w": P(), "b": P("data")} if of_matrices else SPECS
    options = {"axis_name": specs} if by_axis else {}
    tx = entry.make(**options) if hasattr(entry, "make") else entry
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    places = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    tree, update = jax.device_put(TREE, places), update_of(tx)
    state = tx.init(tree)
    if is_mapped:
        # The moments of Adam are split like the parameters.
        by_shape = {TREE[key].shape: specs[key] for key in TREE}
        parts = jax.tree.map(lambda x: by_shape.get(x.shape, P()), state)
        update = jax.shard_map(
            update, mesh=mesh, in_specs=(specs, parts), out_specs=(specs, parts)
        )
    program = helpers.quick_jit(update, donate_argnums=(0, 1)).lower(tree, state)
    text = program.compile().as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1]
    assert aliases.count("alias)") == len(jax.tree.leaves((tree, state)))


def test_state_that_varies_over_devices_is_updated():
    """The recorded norm is the same on all devices, so it does not replace the old."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = optclip.clip_by_global_norm(1.0)

    def update(tree, state):
        state = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), state)
        updates, state = tx.update(tree, state)
        return updates, state.clip_record["clip"].clip_norm

    step = jax.shard_map(
        update, mesh=mesh, in_specs=(SPECS, P()), out_specs=(SPECS, P())
    )
    updates, norm = helpers.quick_jit(step)(TREE, tx.init(TREE))
    np.testing.assert_allclose(norm, np.sqrt(40), rtol=1e-6)
    assert np.all(updates["b"] < 1)


# Counts that come back as floats, as from a state averaged over replicas or cast.

GRADIENTS = helpers.gradients()
MATRIX = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([[0.0, 12.0]])}
COUNTING = {
    "ema": thresholds.ema(max_norm=2.0),
    "mean_over_rms": thresholds.mean_over_rms(),
    "mean_plus_std": thresholds.mean_plus_std(window=4),
    "of_gradients": thresholds.of_gradients(thresholds.ema(max_norm=2.0)),
    "quantile": thresholds.quantile(0.5, 4),
    "zscore": thresholds.zscore(max_norm=2.0),
}
TXS = {
    **{
        f"{name} per {scope}": optclip.clip_by(rule, over=scope)
        for i, (name, rule) in enumerate(COUNTING.items())
        for scope in covering.rotated(("tree", "leaf"), i)
    },
    "schedule": optclip.clip_by_norm(optax.linear_schedule(1.0, 2.0, 4)),
    "moment": optclip.clip_by_value(thresholds.moment()),
    "skip": optclip.skip(
        optclip.clip_by_norm(thresholds.quantile(0.5, 4)),
        max_norm=thresholds.quantile(0.5, 4),
        max_loss=thresholds.mean_plus_std(window=4),
        max_consecutive=2,
        learn_skipped=False,
    ),
    "reset": optclip.with_periodic_reset(
        optclip.clip_by_global_norm(thresholds.zscore(max_norm=2.0)), 2
    ),
    "constrain": optclip.constrain(
        optclip.clip_by_norm(1.0), optclip.clip_by_norm(thresholds.initial_norm())
    ),
    "error feedback": optclip.recipes.uclip(optclip.clip_by_value(1.0)),
}


def with_floats(state):
    """Return a state whose counts are floats, off by a rounding."""

    def as_float(x):
        is_count = jnp.issubdtype(x.dtype, jnp.integer)
        return x.astype(jnp.float32) * np.float32(1 - 1e-7) if is_count else x

    return jax.tree.map(as_float, state)


def call(tx, state, tree):
    return tx.update(tree, state, tree, value=jnp.float32(1.0), gradients=tree)


@pytest.mark.parametrize(
    ("tx", "tree"),
    [
        *(
            pytest.param(e.make(), GRADIENTS, id=e.id)
            for e in by_trait(ENTRIES, "state")
        ),
        *(pytest.param(tx, MATRIX, id=name) for name, tx in TXS.items()),
    ],
)
def test_update_with_float_counts_equals_integer_counts(tx, tree):
    """Updates and state, with its dtypes."""
    run = helpers.quick_jit(functools.partial(call, tx))
    _, state = run(tx.init(tree), tree)
    helpers.assert_identical(run(with_floats(state), tree), run(state, tree))
