"""The programs that XLA makes of clipping: no copy, few reductions.

Timings are in `benchmarks/`; these properties are the same on every run.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional
from tests.support import covering, helpers

# A hundredth of the gradients: small leaves that are joined or stacked.
ROOM = 0.01


def typed(shapes, dtype):
    kinds = itertools.cycle(["float32", "bfloat16"] if dtype == "mixed" else [dtype])
    return [jax.ShapeDtypeStruct(shape, next(kinds)) for shape in shapes]


def some_leaves(dtype):
    """Leaves of a transformer, of 10 million elements."""
    d = 768
    return typed([(8000, d), (d,), (d, 3 * d), (3 * d,), (d, 4 * d)], dtype)


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled(function, *args, donated=(0,)):
    return (
        helpers.optimized_jit(function, donate_argnums=donated).lower(*args).compile()
    )


def accessed(program):
    return program.cost_analysis()["bytes accessed"]


def room_of(program):
    return program.memory_analysis().temp_size_in_bytes


SIDES = {"lower": -1.0, "upper": 2.0}
DONATED = [
    *(
        (functools.partial(functional.clip_by_global_norm, max_norm=1.0, ord=p), dtype)
        for dtype, p in (
            itertools.product(("float32", "bfloat16", "mixed"), (1.0, 2.0, math.inf))
            if covering.full
            else (("float32", 2.0), ("bfloat16", math.inf), ("mixed", 1.0))
        )
    ),
    (optclip.clip_by_value(**SIDES), "float32"),
    *[(optclip.clip_by_value(1.0), "float32")] * covering.full,
]


@pytest.mark.parametrize(("clip", "dtype"), DONATED)
def test_clip_of_donated_leaves_makes_no_copy(clip, dtype):
    """By a function, and by a transformation with a record, which is donated too."""
    tree = some_leaves(dtype)
    if isinstance(clip, optax.GradientTransformation):
        state = jax.eval_shape(clip.init, tree)
        program = compiled(clip.update, tree, state, donated=(0, 1))
    else:
        program = compiled(clip, tree)
    assert room_of(program) <= ROOM * num_bytes(tree)
    assert program.memory_analysis().alias_size_in_bytes >= num_bytes(tree)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_clip_by_norm_makes_no_copy(axis):
    tree = typed([(2**14, 4096), (768,)][: 2 if axis is None else 1], "bfloat16")
    program = compiled(lambda t: functional.clip_by_norm(t, 1.0, axis=axis), tree)
    assert room_of(program) <= ROOM * num_bytes(tree)


def test_norms_of_slices_take_roots_outside_reduction():
    """With the roots inside it took eight times as long for 50,257 rows."""
    tree = typed([(50_257, 64)], "bfloat16")
    text = compiled(lambda t: functional.clip_by_norm(t, 1.0, axis=-1), tree).as_text()
    kernels = [body for body in text.split("\n}\n") if " reduce(" in body]
    assert kernels
    assert "sqrt(" in text
    assert not any("sqrt(" in body for body in kernels)


def step_with(clip, tree):
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(updates, state, params):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    # Moments and parameters are donated; the gradients have no output to alias.
    state = jax.eval_shape(tx.init, tree)
    return compiled(step, tree, state, tree, donated=(1, 2))


@functools.cache
def plain_step():
    return step_with(optax.identity(), some_leaves("float32"))


def test_adamw_step_with_clipping_reads_gradients_twice_more():
    """Once for the norm, and once in the branch for norms out of range."""
    tree = some_leaves("float32")
    clipped = step_with(optclip.clip_by_global_norm(1.0), tree)
    assert " conditional(" in clipped.as_text()
    more = accessed(clipped) - accessed(plain_step())
    # Less than a third of a further pass.
    assert 0 < more <= 2.3 * num_bytes(tree)
    assert room_of(clipped) <= room_of(plain_step()) + ROOM * num_bytes(tree)


@pytest.mark.parametrize("watch", [optclip.clip_by_global_norm, optclip.clip_by_norm])
def test_infinite_threshold_makes_no_copy(watch):
    """Adam squares the same elements: XLA on CPU would store the squares."""
    watched = room_of(step_with(watch(np.inf), some_leaves("float32")))
    assert watched <= room_of(plain_step()) + ROOM * num_bytes(some_leaves("float32"))


def num_instructions(function, num_leaves):
    tree = [jax.ShapeDtypeStruct((9, 9), jnp.float32)] * num_leaves
    return compiled(function, tree).as_text().count(" = ")


# The program of a global norm is compared with a plain one below.
GROWING = {
    "leaf": optclip.clip_by_norm(1.0),
    "agc": optclip.recipes.agc(),
    "adagc": optclip.recipes.adagc(),
    "olmo_ratio": optclip.recipes.olmo_ratio(),
}


@pytest.mark.parametrize("name", GROWING if covering.full else ["agc"])
def test_program_of_clipping_grows_linearly(name):
    """XLA on CPU would repeat the part that leaves share for each of them."""
    tx = GROWING[name]

    def update(tree):
        return tx.update(tree, tx.init(tree), tree)

    few, more, many = (num_instructions(update, num) for num in (4, 8, 16))
    # Twice as many leaves add twice as much; four times if each repeats all others.
    assert 0 < many - more <= 3 * (more - few)


def test_coefficient_is_computed_once_for_all_leaves():
    """The coefficient is a few scalars, which the loop of each leaf reads.

    Inside the loops, where XLA on CPU would compute it, it is 60 instructions per leaf
    more. The number without it depends on the version of XLA, so the bound is twice the
    program of a sum of squares and a product by it, from the same XLA.
    """

    def scaled_by_its_square(tree):
        square = sum(jnp.vdot(x, x) for x in tree)
        return [square * x for x in tree]

    def growth(function):
        return num_instructions(function, 10) - num_instructions(function, 5)

    clipping = growth(lambda tree: functional.clip_by_global_norm(tree, 1.0))
    assert clipping <= 2 * growth(scaled_by_its_square)


SMALL = [(64,), (32, 32), (3, 3, 16, 8), ()]
NUM_SMALL = 256
# Leaves of one shape are merged 32 at a time, in each of two passes.
LOTS = len(SMALL) * math.ceil(NUM_SMALL / len(SMALL) / 32)


@functools.cache
def traced_norm(ord):
    norm = helpers.optimized_jit(lambda t: functional.global_norm(t, ord=ord))
    return norm.trace(typed(SMALL * (NUM_SMALL // len(SMALL)), "float32"))


@pytest.mark.covering(platform=["cpu", "tpu", "cuda"], ord=[2.0, math.inf])
def test_norm_of_many_leaves_lowers_to_few_reductions(platform, ord):
    text = traced_norm(ord).lower(lowering_platforms=(platform,)).as_text()
    assert 1 <= len(re.findall(r"stablehlo\.reduce\b", text)) <= 2 * LOTS + 20
    assert "callback" not in text


def test_norm_of_many_leaves_compiles_to_few_reductions():
    """The compiler for CPU may split the merged leaves again."""
    text = traced_norm(2.0).lower().compile().as_text()
    assert 2 <= len(re.findall(r" reduce\(|ynn_fusion\S* = ", text)) <= 2 * LOTS + 20


# Leaves of one shape are merged 32 at a time, others are joined 64 at a time.
KINDS = {"alike": [7] * 66, "distinct": [7 + i for i in range(66)]}


@pytest.mark.parametrize(("kind", "ord"), [("alike", math.inf), ("distinct", 2.0)])
def test_norm_of_many_leaves_counts_each_leaf_once(kind, ord):
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(n).astype(np.float32) for n in KINDS[kind]]
    # Without the last leaf, or with it twice, the norm is another.
    tree[-1] *= 100
    exact = np.linalg.norm(np.concatenate(tree).astype(np.float64), ord)
    norm = helpers.quick_jit(lambda t: functional.global_norm(t, ord=ord))(tree)
    np.testing.assert_allclose(norm, exact, rtol=1e-6)
