"""States saved by one optimizer and restored into another, as docs list them."""

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import optclip

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(3)}
CLIP = optclip.clip_by_global_norm


def chain(clip):
    return optax.chain(clip, optax.adamw(1e-3))


OPTIMIZERS = {
    "optax": chain(optax.clip_by_global_norm(1.0)),
    "`record=False`": chain(CLIP(1.0, record=False)),
    "default": chain(CLIP(1.0)),
    '`"leaves"`': chain(CLIP(1.0, record="leaves")),
    "rule": chain(CLIP(optclip.thresholds.quantile(0.9, 8))),
    "`skip`": optclip.skip(chain(CLIP(1.0)), max_norm=10.0),
    "history": optclip.with_history(chain(CLIP(1.0)), 5),
}


def stepped(tx, state):
    tx = optax.with_extra_args_support(tx)
    return tx.update(PARAMS, state, PARAMS, value=jnp.float32(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path, states = tmp_path_factory.mktemp("matrix"), {}
    with ocp.StandardCheckpointer() as checkpointer:
        for i, (name, tx) in enumerate(OPTIMIZERS.items()):
            _, states[name] = stepped(tx, tx.init(PARAMS))
            checkpointer.save(path / str(i), states[name])
        checkpointer.wait_until_finished()
        yield checkpointer, path, states


def documented():
    page = pathlib.Path(__file__).parents[3] / "docs" / "production_runs.md"
    text = re.search("<!-- matrix -->\n(.*)<!-- end", page.read_text(), re.DOTALL)[1]
    _, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    assert [row[0] for row in rows] == list(OPTIMIZERS)
    return {
        (row[0], name): cell
        for row in rows
        for name, cell in zip(OPTIMIZERS, row[1:], strict=True)
    }


CELLS = documented()


@pytest.mark.parametrize(("old", "new"), CELLS)
def test_cell_of_restore_matrix(saved, old, new):
    checkpointer, path, states = saved
    place = path / str(list(OPTIMIZERS).index(old))
    tx, new_tx = OPTIMIZERS[old], OPTIMIZERS[new]
    like = jax.eval_shape(new_tx.init, PARAMS)
    if CELLS[old, new] == "yes":
        stepped(new_tx, checkpointer.restore(place, like))
    else:
        with pytest.raises(ValueError, match=r"[Ss]tructure"):
            checkpointer.restore(place, like)
    restored = checkpointer.restore(place, jax.eval_shape(tx.init, PARAMS))
    moved = optclip.carry_over(tx, PARAMS, restored, new_tx, PARAMS)
    assert jax.tree.structure(moved) == jax.tree.structure(like)
    mu, expected = (optax.tree.get(x, "mu") for x in (moved, states[old]))
    chex.assert_trees_all_equal(mu, expected)
    _, after = stepped(new_tx, moved)
    assert optax.tree.get(after, "count") == 2
