"""What XLA makes of a clip: no copy, few reductions.

Clocks are in `benchmarks/`; what is here is the same on every run.
"""

import functools
import itertools
import math
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from benchmarks import trees
from optclip import functional, responses
from optclip._clip import _scale
from optclip.norms import _roots
from tests.support import covering, helpers

DTYPES = ["float32", "bfloat16", "mixed"]
MIXED = ["float32", "bfloat16"]
ORDERS = [1.0, 2.0, math.inf]
# A hundredth of the gradients: what is joined or stacked of the small leaves.
ROOM = 0.01


def typed(shapes, dtype):
    names = MIXED if dtype == "mixed" else [dtype]
    kinds = itertools.cycle(names)
    return [jax.ShapeDtypeStruct(shape, next(kinds)) for shape in shapes]


def some_leaves(dtype, width=768, words=8000):
    """Of a transformer: an embedding, matrices and vectors, 10 million elements."""
    d = width
    return typed([(words, d), (d,), (d, 3 * d), (3 * d,), (d, 4 * d)], dtype)


def gpt2(dtype):
    """The leaves of GPT-2; of two blocks of twelve, unless all cases are asked for."""
    blocks = 12 if covering.full else 2
    return typed(
        jax.tree.leaves(trees.gpt2(768, blocks, 50_257, 1024), is_leaf=is_shape), dtype
    )


def is_shape(tree):
    return isinstance(tree, tuple)


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled(function, *args, donated=(0,)):
    return jax.jit(function, donate_argnums=donated).lower(*args).compile()


def accessed(program):
    return program.cost_analysis()["bytes accessed"]


