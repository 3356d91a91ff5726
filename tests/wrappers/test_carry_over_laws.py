"""Test the laws of moved states, over optimizers, wrappers and containers.

`carried` also checks at each call that no array is lost in silence, or used twice.
"""

import itertools
import operator
import re

import jax
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support import carried, covering, helpers
from tests.support.carried import CONTAINERS, LABELS, OPTIMIZERS, WRAPPERS, labeled

GROWN = {
    "in front": {"atom": (3,)},
    "between": {"cell": (3,), "dense/gain": (3,)},
    "behind": {"tail": (3,)},
}


def sampled(names, share):
    """Parametrize by each n-th name and its place; with `--full` by all of them."""
    places = [*enumerate(names)][:: 1 if covering.full else share]
    ids = [name if isinstance(name, str) else "-".join(name) for _, name in places]
    return pytest.mark.parametrize(("at", "name"), places, ids=ids)


def there_and_back(tx, tree, other, other_tree, but=None, count=None):
    """Check that a state comes back, except for named arrays and fields like `but`."""
    state = carried.numbered(tx.init(tree), count)
    moved, there = carried.carried(tx, tree, state, other, other_tree)
    back, again = carried.carried(other, other_tree, moved, tx, tree)
    old, kept = map(carried.followed, (state, back))
    for path, x in old.items():
        is_kept = np.array_equal(kept[path], x) or (but and re.search(but, str(path)))
        # A count starts anew with the arrays beside it.
        beside = [p for p in old if x.ndim == 0 and p[: len(path) - 1] == path[:-1]]
        assert is_kept or carried.is_named([path, *beside], there + again), path
    return there


@sampled(OPTIMIZERS, 1)
def test_carry_over_same_optimizer_and_parameters_returns_state(at, name):
    tx = OPTIMIZERS[name]()
    for container in covering.rotated([*CONTAINERS], at):
        tree = carried.params(container)
        state = carried.numbered(tx.init(tree))
        moved, text = carried.carried(tx, tree, state, tx, tree)
        assert not text
        assert all(map(operator.is_, *map(jax.tree.leaves, (moved, state))))


@sampled(OPTIMIZERS, 4)
@pytest.mark.parametrize("ring", ["BY_NAME", "BY_NUMBER"])
def test_carry_over_same_paths_in_other_containers_keeps_arrays(at, name, ring):
    tx, containers = OPTIMIZERS[name](), [*getattr(carried, ring)]
    size = len(containers) if covering.full else 3
    trees = [
        carried.params(containers[(at + i) % len(containers)]) for i in range(size)
    ]
    state = moved = carried.numbered(tx.init(trees[0]))
    for tree, other in itertools.pairwise([*trees, trees[0]]):
        moved, text = carried.carried(tx, tree, moved, tx, other)
        assert not text
        new, old = map(carried.followed, (moved, state))
        assert all(np.array_equal(new[path], old[path]) for path in new if path in old)
    assert all(map(np.array_equal, new.values(), old.values()))


