"""Compare each library's clipping with optclip's on random trees, within a few ulps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .cases import BF16, DTYPES, F16, F32, F64, TREE, eps, many, norm, wide
from .clips import CLIPS, PRECOMPUTED_NORM, dense, rows, tf

COUNT = 24
MATRIX = [(3, 4)]
# Name, dtypes, shapes. TensorFlow's average norm supports only float32.
OPERATIONS = [
    ("tf value", DTYPES, TREE),
    ("tf norm", DTYPES, [(7,)]),
    ("tf norm", [F32], [()]),
    ("tf norm over 0", [F32, BF16], MATRIX),
    ("tf norm over -1", [F32, F64], MATRIX),
    ("tf norm over 0, 1", [F32, F16], [(2, 3, 4)]),
    ("tf norm over 1, 2, 3", [F32], [(2, 3, 2, 4)]),
    ("tf norm over none", [F32, F64], [(2, 3, 4)]),
    ("tf global", DTYPES, TREE),
    ("tf use_norm", [F32, F64], TREE),
    ("tf average", [F32], MATRIX),
    ("torch norm of order 0.5", [F32, BF16, F16], TREE),
    ("torch norm of order 1.0", [F32], TREE),
    ("torch norm of order 1.5", [F32, F64], TREE),
    ("torch norm of order 2.0", DTYPES, TREE),
    ("torch norm of order 4.0", [F32, F64], TREE),
    ("torch norm of order inf", DTYPES, TREE),
    ("torch total_norm", [F32, BF16], TREE),
    ("torch value", DTYPES, TREE),
    ("optax norm", DTYPES, TREE),
    ("optax value", DTYPES, TREE),
    ("optax rms", DTYPES, MATRIX),
]
# The norm and up to three roundings on each side. PyTorch's powers of 1.5 round more.
ULPS = {"torch norm of order 1.5": 12}


def largest(leaves):
    return max(np.abs(wide(x)).max() for x in leaves)


def size(name, case):
    """Return the norm that is compared with the threshold, in float64."""
    clip, x = CLIPS[name], wide(case.leaves[0])
    if "value" in name:
        return largest(case.leaves)
    if "use_norm" in name or "total_norm" in name:
        return PRECOMPUTED_NORM + clip.options.get("eps", 0.0)
    if clip.name == "clip_by_global_norm":
        return norm(case.leaves, clip.options.get("ord", 2.0)) + clip.options.get(
            "eps", 0.0
        )
    norms = np.sqrt(np.sum(x**2, axis=clip.options.get("axis")))
    if clip.name == "clip_by_average_norm":
        norms = norms / x.size
    if clip.name == "clip_by_rms":
        norms = norms / x.size**0.5
    return float(norms.max() if case.factor > 1 else np.median(norms))


def assert_close(results, expected, rtol, case):
    for a, b in zip(map(dense, results), map(dense, expected), strict=True):
        np.testing.assert_allclose(wide(a), wide(b), rtol=rtol, err_msg=str(case))


def check(name, cases, prepare=lambda leaves: leaves):
    """Compare the cases of a clipping; cases inside the threshold are bit-identical."""
    clip, changes = CLIPS[name], []
    for case in cases:
        leaves, limit = prepare(case.leaves), case.threshold(size(name, case))
        expected = clip.theirs(leaves, limit)
        functional, updates = clip.compiled(leaves, limit)
        rtol = (0 if "value" in name else ULPS.get(name, 6)) * eps(case.dtype)
        assert_close(updates, expected, rtol, case)
        norms = [clip.norm(leaves)] if clip.norm else []
        assert_close(functional, [*expected, *norms], rtol, case)
        assert [x.dtype for x in updates] == [x.dtype for x in leaves]
        pairs = zip(map(dense, updates), map(dense, leaves), strict=True)
        changes.append(any(np.any(wide(a) != wide(b)) for a, b in pairs))
        assert not (changes[-1] and case.factor > 1), str(case)
    assert np.mean(changes) >= 0.3


@pytest.mark.parametrize(
    ("name", "dtype", "shapes"),
    [
        pytest.param(name, dtype, shapes, id=f"{name}-{dtype}-{len(shapes)}")
        for name, dtypes, shapes in OPERATIONS
        for dtype in dtypes
    ],
)
def test_clipping_random_tree_matches_library(name, dtype, shapes):
    check(name, many(COUNT, dtype, shapes))


@pytest.mark.parametrize("name", ["tf value", "tf norm", "tf norm over 1", "tf global"])
def test_clipping_sparse_rows_matches_tensorflow(name):
    def prepare(leaves):
        return [rows(leaves[0], [7, 2, 5, 0], (10, 3)), *leaves[1:]]

    shapes = [(4, 3), (3, 4)] if name == "tf global" else [(4, 3)]
    check(name, many(COUNT, F32, shapes), prepare)


def test_clipping_mixed_dtypes_matches_pytorch():
    """bfloat16 and float32 leaves share a norm, and preserve their dtypes."""
    check(
        "torch norm of order 2.0",
        many(COUNT, BF16, [(4, 3), (5,)]),
        lambda leaves: [leaves[0], leaves[1].astype(F32)],
    )


@pytest.mark.parametrize("name", ["tf norm", "tf global", "tf value"])
def test_derivative_matches_tensorflow(name):
    clip, changes = CLIPS[name], []
    ours = jax.jit(jax.grad(lambda x, w, c: jnp.sum(clip.functional([x], c)[0] * w)))
    weights = np.random.default_rng(0).normal(size=(3, 4)).astype(F32)
    for case in many(COUNT, F32, MATRIX):
        (x,) = map(tf.constant, case.leaves)
        if not np.any(x):
            continue
        limit = case.threshold(size(name, case))
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.reduce_sum(clip.theirs([x], limit)[0] * weights)
        gradient = ours(case.leaves[0], weights, limit)
        atol = 4 * eps(F32) * norm([weights]) * min(1.0, case.factor)
        np.testing.assert_allclose(gradient, tape.gradient(out, x), rtol=0, atol=atol)
        changes.append(np.any(np.asarray(gradient) != weights))
    assert np.mean(changes) >= 0.3
