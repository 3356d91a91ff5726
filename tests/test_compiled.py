"""What XLA makes of a clip: no copy, few reductions, nothing compiled twice.

Clocks are in `benchmarks/`; what is here is the same on every run.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from benchmarks import trees
from benchmarks.timing import page_faults
from optclip import _roots, functional

DTYPES = ["float32", "bfloat16", "float16", "mixed"]
MIXED = ["float32", "bfloat16", "float16"]


def transformer(dtype, num_layers=2, width=768, words=8000):
    """Shapes of a transformer, 20 million elements."""
    d = width
    layer = [(d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d)]
    shapes = [(words, d), *layer * num_layers]
    names = MIXED if dtype == "mixed" else [dtype]
    return [
        jax.ShapeDtypeStruct(shape, names[i % len(names)])
        for i, shape in enumerate(shapes)
    ]


def gpt2(dtype):
    """The 148 leaves of GPT-2, 124 million elements."""
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "mixed": "mixed"}
    shapes = trees.gpt2(768, 12, 50_257, 1024)
    return jax.tree.leaves(trees.typed(shapes, short[dtype]))


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled(function, *args, donated=(0,)):
    return jax.jit(function, donate_argnums=donated).lower(*args).compile()


def accessed(program):
    return program.cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("ord", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_copy_is_made(dtype, ord):
    """Optax takes twice the gradients for 16-bit dtypes: the assertion can fail."""
    tree = transformer(dtype)

    def clip(updates):
        return functional.clip_by_global_norm(updates, 1.0, ord=ord)

    found = compiled(clip, tree).memory_analysis().temp_size_in_bytes
    assert found <= 0.01 * num_bytes(tree)
    if dtype == "bfloat16":
        tx = optax.clip_by_global_norm(1.0)
        theirs = compiled(lambda t: tx.update(t, optax.EmptyState())[0], tree)
        assert theirs.memory_analysis().temp_size_in_bytes > num_bytes(tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_copy_of_gpt2(dtype):
    """One percent, and nothing besides."""
    tree = gpt2(dtype)
    program = compiled(lambda t: functional.clip_by_global_norm(t, 1.0), tree)
    assert program.memory_analysis().temp_size_in_bytes <= 0.01 * num_bytes(tree)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_copy_leaf_by_leaf(dtype):
    tree = transformer(dtype)
    program = compiled(lambda t: functional.clip_by_norm(t, 1.0), tree)
    assert program.memory_analysis().temp_size_in_bytes <= 0.01 * num_bytes(tree)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((8192, 4096), 0), ((8192, 4096), 1), ((12, 768, 3072), 2), ((2, 4096, 4096), 1),
        ((8192, 4096), (0, 1)), ((2**22,), 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_copy_slice_by_slice(dtype, shape, axis):
    """XLA on CPU would widen all of float16 first: 200 %."""
    tree = [jax.ShapeDtypeStruct(shape, dtype)] * 2
    program = compiled(lambda t: functional.clip_by_norm(t, 1.0, axis=axis), tree)
    assert program.memory_analysis().temp_size_in_bytes <= 0.01 * num_bytes(tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_root_in_the_kernel_that_adds(dtype):
    """Of 50,257 rows it took eight times as long."""
    tree = [jax.ShapeDtypeStruct((50_257, 64), dtype)]
    text = compiled(lambda t: functional.clip_by_norm(t, 1.0, axis=-1), tree).as_text()
    kernels = [body for body in text.split("\n}\n") if " reduce(" in body]
    assert kernels
    assert "sqrt(" in text
    assert not any("sqrt(" in body for body in kernels)


def test_no_loop_over_single_elements():
    """Nothing is added there, so that a loop could only copy once more."""
    tx = optclip.clip_by(1.0, over=optclip.ELEMENT, response="smooth")
    tree = jnp.zeros((512, 512), jnp.float16)
    state = tx.init(tree)
    program = jax.jit(lambda t: tx.update(t, state)[0]).lower(tree).compile()
    assert "while" not in program.as_text()


def step_with(clip, tree):
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(updates, state, params):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    # Three trees come in and out with the moments; the gradients have no place to go.
    state = jax.eval_shape(tx.init, tree)
    return compiled(step, tree, state, tree, donated=(1, 2))


@pytest.mark.parametrize(
    ("dtype", "branch", "passes"),
    [("float32", True, 2), ("float32", False, 1), ("float16", False, 1)],
)
def test_a_step_reads_the_gradients_once_more(dtype, branch, passes, monkeypatch):
    """And once in the branch for norms out of range, which float16 does not need."""
    if not branch:
        monkeypatch.setattr(_roots, "_may_leave_range", lambda *_: False)
        monkeypatch.setattr(_roots, "_compiled", _roots._compiled.__wrapped__)
    tree = transformer(dtype)
    plain = step_with(optax.identity(), tree)
    clipped = step_with(optclip.clip_by_global_norm(1.0), tree)
    assert (" conditional(" in clipped.as_text()) == branch
    more = accessed(clipped) - accessed(plain)
    assert 0 < more <= (passes + 0.02) * num_bytes(tree)
    room = clipped.memory_analysis().temp_size_in_bytes
    assert room <= plain.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_page_faults(dtype):
    """Of GPT-2, donated: at most 100, where a copy takes more."""
    shapes = gpt2(dtype)
    tree = [jnp.ones(x.shape, x.dtype) for x in shapes]
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
    before = page_faults()
    copy = jax.block_until_ready(jax.jit(lambda t: [x + x for x in t])(tree))
    assert min(found) <= 100 < page_faults() - before
    assert functional.global_norm(copy) < 2.1


def test_no_more_memory_for_a_step_of_gpt2():
    tree = gpt2("float32")
    plain = step_with(optax.identity(), tree)
    clipped = step_with(optclip.clip_by_global_norm(1.0), tree)
    room = clipped.memory_analysis().temp_size_in_bytes
    assert room <= plain.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("watch", [optclip.clip_by_global_norm, optclip.clip_by_norm])
def test_measuring_alone_copies_nothing(watch):
    """Adam squares the same elements as the norm: XLA on CPU would keep the squares."""
    tree = transformer("float32")
    plain, watched = (
        step_with(tx, tree).memory_analysis().temp_size_in_bytes
        for tx in (optax.identity(), watch(np.inf))
    )
    assert watched <= plain + 0.01 * num_bytes(tree)


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

    few, more, many = (length(leaves) for leaves in (16, 32, 64))
    assert many - more <= 2.2 * (more - few)


def test_the_factor_is_not_computed_anew_for_each_leaf():
    """What XLA on CPU puts into the loop of a leaf: 60 instructions if it is."""

    def num_instructions(num_leaves):
        tree = [jax.ShapeDtypeStruct((9, 9), jnp.float32)] * num_leaves
        clip = compiled(lambda t: functional.clip_by_global_norm(t, 1.0), tree)
        return clip.as_text().count(" = ")

    assert 0 < num_instructions(60) - num_instructions(30) <= 30 * 35


SMALL = [(64,), (128,), (32, 32), (16, 16), (8,), (3, 3, 16, 8), (2048,), ()]


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("ord", [2.0, float("inf")])
def test_thousands_of_leaves_take_few_reductions(platform, ord):
    shapes = [SMALL[i % len(SMALL)] for i in range(4000)]
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = jax.jit(lambda t: functional.global_norm(t, ord=ord)).trace(tree)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # 4,000 / 32 in each of two passes, and those that combine them.
    assert 2 <= len(re.findall(r"stablehlo\.reduce\b", text)) <= 2 * 130 + 20
    assert "callback" not in text


def test_few_reductions_are_left_of_thousands_by_the_compiler():
    """On CPU, whose compiler may take apart what it was given together."""
    shapes = [SMALL[i % len(SMALL)] for i in range(4000)]
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = compiled(functional.global_norm, tree, donated=())
    reductions = re.findall(r" reduce\(|ynn_fusion\S* = ", program.as_text())
    assert 2 <= len(reductions) <= 20


@pytest.mark.parametrize("ord", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("kind", ["alike", "distinct"])
def test_many_small_leaves(kind, ord):
    rng = np.random.default_rng(0)
    sizes = [7 + (i if kind == "distinct" else 0) for i in range(300)]
    tree = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    exact = np.linalg.norm(np.concatenate(tree).astype(np.float64), ord)
    found = jax.jit(lambda t: functional.global_norm(t, ord=ord))(tree)
    np.testing.assert_allclose(found, exact, rtol=2**-23)


@pytest.mark.parametrize("size", [8191, 8192, 8193, 262_144 + 8192 + 5, 700_001])
@pytest.mark.parametrize("ord", [1.0, 2.0, float("inf")])
def test_float16_in_a_loop(size, ord):
    """Blocks, rows and the rest that fits neither, each entering once."""
    values = np.random.default_rng(size).standard_normal(size).astype(np.float16)
    # A last entry that is missed, or counted twice, is felt.
    values[-1] = 900.0
    exact = np.linalg.norm(values.astype(np.float64), ord)
    found = functional.global_norm([jnp.asarray(values)], ord=ord)
    np.testing.assert_allclose(found, exact, rtol=2**-22)


def test_eager_calls_compile_once():
    compilations = []

    def listen(event, *args, **kwargs):
        if "backend_compile" in event:
            compilations.append(event)

    tree = {"w": jnp.full((33, 77), 3.0), "b": jnp.full((5,), 2.0)}
    tx = optclip.clip_by_global_norm(1.0)
    state = tx.init(tree)
    _, state = tx.update(tree, state)
    _, state = tx.update(tree, state)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 41.0)(jnp.ones(43))
        assert compilations
        compilations.clear()
        updates, _ = tx.update(tree, state)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compilations
    np.testing.assert_allclose(optax.tree.norm(updates), 1.0, rtol=1e-6)