@sampled(OPTIMIZERS, 2)
def test_carry_over_leaves_added_and_removed_keeps_others(at, name):
    tx, tree = OPTIMIZERS[name](), carried.params("dict")
    for where in covering.rotated([*GROWN], at // 2):
        text = there_and_back(tx, tree, tx, carried.grown(GROWN[where]))
        # The count of Adam is too high for the moments of a new leaf.
        assert name != "adam" or "6.6 times" in text


@sampled(OPTIMIZERS, 4)
def test_carry_over_other_labels_and_back_keeps_states(at, name):
    tx, tree = OPTIMIZERS[name](), carried.params("dict")
    for change in covering.rotated([*LABELS], at // 4):
        labels = [CONTAINERS["dict"](*x) for x in LABELS[change]]
        before, after = (labeled(tx, x) for x in labels)
        # The record and the history of joined labels are those of one of them.
        there_and_back(before, tree, after, tree, "_record|history_rows", count=7)


# These have a state of the wrapper's type without a name, so that two could be meant.
TWICE = {("inject", "inject"), ("recipes.uclip", "feedback"), ("feedback", "feedback")}


@sampled(OPTIMIZERS, 3)
def test_carry_over_wrapper_on_and_off_keeps_state(at, name):
    tx, tree = OPTIMIZERS[name](), carried.params("dict")
    for wrapper in covering.rotated([*WRAPPERS][at % 2 :: 2], at // 6):
        if (name, wrapper) in TWICE:
            continue
        # The norms of one flat leaf are others, so that the state of a clip starts anew.
        but = "clip_|skip_" if wrapper == "flatten" else None
        there_and_back(tx, tree, WRAPPERS[wrapper](tx), tree, but)


INNER = optax.chain(
    optclip.clip_by_norm(thresholds.ema(), name="inner"), optax.adam(0.1)
)


@sampled(itertools.combinations(WRAPPERS, 2), 7)
def test_carry_over_wrappers_exchanged_and_back_keeps_states(at, name):
    outer, inner = (WRAPPERS[x] for x in name)
    tree = carried.params("dict")
    # A history that is moved inside loses the columns of the wrapper.
    but = "clip_|skip_|history_rows" if "flatten" in name else "history_rows"
    count = 7 if "partition" in name else None
    there_and_back(outer(inner(INNER)), tree, inner(outer(INNER)), tree, but, count)


@sampled(OPTIMIZERS, 4)
def test_carry_over_another_optimizer_moves_or_names(at, name):
    tx, tree = OPTIMIZERS[name](), carried.params("dict")
    state = carried.numbered(tx.init(tree))
    for other in covering.rotated([*OPTIMIZERS][at % 9 :: 9], at // 9):
        carried.carried(tx, tree, state, OPTIMIZERS[other](), tree)


LEARNED = optax.chain(
    optclip.clip_by_norm(thresholds.quantile(0.5, 4)), optax.adam(0.1)
)
TREE, TAILED = carried.params("dict"), carried.grown(GROWN["behind"])
SPLIT = [CONTAINERS["dict"](*labels) for labels in LABELS["split"]]
# For the path of an array in the new state, the same place in the old state and the
# rows of kept leaves there: by hand, without addresses.
CONTINUED = {
    "wrapper": (
        LEARNED,
        TREE,
        optclip.skip(LEARNED, max_norm=100.0),
        TREE,
        lambda path: (path[1:] if path[0] == "skip_inner" else (), [0, 1, 2, 3]),
    ),
    "leaf": (LEARNED, TREE, LEARNED, TAILED, lambda path: (path, [0, 1, 2, 3])),
    "label": (
        labeled(LEARNED, SPLIT[0]),
        TREE,
        labeled(LEARNED, SPLIT[1]),
        TREE,
        lambda path: (
            (path[0], "x", *path[2:]),
            [0, 1] if path[1] == "x" else [2, 3],
        ),
    ),
}


def trained(tx, tree):
    """Return a function that compiles once and runs 20 updates from a state."""
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: np.float32(rng.normal(size=(20, *x.shape))), tree)

    def step(state, grad):
        return tx.update(grad, state, tree)[::-1]

    return helpers.quick_jit(lambda state: jax.lax.scan(step, state, grads))


@pytest.mark.parametrize("name", CONTINUED)
def test_carry_over_continues_as_if_never_stopped(name):
    tx, tree, new_tx, new_tree, place = CONTINUED[name]
    state, _ = trained(tx, tree)(tx.init(tree))
    moved, _ = carried.called(tx, tree, state, new_tx, new_tree)

    def without_digest(path):
        return path[:-1] if "by_digest" in path else path

    old = {without_digest(path): x for path, x in carried.arrays(state).items()}

    def written(path, x):
        there, rows = place(without_digest(carried.texts(path)))
        if there not in old or "by_digest" not in carried.texts(path):
            return old.get(there, x)
        return np.concatenate([old[there][np.array(rows)], x[len(rows) :]])

    reference = jax.tree.map_with_path(written, new_tx.init(new_tree))
    run = trained(new_tx, new_tree)
    helpers.assert_identical(run(moved), run(reference))
