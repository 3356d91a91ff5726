"""Random cases: every clip of TensorFlow 2.21 and the same clip of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import ours
from .cases import BF16, DTYPES, F16, F32, F64, TREES, draw, many, norm, wide
from .libraries import load

tf = load("tensorflow")

# How far two right answers may be apart, in ULP of the dtype: each side has a norm
# within one and at most three roundings of half an ULP. In bfloat16 and float16
# TensorFlow rounds at every step, ours once, at the end; so there too.
ULPS = {F32: 4, F64: 4, BF16: 4, F16: 4}

AXES = [
    ((7,), None),
    ((), None),
    ((3, 4), 0),
    ((3, 4), (0, 1)),
    ((3, 4), -1),
    ((2, 3, 4), (0, 2)),
    ((2, 3, 2, 4), (1, 2, 3)),
    ((2, 3, 4), ()),
]
BY_NORM = [
    *((*axes, F32) for axes in AXES),
    *((*axes, F64) for axes in AXES[::2]),
    *((*axes, dtype) for axes in AXES[2::3] for dtype in (BF16, F16)),
]


def named(value):
    return str(value)


def largest(leaves):
    return max(np.abs(wide(x)).max() for x in leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_clip_by_value(tally, dtype):
    """Scalar bounds, met to the bit."""
    found = tally("tensorflow")
    for case in many(120, dtype, 1000):
        upper = case.threshold(largest(case.leaves))
        lower = -upper * int(case.rng.integers(1, 3))
        theirs = [tf.clip_by_value(x, lower, upper) for x in case.leaves]
        for clipped in ours.values()(case.leaves, lower, upper):
            found.same(case, clipped, theirs)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


@pytest.mark.parametrize("dtype", [F32, F64], ids=named)
@pytest.mark.parametrize(
    "low_high",
    [[(3, 4), (3, 4)], [(4,), (3, 1)], [(1, 4), ()], [(), (1,)]],
    ids=named,
)
def test_clip_by_value_with_arrays(tally, dtype, low_high):
    """Bounds that broadcast, some crossed: then the result is the lower one."""
    found = tally("tensorflow")
    for case in many(60, dtype, 2000, [[(3, 4)]]):
        x = case.leaves[0]
        size = case.threshold(largest(case.leaves))
        low, high = (case.rng.uniform(-0.4, 1, s) * size for s in low_high)
        low, high = np.asarray(-low, dtype), np.asarray(high, dtype)
        if case.where == "inside":
            low, high = -np.abs(low) - size, np.abs(high) + size
        theirs = [tf.clip_by_value(x, low, high)]
        for clipped in ours.values()([x], low, high):
            found.same(case, clipped, theirs)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.2)


@pytest.mark.parametrize(("shape", "axes", "dtype"), BY_NORM, ids=named)
def test_clip_by_norm(tally, shape, axes, dtype):
    """The threshold is set by one slice: others are inside it, or far out."""
    found = tally("tensorflow")
    clip = ours.both("clip_by_norm", axis=axes)
    given = list(axes) if isinstance(axes, tuple) else axes
    for case in many(40, dtype, 3000, [[shape]]):
        (x,) = case.leaves
        size = np.sqrt(np.sum(wide(x) ** 2, axis=axes, keepdims=True))
        pick = size.max() if case.where == "inside" else np.median(size)
        limit = case.threshold(float(pick))
        theirs = [tf.clip_by_norm(x, limit, given)]
        for clipped in clip([x], limit):
            found.close(case, clipped, theirs, ULPS[dtype] + case.near)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.3, untouched=0.15)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_clip_by_global_norm(tally, dtype):
    """The clipped leaves and the norm, None among them."""
    found = tally("tensorflow")
    clip = ours.both("clip_by_global_norm")
    for case in many(180, dtype, 4000):
        limit = case.threshold(norm(case.leaves))
        tree = [*case.leaves, None]
        *theirs, kept = tf.clip_by_global_norm(tree, limit)[0]
        their_norm = tf.linalg.global_norm(tree)
        (plain, our_norm), updates = clip(tree, limit)
        assert kept is None is plain[-1] is updates[-1]
        found.close(case, [our_norm], [their_norm], ULPS[dtype], what="norm")
        for clipped in (plain[:-1], updates[:-1]):
            found.close(case, clipped, theirs, ULPS[dtype] + case.near)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


@pytest.mark.parametrize("dtype", [F32, F64], ids=named)
def test_clip_by_global_norm_with_a_given_norm(tally, dtype):
    """`use_norm`, which need not be the norm."""
    found = tally("tensorflow")
    clip = jax.jit(
        lambda tree, limit, norm: ours.functional.clip_by_global_norm(
            tree, limit, use_norm=norm
        )
    )
    for case in many(120, dtype, 5000):
        in_hand = float(np.asarray(norm(case.leaves) * 0.7 + 0.1, dtype))
        limit = case.threshold(in_hand)
        theirs, _ = tf.clip_by_global_norm(
            case.leaves, limit, use_norm=tf.constant(in_hand, dtype)
        )
        clipped, returned = clip(case.leaves, limit, in_hand)
        assert returned == in_hand
        found.close(case, clipped, theirs, ULPS[dtype] + case.near)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


def test_clip_by_average_norm(tally):
    """Float32 only: TensorFlow's takes no other dtype."""
    found = tally("tensorflow")
    clip = ours.both("clip_by_average_norm")
    for case in many(180, F32, 6000):
        limit = case.threshold(norm(case.leaves[:1]) / case.leaves[0].size)
        theirs = [tf.compat.v1.clip_by_average_norm(x, limit) for x in case.leaves]
        for clipped in clip(case.leaves, limit):
            found.close(case, clipped, theirs, ULPS[F32] + case.near)
        first = slice(1)
        found.count(case, clipped[first], case.leaves[first])
    found.finish(clipped=0.4, untouched=0.3)


