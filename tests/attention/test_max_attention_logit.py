"""Test the largest logit of each head against NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.functional import max_attention_logit
from tests.support import covering, helpers
from tests.support.attention import largest_logits as largest

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def arrays(lengths=(9, 7), heads=(6, 2), batch=(2,), dtype=np.float32):
    (t, s), (h, g), rng = lengths, heads, np.random.default_rng(0)
    query = rng.normal(size=(*batch, t, h, 5)).astype(dtype)
    return query, rng.normal(size=(*batch, s, g, 5)).astype(dtype)


QUERY, KEY = arrays()


@functools.cache
def compiled(block_size=4):
    def find(query, key, mask=None, scale=None):
        return max_attention_logit(
            query, key, mask=mask, scale=scale, block_size=block_size
        )

    return helpers.quick_jit(find, static_argnames=("mask",))


# Lengths before, at and past blocks of 4, of the fewer rows of a causal block, and 0,
# of which the largest is -inf.
@pytest.mark.covering(
    lengths=((1, 3), (4, 4), (9, 7), (8, 2), (10, 12), (0, 3), (3, 0)),
    heads=((4, 4), (6, 2), (4, 1)),
    batch=((), (2, 3), (0,)),
    mask=(None, "causal"),
    block_size=(4, 128),
    scale=(None, -2.0, 0),
)
def test_max_logit_equals_numpy(lengths, heads, batch, mask, block_size, scale):
    """Causal as `is_causal` of `jax.nn.dot_product_attention`."""
    query, key = arrays(lengths, heads, batch)
    # One key too many would have the largest logit.
    key = key * np.float32(4.0) ** np.arange(lengths[1])[:, None, None]
    with jax.numpy_rank_promotion("raise"):
        found = compiled(block_size)(query, key, mask=mask, scale=scale)
    assert found.dtype == np.float32
    attended = np.tril(np.ones(lengths, bool)) if mask else True
    factor = 1 / np.sqrt(5) if scale is None else scale
    wanted = largest(factor * query.astype(np.float64), key, attended)
    np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.covering(
    shape=((), "bhts", "ts", "t1", "1s", "hts", "11s", "b1ts", "bh1s", "bht1"),
    heads=((6, 2), (2, 1), (2, 2)),
    # A mask without an axis of heads broadcasts over them however they are grouped.
    where=lambda shape, heads: covering.full or heads == (6, 2) or "h" in shape,
)
def test_max_logit_masks_broadcast(shape, heads):
    query, key = arrays((9, 7), heads)
    sizes = {"b": 2, "h": heads[0], "t": 9, "s": 7, "1": 1}
    mask = np.random.default_rng(1).random([sizes[axis] for axis in shape]) < 0.3

    def find(query, key, mask):
        return max_attention_logit(query, key, scale=1.0, mask=mask, block_size=4)

    found = helpers.quick_jit(find)(query, key, np.asarray(mask))
    wanted = largest(query, key, mask)
    np.testing.assert_allclose(found, wanted, **CLOSE)


def test_max_logit_ignores_masked_entries():
    query, mask = QUERY.copy(), np.ones((6, 9, 7), bool)
    mask[1], mask[:, 2] = False, False
    query[:, 2] = np.nan
    found = max_attention_logit(query, KEY, mask=mask, block_size=4)
    assert found[1] == -np.inf
    assert np.all(np.isfinite(np.delete(found, 1)))


@pytest.mark.parametrize("at", [0, 3, 4, 8])
def test_max_logit_nan_reads_nan_and_inf_reads_inf(at):
    query = QUERY.copy()
    query[1, at, 2, 0] = np.nan
    query[0, at, 4, :] = np.inf
    found = compiled()(query, np.abs(KEY))
    np.testing.assert_array_equal(np.isnan(found), np.arange(6) == 2)
    np.testing.assert_array_equal(np.isinf(found), np.arange(6) == 4)


@pytest.mark.parametrize(
    ("dtypes", "wide", "room"),
    [
        ((jnp.bfloat16, jnp.bfloat16), np.float32, 1e-6),
        ((np.float32, np.float16), np.float32, 1e-6),
        ((np.float64, np.float64), np.float64, 1e-14),
    ],
)
def test_max_logit_of_other_dtypes_is_accurate_in_the_wider(dtypes, wide, room):
    pair = zip(arrays(dtype=np.float64), dtypes, strict=True)
    query, key = (x.astype(dtype) for x, dtype in pair)
    with jax.enable_x64(wide == np.float64):
        found = compiled()(query, key)
    assert found.dtype == wide
    wanted = largest(query, key) / np.sqrt(5)
    np.testing.assert_allclose(found, wanted, rtol=room, atol=room)


def traced(query, key, **options):
    """List the equations of `max_attention_logit`, including those in loops."""
    find = functools.partial(max_attention_logit, **options)
    return [e for e, _ in helpers.equations(jax.make_jaxpr(find)(query, key).jaxpr)]


def products(*args, **options):
    return [e for e in traced(*args, **options) if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("query_dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("key_dtype", [np.float32, jnp.bfloat16])
def test_max_logit_multiplies_float32_in_full_precision(query_dtype, key_dtype):
    """The default precision on TPUs and GPUs has a third of the digits."""
    (product,) = products(QUERY.astype(query_dtype), KEY.astype(key_dtype))
    is_narrow = query_dtype == key_dtype == jnp.bfloat16
    highest = None if is_narrow else (jax.lax.Precision.HIGHEST,) * 2
    assert product.params["precision"] == highest


@pytest.mark.parametrize("mask", [None, "causal", "array"])
@pytest.mark.parametrize("options", [{"block_size": 16}, {}], ids=str)
def test_max_logit_memory_is_linear_in_queries(mask, options):
    length = 512
    query, key = arrays((length, length))
    mask = np.ones((1, length), bool) if mask == "array" else mask
    sizes = [
        x.aval.size
        for equation in traced(query, key, mask=mask, **options)
        for x in equation.outvars
    ]
    assert max(sizes) == 2 * 6 * options.get("block_size", 128) * length


def test_max_logit_causal_mask_skips_three_eighths_of_products():
    """Each of four spans of queries has its own last key."""
    query, key = arrays((32, 32), (2, 2), (1,))

    def sizes(mask):
        return [e.outvars[0].aval.size for e in products(query, key, mask=mask)]

    assert sizes(None) == [2 * 32 * 32]
    assert sizes("causal") == [2 * 8 * reach for reach in (8, 16, 24, 32)]


def test_max_logit_derivative_is_zero():
    gradient = jax.grad(
        lambda *x: jnp.sum(max_attention_logit(*x[:2], scale=x[2], block_size=4)),
        (0, 1, 2),
    )
    for slope in helpers.quick_jit(gradient)(QUERY, KEY, 1.0):
        np.testing.assert_array_equal(slope, np.zeros_like(slope))


FOUR_HEADS, NO_HEADS = (np.ones((2, 7, n, 5), np.float32) for n in (4, 0))
ONE_MORE_AXIS = np.ones((1, 2, 6, 9, 7), bool)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"key": 1j * KEY}, TypeError, "`key` must be a floating-point .*S, G, D"),
        ({"query": QUERY[..., :0], "key": KEY[..., :0]}, ValueError, "`query`"),
        ({"key": KEY[:1]}, ValueError, r"batch axes .*\(1, 7, 2, 5\) and"),
        ({"key": KEY[..., :3]}, ValueError, r"`key` must have .* features"),
        ({"key": FOUR_HEADS}, ValueError, "got 4 and 6"),
        ({"key": NO_HEADS}, ValueError, "got 0 and 6"),
        ({"mask": ONE_MORE_AXIS[..., :6]}, ValueError, r"here \(2, 6, 9, 7\), got"),
        ({"mask": ONE_MORE_AXIS}, ValueError, "`mask` must be bools"),
        ({"axis_name": {"a": "data"}}, TypeError, "`axis_name` must be"),
        ({"axis_name": "data"}, ValueError, "`axis_name` must be an axis of"),
    ],
)
def test_max_logit_mismatched_arguments_raise(wrong, error, match):
    """`tests/contracts/test_bad_input.py` has the other arguments."""
    with pytest.raises(error, match=f"(?s){match}"):
        max_attention_logit(**({"query": QUERY, "key": KEY} | wrong))
