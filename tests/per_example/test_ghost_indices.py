"""Ghost norms of embeddings equal NumPy for ids of each integer dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.per_example import clipped_grad, norms
from tests.support import helpers, per_example_oracle

T = 6
LOOKUPS = {
    "fill": lambda w, ids: jnp.take(w, ids, axis=0, mode="fill", fill_value=0),
    "clip": lambda w, ids: jnp.take(w, ids, axis=0, mode="clip"),
    "columns": lambda w, ids: jnp.take(w.T, ids, axis=1, mode="fill", fill_value=0).T,
    "drop": lambda w, ids: w.at[ids].get(mode="drop", fill_value=0),
    "indexed": lambda w, ids: w[ids],
}
WEIGHTS = np.random.default_rng(0).normal(size=(2, T, 2)).astype(np.float32)


# Dtypes of each lookup. JAX rejects signed ids in "drop" and "indexed".
DTYPES = {
    "fill": ("int8", "uint8", "int16", "uint16", "int32", "uint32"),
    "clip": ("uint8", "uint16"),
    "columns": ("int8", "uint8"),
    "drop": ("uint8",),
    "indexed": ("uint8",),
}


def sizes(dtype):
    """Return table sizes below, at and above the number of ids of a dtype."""
    count = np.iinfo(dtype).max + 1
    return [300] if count > 2**16 else [count - 1, count, count + 1]


def ids_of(dtype, rows):
    last = min(np.iinfo(dtype).max, rows + 2)
    ids = [[0, 1, last // 2, last, last, last - 1], [last, 3, 43, 44, last - 1, 3]]
    return np.array(ids, dtype)


def gradients(ids, rows, lookup):
    """Return the gradient of each example in float64."""
    ids = ids.astype(np.int64)
    out = np.zeros((2, rows + 3, 2))
    ids = np.minimum(ids, rows - 1) if lookup == "clip" else ids
    for grad, of_one, weights in zip(out, ids, WEIGHTS, strict=True):
        np.add.at(grad, of_one, weights)
    return out[:, :rows]


def test_ghost_ids_of_integer_dtype_equal_gradients():
    # Below, at and above the number of ids for one lookup, above it for the others.
    cases = [("fill", d, n) for d in DTYPES["fill"] for n in sizes(d)]
    cases += [(k, d, sizes(d)[-1]) for k in LOOKUPS for d in DTYPES[k] if k != "fill"]
    tables = [np.ones((rows, 2), np.float32) for *_, rows in cases]
    ids = [ids_of(dtype, rows) for _, dtype, rows in cases]

    def loss(tables, example):
        ids, weights = example
        total = 0.0
        for (lookup, *_), w, of_one in zip(cases, tables, ids, strict=True):
            total += jnp.sum(LOOKUPS[lookup](w, of_one) * weights)
        return total

    f = norms(loss, method="ghost", over="leaf")
    assert {*per_example_oracle.kinds_of(loss, tables, (ids, WEIGHTS))} == {"formula"}
    _, measured = helpers.quick_jit(f)(tables, (ids, WEIGHTS))
    for case, of_one, norm in zip(cases, ids, measured, strict=True):
        lookup, _, rows = case
        expected = np.linalg.norm(gradients(of_one, rows, lookup), axis=(1, 2))
        np.testing.assert_allclose(norm, expected, rtol=1e-6, err_msg=str(case))


def test_ghost_sum_of_small_ids_is_bounded():
    def loss(w, ids):
        return 1e3 * jnp.sum(jnp.take(w, ids, axis=0))

    f = clipped_grad(loss, 1.0, method="ghost")
    ids = np.array([[100, 200, 250, 104]], np.uint8)
    total, info = helpers.quick_jit(f)(jnp.ones((300, 4)), ids)
    np.testing.assert_allclose(info.norms, [4e3], rtol=1e-6)
    assert jnp.linalg.norm(total) <= f.sensitivity()


@pytest.mark.parametrize(("rows", "kind"), [(46_000, "formula"), (70_000, "")])
def test_plan_has_formula_for_rows_that_int32_counts(rows, kind):
    """70,000 squared rows overflow."""
    kinds = []
    table = jax.ShapeDtypeStruct((rows, rows, 1), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)
    kinds_of = functools.partial(
        per_example_oracle.kinds_of, lambda w, i: jnp.sum(w[i, i])
    )
    jax.eval_shape(lambda *given: kinds.append(kinds_of(*given)), table, ids)
    assert kinds == [kind or "materialized"]
