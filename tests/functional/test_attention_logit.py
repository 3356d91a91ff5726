"""The largest attention logit of each head, without a logit for each query and key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.functional import max_attention_logit


def drawn(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def largest(query, key, scale, mask=True):
    q, k = np.asarray(query, np.float64), np.asarray(key, np.float64)
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    found = np.einsum("...thd,...shd->...hts", q, k) * scale
    found = np.where(mask, found, -np.inf)
    return found.max((*range(found.ndim - 3), -2, -1))


@pytest.mark.parametrize("block_size", [1, 4, 5, 100])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_it_is_the_largest_of_all_logits(groups, block_size):
    query, key = drawn((2, 3, 11, 4, 8), (2, 3, 9, groups, 8))
    for mask in (None, "causal", np.random.default_rng(1).random((3, 4, 11, 9)) < 0.3):
        got = max_attention_logit(query, key, mask=mask, block_size=block_size)
        seen = np.tri(11, 9, dtype=bool) if isinstance(mask, str) else mask
        want = largest(query, key, 8**-0.5, True if seen is None else seen)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    with jax.disable_jit(False):
        one = jax.jit(lambda q, k: max_attention_logit(q, k, scale=-2.0))(query, key)
    np.testing.assert_allclose(one, largest(query, key, -2.0), rtol=1e-6)


@pytest.mark.parametrize(
    "shape", [(11, 9), (1, 9), (11, 1), (4, 1, 1), (2, 4, 1, 9), (2, 1, 11, 9)]
)
def test_a_mask_may_leave_out_axes_or_have_one_for_all(shape):
    query, key = drawn((2, 11, 4, 8), (2, 9, 2, 8), seed=2)
    mask = np.random.default_rng(3).random(shape) < 0.6
    got = max_attention_logit(query, key, mask=mask, block_size=4)
    np.testing.assert_allclose(got, largest(query, key, 8**-0.5, mask), rtol=1e-6)


def test_a_head_that_attends_to_nothing_reads_minus_inf_and_nan_is_seen():
    query, key = drawn((5, 2, 4), (5, 2, 4))
    mask = jnp.asarray([True, False])[:, None, None]
    got = max_attention_logit(query, key, mask=mask)
    assert np.isfinite(got[0])
    assert got[1] == -np.inf
    got = max_attention_logit(query.at[3, 1, 0].set(jnp.nan), key, block_size=2)
    assert np.isfinite(got[0])
    assert np.isnan(got[1])
    empty = max_attention_logit(query[:0], key)
    np.testing.assert_array_equal(empty, [-np.inf, -np.inf])


def test_narrow_inputs_are_multiplied_into_float32():
    query, key = (100 * x for x in drawn((5, 2, 64), (5, 2, 64)))
    narrow = query.astype(jnp.float16), key.astype(jnp.float16)
    got = max_attention_logit(*narrow, scale=1.0)
    assert got.dtype == jnp.float32
    want = largest(*narrow, 1.0)
    assert want.max() > np.finfo(np.float16).max
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_it_has_no_derivative():
    query, key = drawn((5, 2, 4), (5, 2, 4))
    got = jax.grad(lambda q: jnp.sum(max_attention_logit(q, key)))(query)
    np.testing.assert_array_equal(got, np.zeros_like(query))


def test_no_array_of_the_program_has_a_logit_for_each_query_and_key():
    query, key = drawn((1024, 2, 8), (1024, 2, 8))

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars)
            for inner in jax.tree.leaves(
                eqn.params, is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    program = jax.make_jaxpr(
        lambda q, k: max_attention_logit(q, k, mask="causal", block_size=64)
    )(query, key)
    assert 64 * 1024 * 2 <= max(sizes(program.jaxpr)) < 1024 * 1024


def test_the_maximum_spans_a_mapped_axis():
    query, key = drawn((3, 5, 2, 4), (3, 5, 2, 4))
    got = jax.vmap(
        lambda q, k: max_attention_logit(q, k, axis_name="data"), axis_name="data"
    )(query, key)
    want = np.broadcast_to(largest(query, key, 0.5), (3, 2))
    np.testing.assert_allclose(got, want, rtol=1e-6)


Q = np.ones((5, 4, 8), np.float32)
REFUSED = {
    "kind": ((Q, "key"), {}, TypeError, "`key` must be a floating"),
    "ints": ((Q.astype(int), Q), {}, TypeError, "`query` must be a floating"),
    "rank": ((Q[0], Q), {}, ValueError, "Split the features by head"),
    "features": ((Q, Q[..., :3]), {}, ValueError, "the features of `query`"),
    "groups": ((Q, Q[:, :3]), {}, ValueError, "must divide those of `query`"),
    "block": ((Q, Q), {"block_size": 0}, ValueError, "block_size"),
    "scale": ((Q, Q), {"scale": "big"}, TypeError, "scale"),
    "mask": ((Q, Q), {"mask": np.ones((5, 5))}, TypeError, "Compare a mask"),
    "mask shape": ((Q, Q), {"mask": np.ones((3, 5), bool)}, ValueError, "broadcast"),
    "word": ((Q, Q), {"mask": "casual"}, TypeError, "'causal'"),
    "axis": ((Q, Q), {"axis_name": 0.5}, TypeError, "axis_name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    given, more, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        max_attention_logit(*given, **more)
    assert words in str(caught.value)