def sparse_case(case, shape=(10, 3)):
    """The same rows as IndexedSlices and as BCOO: unique, in any order."""
    (values,) = case.leaves
    rows = case.rng.choice(shape[0], len(values), replace=False)
    theirs = tf.IndexedSlices(
        tf.constant(values), tf.constant(rows), tf.constant(shape)
    )
    return theirs, ours.rows(values, rows, shape)


@pytest.mark.parametrize(
    ("name", "axes"), [("norm", None), ("norm", 1), ("value", None)]
)
def test_sparse_leaves(tally, name, axes):
    """One leaf: IndexedSlices are clipped by what they store, BCOO likewise."""
    found = tally("tensorflow")
    for case in many(60, F32, 7000, [[(4, 3)]]):
        slices, mat = sparse_case(case)
        if name == "value":
            limit = case.threshold(largest(case.leaves))
            theirs = tf.clip_by_value(slices, -limit, limit)
            results = ours.values()(mat, -limit, limit)
        else:
            size = np.sqrt(np.sum(wide(slices.values) ** 2, axis=axes))
            limit = case.threshold(float(np.max(size)))
            theirs = tf.clip_by_norm(slices, limit, axes)
            results = ours.both("clip_by_norm", axis=axes)(mat, limit)
        ulps = 0 if name == "value" else ULPS[F32] + case.near
        expected = [tf.convert_to_tensor(theirs)]
        for clipped in results:
            found.close(case, [clipped.todense()], expected, ulps)
        found.count(case, [clipped.todense()], [tf.convert_to_tensor(slices)])
    found.finish(clipped=0.4, untouched=0.3)


def test_sparse_in_the_global_norm(tally):
    """IndexedSlices beside dense leaves."""
    found = tally("tensorflow")
    clip = ours.both("clip_by_global_norm")
    for case in many(120, F32, 8000, [[(4, 3)]]):
        slices, mat = sparse_case(case)
        other = draw(case.seed + 500, TREES[2], F32).leaves[0]
        limit = case.threshold(norm([*case.leaves, other]))
        theirs, their_norm = tf.clip_by_global_norm([slices, other], limit)
        (plain, our_norm), updates = clip([mat, other], limit)
        found.close(case, [our_norm], [their_norm], ULPS[F32], what="norm")
        for clipped in (plain, updates):
            clipped = [clipped[0].data, clipped[1]]
            expected = [theirs[0].values, theirs[1]]
            found.close(case, clipped, expected, ULPS[F32] + case.near)
        found.count(case, clipped, [*case.leaves, other])
    found.finish(clipped=0.4, untouched=0.3)


def norm_gradient(x, weights, limit):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = tf.reduce_sum(tf.clip_by_norm(x, limit) * weights)
    return tape.gradient(out, x)


def global_norm_gradient(x, weights, limit):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = tf.reduce_sum(tf.clip_by_global_norm([x], limit)[0][0] * weights)
    return tape.gradient(out, x)


def value_gradient(x, weights, limit):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = tf.reduce_sum(tf.clip_by_value(x, -limit, limit) * weights)
    return tape.gradient(out, x)


GRADIENTS = {
    "clip_by_norm": (norm_gradient, lambda x, c: ours.functional.clip_by_norm(x, c)),
    "clip_by_global_norm": (
        global_norm_gradient,
        lambda x, c: ours.functional.clip_by_global_norm(x, c)[0],
    ),
    "clip_by_value": (
        value_gradient,
        lambda x, c: ours.functional.clip_by_value(x, lower=-c, upper=c),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_derivatives(tally, name):
    """Through the clip, off the threshold, against the size of the whole gradient."""
    found = tally("tensorflow")
    theirs, function = GRADIENTS[name]
    mine = jax.jit(jax.grad(lambda x, w, c: jnp.sum(function(x, c) * w)))
    for case in many(80, F32, 9000, [[(3, 4)]]):
        (x,) = case.leaves
        if case.where == "near" or not x.any():
            continue
        weights = np.asarray(case.rng.normal(size=x.shape), F32)
        measure = largest if name == "clip_by_value" else norm
        limit = case.threshold(measure(case.leaves))
        expected = theirs(tf.constant(x), weights, limit)
        scale = np.full(x.shape, norm([weights]) * min(1.0, case.factor))
        gradient = mine(x, weights, limit)
        found.close(case, [gradient], [expected], ULPS[F32], [scale])
        found.count(case, [gradient], [weights])
    found.finish(clipped=0.4, untouched=0.3)