def page_faults():
    """Minor page faults of this process so far: each fresh 4 KB page is one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def room_of(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.covering(dtype=DTYPES, ord=ORDERS)
def test_no_copy_is_made(dtype, ord):
    tree = some_leaves(dtype)

    def clip(updates):
        return functional.clip_by_global_norm(updates, 1.0, ord=ord)

    assert room_of(compiled(clip, tree)) <= ROOM * num_bytes(tree)


def test_a_copy_would_be_seen():
    """Widened in memory: that is what the tests around this one are to find."""
    tree = some_leaves("bfloat16")

    def clip(updates):
        wide = [x.astype(jnp.float32) for x in updates]
        clipped, norm = functional.clip_by_global_norm(
            jax.lax.optimization_barrier(wide), 1.0
        )
        return [x.astype(jnp.bfloat16) for x in clipped], norm

    assert room_of(compiled(clip, tree)) > num_bytes(tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_copy_of_gpt2(dtype):
    tree = gpt2(dtype)
    program = compiled(lambda t: functional.clip_by_global_norm(t, 1.0), tree)
    assert room_of(program) <= ROOM * num_bytes(tree)


def test_no_copy_leaf_by_leaf():
    tree = some_leaves("bfloat16")
    program = compiled(lambda t: functional.clip_by_norm(t, 1.0), tree)
    assert room_of(program) <= ROOM * num_bytes(tree)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_copy_slice_by_slice(axis):
    tree = [jax.ShapeDtypeStruct((2**14, 4096), "bfloat16")]
    program = compiled(lambda t: functional.clip_by_norm(t, 1.0, axis=axis), tree)
    assert room_of(program) <= ROOM * num_bytes(tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_root_in_the_kernel_that_adds(dtype):
    """Of 50,257 rows it took eight times as long."""
    tree = [jax.ShapeDtypeStruct((50_257, 64), dtype)]
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

    # Three trees come in and out with the moments; the gradients have no place to go.
    state = jax.eval_shape(tx.init, tree)
    return compiled(step, tree, state, tree, donated=(1, 2))


@functools.cache
def plain_step(dtype):
    return step_with(optax.identity(), some_leaves(dtype))


@pytest.mark.parametrize(
    ("dtype", "branch", "passes"),
    [("float32", True, 2), ("float32", False, 1)],
)
def test_a_step_reads_the_gradients_once_more(dtype, branch, passes, monkeypatch):
    """And once in the branch for norms out of range."""
    if not branch:
        monkeypatch.setattr(_roots, "_may_overflow", lambda *_: False)
        monkeypatch.setattr(_roots, "_compiled", _roots._compiled.__wrapped__)
    tree = some_leaves(dtype)
    plain = plain_step(dtype)
    clipped = step_with(optclip.clip_by_global_norm(1.0), tree)
    assert (" conditional(" in clipped.as_text()) == branch
    more = accessed(clipped) - accessed(plain)
    # Less than a half of a further pass.
    assert 0 < more <= (passes + 0.3) * num_bytes(tree)
    assert room_of(clipped) <= room_of(plain) + ROOM * num_bytes(tree)


@pytest.mark.covering(
    dtype=["mixed", *MIXED], where=lambda dtype: covering.full or dtype == "mixed"
)
def test_donated_leaves_are_clipped_in_place(dtype):
    """Donated leaves are clipped in place: a copy takes a fault every few kilobytes."""
    tree = [jnp.ones(x.shape, x.dtype) for x in some_leaves(dtype)]
    clip = jax.jit(
        lambda t: functional.clip_by_global_norm(t, 1.0)[0], donate_argnums=0
    )
    tree = jax.block_until_ready(clip(tree))
    found = []
    # The allocator may give back what the first calls took; all would fault on a copy.
    for _ in range(5):
        before = page_faults()
        tree = jax.block_until_ready(clip(tree))
        found.append(page_faults() - before)
    double = jax.jit(lambda t: [x + x for x in t])
    copies, copied = [], []
    # All are kept, so that none can lie where another was.
    for _ in range(3):
        before = page_faults()
        copies.append(jax.block_until_ready(double(tree)))
        copied.append(page_faults() - before)
    assert min(found) <= 0.1 * max(copied)
    assert functional.global_norm(copies[0]) < 2.1


def test_no_more_memory_for_a_step_of_gpt2():
    """In small the test above has it, without a branch and with."""
    if not covering.full:
        pytest.skip("with --full: it compiles for a minute")
    tree = gpt2("float32")
    plain = step_with(optax.identity(), tree)
    clipped = step_with(optclip.clip_by_global_norm(1.0), tree)
    assert room_of(clipped) <= room_of(plain)


@pytest.mark.parametrize("watch", [optclip.clip_by_global_norm, optclip.clip_by_norm])
def test_measuring_alone_copies_nothing(watch):
    """Adam squares the same elements as the norm: XLA on CPU would keep the squares."""
    tree = some_leaves("float32")
    watched = room_of(step_with(watch(np.inf), tree))
    assert watched <= room_of(plain_step("float32")) + ROOM * num_bytes(tree)


@pytest.mark.parametrize("method", ["clip_by_norm", "adagc", "olmo_ratio", "agc"])
def test_a_leaf_clip_grows_with_the_leaves_and_no_faster(method):
    """What the leaves share, XLA on CPU would compute anew for each of them."""

    def length(leaves):
        tree = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * leaves
        recipes = optclip.recipes
        tx = (
            optclip.clip_by_norm(1.0)
            if method == "clip_by_norm"
            else getattr(recipes, method)()
        )
        state = jax.eval_shape(tx.init, tree)
        program = compiled(tx.update, tree, state, tree, donated=(0, 1))
        return len(program.as_text().splitlines())

    few, more, many = (length(leaves) for leaves in (6, 12, 24))
    # Of twice as many leaves twice as much more; four times if each has all others'.
    assert 0 < many - more <= 3 * (more - few)


def test_the_factor_is_not_computed_anew_for_each_leaf():
    """The factor is a few scalars: computed once, and read by the loop of each leaf.

    That the program grows with the leaves and no faster must hold of any XLA. The bound
    is for the factor: put into the loop of each leaf, as XLA on CPU would, it is 60
    instructions a leaf more. How many there are without it depends on the version of
    XLA, so they are at most twice what the same XLA makes of a sum of squares and a
    product by it.
    """

    def growths(function):
        def num_instructions(num_leaves):
            tree = [jax.ShapeDtypeStruct((9, 9), jnp.float32)] * num_leaves
            return compiled(function, tree).as_text().count(" = ")

        few, more, many = (num_instructions(leaves) for leaves in (10, 20, 40))
        return more - few, many - more

    def scaled_by_its_square(tree):
        square = sum(jnp.vdot(x, x) for x in tree)
        return [square * x for x in tree]

    first, second = growths(lambda t: functional.clip_by_global_norm(t, 1.0))
    # Of twice as many leaves twice as much more; four times if each has all others'.
    assert 0 < second <= 3 * first
    assert first <= 2 * growths(scaled_by_its_square)[0]


SMALL = [(64,), (128,), (32, 32), (16, 16), (8,), (3, 3, 16, 8), (2048,), ()]


def small_leaves(num):
    return typed([SMALL[i % len(SMALL)] for i in range(num)], "float32")


@functools.cache
def traced_norm(ord):
    norm = jax.jit(lambda t: functional.global_norm(t, ord=ord))
    return norm.trace(small_leaves(1000))


@pytest.mark.covering(platform=["cpu", "tpu", "cuda"], ord=[ORDERS[1], ORDERS[2]])
def test_a_thousand_leaves_take_few_reductions(platform, ord):
    text = traced_norm(ord).lower(lowering_platforms=(platform,)).as_text()
    # A lot of 32 at a time, in each of two passes, and those that combine them.
    lots = len(SMALL) * math.ceil(1000 / len(SMALL) / 32)
    assert 1 <= len(re.findall(r"stablehlo\.reduce\b", text)) <= 2 * lots + 20
    assert "callback" not in text


def test_few_reductions_are_left_of_a_thousand_by_the_compiler():
    """On CPU, whose compiler may take apart what it was given together."""
    program = compiled(functional.global_norm, small_leaves(1000), donated=())
    reductions = re.findall(r" reduce\(|ynn_fusion\S* = ", program.as_text())
    assert 2 <= len(reductions) <= 64


# Merged in lots of 32 if of one type; joined in lots of 64 if not.
KINDS = {"alike": [7] * 70, "distinct": [7 + i for i in range(70)]}


@pytest.mark.covering(kind=[*KINDS], ord=ORDERS)
def test_many_small_leaves_are_clipped_as_one_by_one(kind, ord):
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(n).astype(np.float32) for n in KINDS[kind]]
    # A last leaf that is missed, or counted twice, is felt.
    tree[-1] *= 100
    exact = np.linalg.norm(np.concatenate(tree).astype(np.float64), ord)
    found = jax.jit(lambda t: functional.global_norm(t, ord=ord))(tree)
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_an_eager_coefficient_is_one_program():
    """Operation by operation it would be twenty, each sent by itself."""
    norm, threshold = jnp.float32(5.0), jnp.float32(1.0)
    jax.clear_caches()
    with helpers.compilations() as found:
        _scale.coefficient_of(responses.Hard(), norm, threshold, 0.0)
    assert len(found) == 1
