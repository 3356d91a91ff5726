"""Every transformation on every tree of the corpus, eager and compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import corpus, helpers
from tests.registry import ENTRIES

TREES = list(corpus.corpus())
TINY = float(np.finfo(np.float32).tiny)


def test_there_are_64_trees_of_unlike_names():
    assert len({tree.name for tree in TREES}) == len(TREES) >= 64


def in_float64(tree):
    """What is floating, exactly, short of what XLA on CPU takes for zero."""

    def wide(x):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return None
        exact = np.asarray(x).astype(np.float64)
        return np.where(np.abs(exact) < TINY, 0.0, exact)

    return jax.tree.map(wide, tree)


def wrong(found, expected, original):
    """In which way a clipped tree is not what the formula gives, or None."""
    given = [jnp.asarray(x) for x in jax.tree.leaves(original)]
    kinds = [jnp.issubdtype(x.dtype, jnp.floating) for x in given]
    outs = jax.tree.leaves(found)
    clipped = [x for x, kind in zip(outs, kinds, strict=True) if kind]
    for out, wanted in zip(clipped, jax.tree.leaves(expected), strict=True):
        info = jnp.finfo(out.dtype)
        got = np.asarray(out).astype(np.float64)
        if np.any(np.isnan(got)):
            return "NaN"
        # One rounding of the product, two of the coefficient, one of the norm; what
        # is subnormal may be flushed or rounded to the next.
        floor = max(float(info.smallest_subnormal), TINY)
        room = 4 * float(info.eps) * np.abs(wanted) + floor
        reachable = np.clip(wanted, -float(info.max), float(info.max))
        if np.any(np.abs(got - reachable) > room):
            return f"{got.ravel()[:4]} for {reachable.ravel()[:4]}"
    return None


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_the_formula_holds(entry, run):
    def update(tree, threshold):
        tx = helpers.strict(entry.make(threshold))
        return tx.update(tree, tx.init(tree))[0]

    def update_by_rule(tree, threshold):
        del threshold
        tx = helpers.strict(entry.make())
        return tx.update(tree, tx.init(tree))[0]

    clip = run(update if entry.scalar_threshold else update_by_rule)
    active = entry.threshold[1] if entry.scalar_threshold else 1.0
    failures, num_clipped = [], 0
    for case in TREES:
        tree = case.make()
        # Two bounds would both have to be scaled.
        scale = 1.0 if entry.id == "value-two-bounds" else case.scale
        threshold = np.float32(active * scale)
        found = clip(tree, threshold)
        helpers.assert_same_types(found, tree)
        num_clipped += helpers.differs(found, tree)
        with np.errstate(over="ignore", under="ignore"):
            expected = entry.expected(in_float64(tree), float(threshold))
        problem = wrong(found, expected, tree)
        if problem:
            failures.append(f"{case.name}: {problem}")
    assert not failures, "\n".join(failures)
    assert num_clipped > len(TREES) / 3
