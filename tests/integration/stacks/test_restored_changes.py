"""States restored into a changed optimizer, as docs/production_runs.md lists them."""

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import optclip
from optclip import thresholds as T

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(3)}
MASK = {"w": True, "b": False}
RULE = T.quantile(0.9, 8)


def chain(threshold=RULE, record="leaves", **options):
    clip = optclip.clip_by(threshold, record=record, **options)
    return optax.chain(clip, optax.adamw(1e-3))


def skip(**options):
    return optclip.skip(chain(), max_norm=10.0, **options)


BASE = chain()
# By the words of the page: an optimizer, the changed one and its parameters.
CHANGES = {
    "`record`": (BASE, chain(record=True), PARAMS),
    "`name`": (BASE, chain(name="other"), PARAMS),
    "the kind of rule": (BASE, chain(T.ema()), PARAMS),
    "its `window`": (BASE, chain(T.quantile(0.9, 16)), PARAMS),
    "`over`": (BASE, chain(over="leaf"), PARAMS),
    "its `norm`": (BASE, chain(norm="rms"), PARAMS),
    "`mask`": (BASE, chain(mask=MASK), PARAMS),
    "an added leaf": (BASE, BASE, {**PARAMS, "c": jnp.ones(1)}),
    "a renamed leaf": (BASE, BASE, {"w": PARAMS["w"], "c": PARAMS["b"]}),
    "`skip`": (BASE, skip(), PARAMS),
    "`with_history`": (BASE, optclip.with_history(BASE, 5), PARAMS),
    "its `steps`": (
        optclip.with_history(BASE, 5),
        optclip.with_history(BASE, 6),
        PARAMS,
    ),
}
KEPT = {
    "the number of a threshold": (chain(1.0), chain(2.0), PARAMS),
    "a schedule in its place": (chain(1.0), chain(optax.constant_schedule(2)), PARAMS),
    "the numbers of a rule": (BASE, chain(T.scaled(T.quantile(0.5, 8), 2.0)), PARAMS),
    "`eps`": (BASE, chain(eps=1e-3), PARAMS),
    "`strict`": (BASE, chain(strict=True), PARAMS),
    "`nonfinite`": (BASE, chain(nonfinite="zero"), PARAMS),
    "`response`": (BASE, chain(response="smooth"), PARAMS),
    "the `norm` of a fixed threshold": (chain(1.0), chain(1.0, norm="rms"), PARAMS),
    "`max_consecutive`": (skip(), skip(max_consecutive=3), PARAMS),
}
# A clip without a record has no state, as in optax.
CASES = {
    **CHANGES,
    **KEPT,
    "optax": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        chain(1.0, record=False),
        PARAMS,
    ),
}


def stepped(tx, state, params):
    tx = optax.with_extra_args_support(tx)
    return tx.update(params, state, params, value=jnp.float32(1))[1]


def test_page_lists_the_changes():
    page = pathlib.Path(__file__).parents[3] / "docs" / "production_runs.md"
    row = re.search(r"\| changes the structure .*\n.*\n\| (.*) \|\n", page.read_text())
    cells = [cell.split(", ") for cell in row[1].split(" | ")]
    assert cells == [[*CHANGES], [*KEPT]]


@pytest.mark.filterwarnings("ignore:carry_over:UserWarning")
@pytest.mark.parametrize("change", CASES)
def test_restore_into_changed_optimizer(change, tmp_path):
    tx, new_tx, params = CASES[change]
    state = stepped(tx, tx.init(PARAMS), PARAMS)
    like = jax.eval_shape(new_tx.init, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", state)
        checkpointer.wait_until_finished()
        if change not in CHANGES:
            stepped(new_tx, checkpointer.restore(tmp_path / "1", like), params)
        elif jax.tree.structure(state) != jax.tree.structure(like):
            with pytest.raises(ValueError, match=r"[Ss]tructure"):
                checkpointer.restore(tmp_path / "1", like)
        else:  # Orbax rejects shapes too, but its reads outlive that error.
            assert any(
                a.shape != b.shape
                for a, b in zip(*map(jax.tree.leaves, (state, like)), strict=True)
            )
        restored = checkpointer.restore(tmp_path / "1", jax.eval_shape(tx.init, PARAMS))
    moved = optclip.carry_over(tx, PARAMS, restored, new_tx, params)
    assert jax.tree.structure(moved) == jax.tree.structure(like)
    mu, expected = (optax.tree.get(x, "mu")["w"] for x in (moved, state))
    chex.assert_trees_all_equal(mu, expected)
    assert optax.tree.get(stepped(new_tx, moved, params), "count") == 2
