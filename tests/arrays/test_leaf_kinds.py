"""Every transformation clips every kind of leaf, eagerly, in place and in batches.

Dtype, weak type, structure and flags of each leaf are kept, and its values are those
of the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import covering, helpers, leaf_kinds
from tests.support.registry import by_trait


def clip_of(entry):
    tx = leaf_kinds.make(entry)
    return lambda tree: tx.update(tree, tx.init(tree))[0]


def whole_tree(entry, group, **options):
    """Return the leaves of a group, and the leaves that clipping does not change."""
    tree = leaf_kinds.gradients(entry, group, **options)
    tree["dense"]["unclipped"] = leaf_kinds.unclipped()
    return tree


def assert_whole(clipped, entry, group, **options):
    """Check that other leaves are bit-identical and clipped leaves equal the oracle."""
    helpers.assert_same_types(clipped, whole_tree(entry, group))

    def bits(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    unclipped = clipped["dense"].pop("unclipped")
    assert jax.tree.map(bits, unclipped) == jax.tree.map(bits, leaf_kinds.unclipped())
    tree = leaf_kinds.gradients(entry, group, **options)
    expected = leaf_kinds.expected(entry, tree)
    leaf_kinds.assert_clipped(clipped, tree, expected, entry.roundings)


def eager(entry, group):
    assert_whole(clip_of(entry)(whole_tree(entry, group)), entry, group)


def donated(entry, group):
    tree = whole_tree(entry, group)
    assert_whole(
        helpers.quick_jit(clip_of(entry), donate_argnums=0)(tree), entry, group
    )
    # A leaf without elements has no buffer to donate.
    assert all(x.is_deleted() for x in jax.tree.leaves(tree) if x.size)


@helpers.quick_jit
def stacked(*trees):
    """Stack leaves; jnp.stack makes weak types strong."""

    def at(i):
        return jax.tree.map(lambda *x: jax.lax.select_n(i, *x), *trees)

    return jax.vmap(at)(jnp.arange(2))


@helpers.quick_jit
def unstacked(leaves):
    return [[x[i] for x in leaves] for i in range(2)]


def batched(entry, group):
    """Clip in vmap in cond in scan, whose types must match; each has its own norms."""
    batch = jax.vmap(clip_of(entry))

    def step(trees, _):
        return jax.lax.cond(jnp.array(True), batch, lambda t: t, trees), None

    trees = [whole_tree(entry, group, flipped=flipped) for flipped in (False, True)]
    both = stacked(*trees)
    clipped, _ = helpers.quick_jit(lambda t: jax.lax.scan(step, t, None, length=1))(
        both
    )
    helpers.assert_same_types(clipped, both)
    for i, leaves in enumerate(unstacked(jax.tree.leaves(clipped))):
        each = jax.tree.structure(trees[i]).unflatten(leaves)
        assert_whole(each, entry, group, flipped=bool(i))


def is_case(entry, group, how):
    """Run a few dtypes eagerly, and responses, which see no leaf, on few dtypes."""
    if (group == "eager") != (how is eager):
        return False
    if covering.full or (group, how) == ("b", donated):
        return True
    is_simple = entry.response == "hard" and entry.state != "vectors"
    # Each operation of an eager call is a program.
    return is_simple and (how is not eager or entry.scope == "tree")


@pytest.mark.covering(
    entry=by_trait(),
    group=tuple(leaf_kinds.GROUPS),
    how=[donated, batched, eager],
    where=is_case,
)
def test_leaf_of_each_kind_is_clipped_and_keeps_type(entry, group, how):
    how(entry, group)


def test_groups_have_every_float_format():
    left_out = {"float_", "floating", "float8_e8m0fnu", "float64", "float_power"}
    left_out |= {"float6_e2m3fn", "float6_e3m2fn"}
    formats = {n for n in dir(jnp) if n.startswith(("float", "bfloat"))}
    assert formats - left_out == set(leaf_kinds.FLOATS)
