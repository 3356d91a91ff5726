"""Every transformation on every kind of leaf, in one tree, under what JAX does to it.

Dtype, weak type, structure and flags of each leaf are kept, and its values are those
of the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from tests.support import helpers, leaf_kinds
from tests.support.helpers import quick_jit
from tests.support.registry import BY_SCOPE, ENTRIES

every = pytest.mark.covering(entry=ENTRIES, group=tuple(leaf_kinds.GROUPS))


def clip_of(entry):
    tx = leaf_kinds.make(entry)
    return lambda tree: tx.update(tree, tx.init(tree))[0]


def whole_tree(entry, group):
    tree = leaf_kinds.gradients(entry, group)
    tree["dense"]["beside"] = leaf_kinds.beside()
    return tree


def assert_whole(found, entry, group):
    """The leaves that pass are as they were, the others as the oracle has them."""
    helpers.assert_same_types(found, whole_tree(entry, group))
    beside = found["dense"].pop("beside")
    for (path, a), b in zip(
        jax.tree.leaves_with_path(beside),
        jax.tree.leaves(leaf_kinds.beside()),
        strict=True,
    ):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
    tree = leaf_kinds.gradients(entry, group)
    wanted = leaf_kinds.expected(entry, tree)
    leaf_kinds.assert_clipped(found, tree, wanted, entry.roundings)


def test_no_float_format_is_forgotten():
    left_out = {"float_", "floating", "float8_e8m0fnu", "float64", "float_power"}
    left_out |= {"float6_e2m3fn", "float6_e3m2fn"}
    known = {n for n in dir(jnp) if n.startswith(("float", "bfloat"))}
    assert known - left_out == set(leaf_kinds.FLOATS)
    assert set(leaf_kinds.FLOATS) <= set().union(*leaf_kinds.GROUPS.values())


@pytest.mark.covering(entry=BY_SCOPE, group=("a", "b"))
def test_every_kind_of_leaf_is_clipped_eagerly(entry, group):
    assert_whole(clip_of(entry)(whole_tree(entry, group)), entry, group)


@every
def test_every_kind_of_leaf_may_be_donated(entry, group):
    tree = whole_tree(entry, group)
    clip = jax.jit(clip_of(entry), donate_argnums=0)
    assert_whole(clip(tree), entry, group)
    # There is nothing to give away in a leaf without elements.
    assert all(x.is_deleted() for x in jax.tree.leaves(tree) if x.size)


@every
def test_vmap_in_cond_in_scan(entry, group):
    """A carry and a branch take nothing that differs in dtype, weak type or structure.

    Each of a batch is clipped by its own norms; a batch of BCOO leaves is one BCOO.
    """
    batch = jax.vmap(clip_of(entry))

    def step(trees, _):
        return jax.lax.cond(jnp.array(True), batch, lambda t: t, trees), None

    trees = [
        leaf_kinds.gradients(entry, group),
        leaf_kinds.gradients(entry, group, flipped=True),
    ]
    both = stacked(trees)
    found, _ = quick_jit(lambda t: jax.lax.scan(step, t, None, length=1))(both)
    helpers.assert_same_types(found, both)
    for i, tree in enumerate(trees):
        wanted = leaf_kinds.expected(entry, tree)
        leaf_kinds.assert_clipped(nth(found, i), tree, wanted, entry.roundings)


def stacked(trees):
    def stack(*leaves):
        if not leaf_kinds.is_sparse(leaves[0]):
            # jnp.stack makes weak types strong.
            return jax.vmap(lambda i: jax.lax.select_n(i, *leaves))(jnp.arange(2))
        data = jnp.stack([x.data for x in leaves])
        indices = jnp.stack([x.indices for x in leaves])
        return with_flags(data, indices, (len(leaves), *leaves[0].shape), leaves[0])

    return jax.tree.map(stack, *trees, is_leaf=leaf_kinds.is_sparse)


def nth(tree, i):
    def take(leaf):
        if not leaf_kinds.is_sparse(leaf):
            return leaf.at[i].get()
        return with_flags(leaf.data[i], leaf.indices[i], leaf.shape[1:], leaf)

    return jax.tree.map(take, tree, is_leaf=leaf_kinds.is_sparse)


def with_flags(data, indices, shape, like):
    return BCOO(
        (data, indices),
        shape=shape,
        indices_sorted=like.indices_sorted,
        unique_indices=like.unique_indices,
    )
