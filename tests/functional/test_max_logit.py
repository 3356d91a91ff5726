"""The largest logit of each head, never with a logit for each query and key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.functional import max_attention_logit
from tests.support import helpers

RNG = np.random.default_rng(0)
# Lengths before, at and past blocks of 4.
LENGTHS = [(1, 3), (3, 5), (4, 4), (9, 7), (8, 2), (6, 9)]


def arrays(lengths=(9, 7), heads=(6, 2), batch=(2,), dtype=np.float32):
    (t, s), (h, g) = lengths, heads
    query = RNG.normal(size=(*batch, t, h, 5)).astype(dtype)
    return query, RNG.normal(size=(*batch, s, g, 5)).astype(dtype)


def every_logit(query, key):
    """In float64, `(..., heads, queries, keys)`."""
    query, key = (np.asarray(x).astype(np.float64) for x in (query, key))
    key = np.repeat(key, query.shape[-2] // key.shape[-2], -2)
    return np.einsum("...thd,...shd->...hts", query, key)


def largest(logits, mask=True):
    shown = np.where(mask, logits, -np.inf)
    axes = tuple(a for a in range(shown.ndim) if a != shown.ndim - 3)
    return shown.max(axes, initial=-np.inf)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_is_the_largest_of_all(lengths, batch, heads, run):
    query, key = arrays(lengths, heads, batch)
    found = run(lambda q, k: max_attention_logit(q, k, block_size=4))(query, key)
    assert found.dtype == np.float32
    wanted = largest(every_logit(query, key)) / np.sqrt(5)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    whole = max_attention_logit(query, key)
    np.testing.assert_allclose(whole, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0, 0])
def test_the_scale_is_that_of_the_model(scale):
    query, key = arrays()
    found = max_attention_logit(query, key, scale=scale, block_size=4)
    wanted = largest(scale * every_logit(query, key))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    traced = jax.jit(lambda c: max_attention_logit(query, key, scale=c))(scale)
    np.testing.assert_allclose(traced, wanted, rtol=1e-6, atol=1e-6)


MASKS = [(9, 7), (1, 7), (9, 1), (6, 9, 7), (1, 9, 1), (2, 1, 9, 7), (2, 6, 1, 7), ()]


@pytest.mark.parametrize("shape", MASKS)
def test_masks_broadcast(shape):
    query, key = arrays()
    mask = np.asarray(RNG.random(shape) < 0.3)
    found = max_attention_logit(query, key, scale=1.0, mask=mask, block_size=4)
    wanted = largest(every_logit(query, key), mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [(2, 1), (2, 2), (6, 2)])
@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("rows", [1, 9])
def test_masks_of_any_batch_and_heads(rows, batch, heads):
    query, key = arrays((9, 7), heads, batch)
    mask = np.asarray(RNG.random((*batch, heads[0], rows, 7)) < 0.3)
    found = max_attention_logit(query, key, scale=1.0, mask=mask, block_size=4)
    wanted = largest(every_logit(query, key), mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


# The last two are no multiple of a block of causal queries.
@pytest.mark.parametrize("lengths", [*LENGTHS, (10, 12), (5, 7)])
def test_causal_is_up_to_the_own_position(lengths):
    """As `is_causal` of `jax.nn.dot_product_attention` has it."""
    query, key = arrays(lengths)
    # One key too many would be the largest.
    key = key * np.float32(4.0) ** np.arange(lengths[1])[:, None, None]
    found = max_attention_logit(query, key, scale=1.0, mask="causal", block_size=4)
    mask = np.tril(np.ones(lengths, bool))
    wanted = largest(every_logit(query, key), mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_what_is_masked_counts_for_nothing():
    query, key = arrays()
    mask = np.ones((6, 9, 7), bool)
    mask[1], mask[:, 2] = False, False
    query[:, 2] = np.nan
    found = max_attention_logit(query, key, mask=mask, block_size=4)
    assert found[1] == -np.inf
    assert np.all(np.isfinite(np.delete(found, 1)))
    # And what is negative all over is negative.
    found = max_attention_logit(np.abs(query), -np.abs(key), mask=mask, block_size=4)
    assert np.all(found < 0)


@pytest.mark.parametrize("at", [0, 3, 4, 8])
def test_nan_reads_nan_and_inf_inf(at):
    query, key = arrays()
    query[1, at, 2, 0] = np.nan
    query[0, at, 4, :] = np.inf
    found = max_attention_logit(query, np.abs(key), block_size=4)
    np.testing.assert_array_equal(np.isnan(found), np.arange(6) == 2)
    np.testing.assert_array_equal(np.isinf(found), np.arange(6) == 4)


@pytest.mark.parametrize(
    ("lengths", "batch"), [((0, 3), (2,)), ((3, 0), ()), ((3, 2), (0,))]
)
def test_of_nothing_it_is_minus_infinity(lengths, batch):
    query, key = arrays(lengths, batch=batch)
    for mask in (None, "causal"):
        found = max_attention_logit(query, key, mask=mask)
        np.testing.assert_array_equal(found, np.full(6, -np.inf))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_narrow_inputs_are_accumulated_wide(dtype):
    query, key = arrays(dtype=dtype)
    found = max_attention_logit(query, key, scale=1.0, block_size=4)
    assert found.dtype == np.float32
    # Of more digits than the dtype has.
    np.testing.assert_allclose(
        found, largest(every_logit(query, key)), rtol=1e-6, atol=1e-6
    )
    mixed = max_attention_logit(query.astype(np.float32), key, scale=1.0)
    np.testing.assert_allclose(mixed, found, rtol=1e-6, atol=1e-6)


def test_doubles_stay_doubles():
    with jax.enable_x64(True):
        query, key = arrays(dtype=np.float64)
        found = max_attention_logit(query, key, block_size=4)
        assert found.dtype == np.float64
        wanted = largest(every_logit(query, key)) / np.sqrt(5)
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def precisions(jaxpr):
    for sub in equations(jaxpr):
        if sub.primitive.name == "dot_general":
            yield sub.params["precision"]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_floats_are_multiplied_in_full_precision():
    """On TPUs and GPUs the default is a third of the digits."""
    highest = (jax.lax.Precision.HIGHEST,) * 2
    for dtypes, wanted in (
        ((np.float32, np.float32), highest),
        ((jnp.bfloat16, np.float32), highest),
        ((np.float32, jnp.bfloat16), highest),
        ((jnp.bfloat16, jnp.bfloat16), None),
    ):
        query, key = (x.astype(d) for x, d in zip(arrays(), dtypes, strict=True))
        jaxpr = jax.make_jaxpr(max_attention_logit)(query, key).jaxpr
        assert list(precisions(jaxpr)) == [wanted]


@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_there_is_never_a_logit_for_each_query_and_key(mask):
    length, block = 512, 16
    query, key = arrays((length, length), (6, 2), (2,))
    mask = np.ones((1, length), bool) if mask == "array" else mask

    def find(q, k):
        return max_attention_logit(q, k, mask=mask, block_size=block)

    jaxpr = jax.make_jaxpr(find)(query, key).jaxpr
    sizes = [x.aval.size for e in equations(jaxpr) for x in e.outvars]
    assert max(sizes) == 2 * 6 * block * length
    # By default it is less than that too.
    jaxpr = jax.make_jaxpr(max_attention_logit)(query, key).jaxpr
    sizes = [x.aval.size for e in equations(jaxpr) for x in e.outvars]
    assert max(sizes) == 2 * 6 * 128 * length
    memory = jax.jit(find).lower(query, key).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2 * 6 * length * length / 4


def test_behind_a_causal_mask_what_is_not_seen_is_hardly_multiplied():
    """Of four spans of queries each has its own last key: 5/8 of all products."""
    query, key = arrays((32, 32), (2, 2), (1,))

    def products(mask):
        jaxpr = jax.make_jaxpr(lambda q, k: max_attention_logit(q, k, mask=mask))
        dots = (
            e for e in equations(jaxpr(query, key).jaxpr) if "dot" in str(e.primitive)
        )
        return [e.outvars[0].aval.size for e in dots]

    assert products(None) == [2 * 32 * 32]
    assert products("causal") == [2 * 8 * reach for reach in (8, 16, 24, 32)]


def test_it_has_no_derivative():
    query, key = arrays()

    def loss(q, k, c):
        return jnp.sum(max_attention_logit(q, k, scale=c, block_size=4))

    for found in jax.grad(loss, (0, 1, 2))(query, key, 1.0):
        np.testing.assert_array_equal(found, np.zeros_like(found))


def test_examples_may_be_mapped():
    query, key = arrays()
    found = jax.vmap(lambda q, k: max_attention_logit(q, k, block_size=4))(query, key)
    np.testing.assert_allclose(
        found.max(0), max_attention_logit(query, key), rtol=1e-6, atol=1e-6
    )


GOOD = arrays()


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"query": "x"}, TypeError, "`query` must be a floating-point array .*T, H, D"),
        ({"key": np.ones((2, 7, 2, 5), int)}, TypeError, "`key` must be a floating"),
        ({"key": 1j * GOOD[1]}, TypeError, "`key` must be a floating-point"),
        ({"query": np.ones((3, 5))}, ValueError, r"`query` .* got the shape \(3, 5\)"),
        ({"query": GOOD[0][..., :0], "key": GOOD[1][..., :0]}, ValueError, "`query`"),
        ({"key": GOOD[1][:1]}, ValueError, r"batch axes .*\(1, 7, 2, 5\) and"),
        ({"key": GOOD[1][..., :3]}, ValueError, r"`key` must have .* features"),
        ({"key": np.ones((2, 7, 4, 5), np.float32)}, ValueError, "got 4 and 6"),
        ({"key": np.ones((2, 7, 0, 5), np.float32)}, ValueError, "got 0 and 6"),
        ({"scale": "x"}, TypeError, "`scale` must be a real number"),
        ({"scale": np.ones(2)}, ValueError, r"`scale` of shape \(2,\)"),
        ({"mask": "triangle"}, TypeError, "`mask` must be bools .* got 'triangle'"),
        ({"mask": np.ones((9, 7))}, TypeError, "`mask` must be bools .*Give mask > 0"),
        (
            {"mask": np.ones((9, 6), bool)},
            ValueError,
            r"here \(2, 6, 9, 7\), got .*\(9, 6\)",
        ),
        ({"mask": np.ones((1, 2, 6, 9, 7), bool)}, ValueError, "`mask` must be bools"),
        ({"axis_name": 3}, TypeError, "`axis_name` must be"),
        ({"axis_name": {"a": "data"}}, TypeError, "`axis_name` must be"),
        ({"axis_name": "data"}, ValueError, "`axis_name` must be an axis of"),
        ({"block_size": 0}, ValueError, "`block_size` must be an int from 1"),
        ({"block_size": 1.5}, TypeError, "`block_size` must be an int"),
    ],
)
def test_what_cannot_be_is_refused(wrong, error, match):
    arguments = {"query": GOOD[0], "key": GOOD[1]} | wrong
    with pytest.raises(error, match=f"(?s){match}"):
        max_attention_logit(**arguments)


@pytest.mark.parametrize("mask", ["none", "causal", "array"])
def test_max_attention_logit_called_again_outside_jit_compiles_nothing(mask):
    query, key = arrays()
    mask = {"none": None, "causal": "causal", "array": jnp.ones((9, 7), bool)}[mask]
    max_attention_logit(query, key, mask=mask, block_size=4)
    with helpers.compilations() as found:
        again = max_attention_logit(2 * query, key, mask=mask, block_size=4)
    assert not found
    assert np.all(np.isfinite(again))
