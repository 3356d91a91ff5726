"""Many small leaves of one type, each with a norm of its own: reduced at once on CPU."""

import functools
import math
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import functional, norms
from optclip._arrays import _xla
from optclip._arrays._xla import MANY
from tests.support import covering, oracles
from tests.support.helpers import quick_jit, strictly

NUM_LEAVES = 2 * MANY


class Kind(NamedTuple):
    """A dtype, a norm or a policy, with what of it meets other settings."""

    name: str
    given: Any
    traits: tuple[str, ...]


# Narrow ones are put together only where they are small.
DTYPES = [
    Kind("float32", jnp.float32, ("wide",)),
    Kind("bfloat16", jnp.bfloat16, ("narrow",)),
    Kind("float16", jnp.float16, ("narrow",)),
    Kind("complex64", jnp.complex64, ("wide",)),
    Kind("float8_e4m3fn", jnp.float8_e4m3fn, ("narrow",)),
]
SHAPES = [(), (1,), (0,), (7,), (3, 5), (4095,)]


def arrays(shape, dtype=jnp.float32, spread=0, num=NUM_LEAVES):
    """Random ones, 2**spread times as large at one end and that much less at the other.

    And one of zeros.
    """
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(2, num, *shape))
    scales = 2.0 ** np.linspace(-spread, spread, num)
    values = (parts[0] + 1j * parts[1]) if dtype == jnp.complex64 else parts[0]
    found = [v * s for v, s in zip(values, scales, strict=True)] + [np.zeros(shape)]
    return [jnp.asarray(x).astype(dtype) for x in found]


def clipped_alone(tree, c=1.0):
    """Each leaf of it by its own L2 norm, in NumPy."""
    return [np.asarray(x) * oracles.hard(oracles.norm(np.asarray(x)), c) for x in tree]


def joined(monkeypatch):
    """The number of arrays that are reduced at once, each time."""
    counts = []
    reduced = _xla.each_reduced

    def counted(reduce, on_cpu, arrays, *rest):
        counts.append(len(arrays))
        return reduced(reduce, on_cpu, arrays, *rest)

    monkeypatch.setattr(_xla, "each_reduced", counted)
    jax.clear_caches()
    return counts


@pytest.mark.covering(
    ord=[1.0, 2.0, math.inf],
    dtype=DTYPES,
    shape=SHAPES,
    run=covering.RUNS,
)
def test_norms_as_of_each_alone(run, monkeypatch, ord, dtype, shape):
    tree = arrays(shape, dtype.given)
    counts = joined(monkeypatch)
    blocks = [norms.Block([x]) for x in tree]
    measure = strictly(lambda: norms.measure(blocks, ord))
    found = run(measure)()
    is_wide_or_small = "wide" in dtype.traits or tree[0].size < 1000
    assert (NUM_LEAVES + 1 in counts) == is_wide_or_small
    wide = jnp.complex128 if dtype.name == "complex64" else jnp.float64
    expected = np.array([oracles.norm(np.asarray(x).astype(wide), ord) for x in tree])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert expected[:-1].all() or not tree[0].size


@pytest.mark.covering(
    num=[NUM_LEAVES, 2 * _xla._STACKED + 1], ord=[1.0, 2.0], run=covering.RUNS
)
def test_some_leave_the_range(run, monkeypatch, ord, num):
    """Norms that overflow, or vanish, beside some that do neither; in several stacks."""
    counts = joined(monkeypatch)
    tree = arrays((31,), spread=120, num=num)
    np.random.default_rng(1).shuffle(tree)
    blocks = [norms.Block([x]) for x in tree]

    found = run(lambda: jnp.stack(norms.measure(blocks, ord)))()
    expected = np.array([oracles.norm(np.asarray(x), ord) for x in tree])
    seen = expected > 2.0**-50
    np.testing.assert_allclose(found[seen], expected[seen], rtol=1e-6)
    assert not np.any(found[expected < 2.0**-61])
    assert num + 1 in counts
    assert max(expected) ** 2 > float(np.finfo(np.float32).max)
    assert min(filter(None, expected)) ** 2 < float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("over", ["leaf", optclip.axes(0), optclip.units()])
def test_scopes_that_have_one_number_a_leaf(monkeypatch, over):
    counts = joined(monkeypatch)
    tree = arrays((6,))
    tx = optclip.clip_by(1.0, over=over)
    found, _ = jax.jit(tx.update)(tree, tx.init(tree))
    chex.assert_trees_all_close(found, clipped_alone(tree), rtol=1e-6)
    assert NUM_LEAVES + 1 in counts
    assert any((x != y).any() for x, y in zip(found, tree, strict=True))


@functools.cache
def traced_clip(num):
    tree = [jax.ShapeDtypeStruct((64,), jnp.float32)] * num
    return jax.jit(lambda t: functional.clip_by_norm(t, 1.0)).trace(tree)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_few_reductions_on_cpu(platform):
    """In stacks, in each of two passes; elsewhere a leaf is reduced where it lies."""
    num = 300
    text = traced_clip(num).lower(lowering_platforms=(platform,)).as_text()
    found = len(re.findall(r"stablehlo\.reduce\b", text))
    stacks = -(-num // _xla._STACKED)
    assert 2 * stacks <= found <= (2 * stacks if platform == "cpu" else 2 * num) + 20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_rows_are_one_copy_at_most(dtype):
    tree = [jax.ShapeDtypeStruct((1000,), dtype)] * 20
    program = jax.jit(lambda t: functional.clip_by_norm(t, 1.0)).lower(tree).compile()
    size = 20 * 1000 * jnp.dtype(dtype).itemsize
    # A second copy would be twice as much, and widened ones more.
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * size


def test_few_of_a_type_are_not(monkeypatch):
    """Nor slices, nor leaves that share a norm with others."""
    counts = joined(monkeypatch)
    tree = [jnp.ones(i // (MANY - 1) + 1) for i in range(NUM_LEAVES)]
    found = jax.jit(lambda t: functional.clip_by_norm(t, 0.5))(tree)
    assert float(found[-1][0]) < 0.5
    for clip, shape in (
        (lambda t: functional.clip_by_global_norm(t, 0.5), (3,)),
        (lambda t: functional.clip_by_norm(t, 0.5, axis=0), (3, 4)),
    ):
        jax.eval_shape(clip, arrays(shape))
    assert not counts


def test_derivatives_of_many_are_as_of_each_alone(monkeypatch):
    """Of many as of each alone, of both orders: the norm of zeros too."""
    counts = joined(monkeypatch)
    tree = arrays((3,), num=MANY)
    tx = optclip.clip_by_norm(1.0, response="smooth")
    along = [jnp.cos(jnp.arange(3.0) + i) for i in range(len(tree))]

    def derivatives(tree, along):
        def loss(tree):
            found, _ = tx.update(tree, tx.init(tree))
            return sum((x * jnp.arange(1.0, 4.0)).sum() ** 2 for x in found)

        return jax.jvp(jax.grad(loss), (tree,), (along,))

    derivatives = quick_jit(derivatives)
    together = derivatives(tree, along)
    assert MANY + 1 in counts
    for i, x in enumerate(tree):
        own = [part[i] for part in together]
        alone = [part[0] for part in derivatives([x], [along[i]])]
        chex.assert_trees_all_close(own, alone, rtol=2e-5, atol=2e-5)
        assert np.any(alone) or not np.any(x)


def test_many_are_reduced_at_once_under_vmap(monkeypatch):
    counts = joined(monkeypatch)
    tree = arrays((3,))
    batch = jax.tree.map(lambda x: jnp.stack([x, 100 * x]), tree)
    found = quick_jit(jax.vmap(lambda t: functional.clip_by_norm(t, 1.0)))(batch)
    for i, scale in enumerate((1, 100)):
        expected = clipped_alone([scale * x for x in tree])
        chex.assert_trees_all_close([x[i] for x in found], expected, rtol=1e-6)
    assert NUM_LEAVES + 1 in counts


def several_types():
    """Of two dtypes and two shapes, many of each, and some that have no like."""
    alike = [((3,), jnp.float32), ((3,), jnp.bfloat16), ((2, 2), jnp.float32)]
    tree = [x for kind in alike for x in arrays(*kind, num=MANY)] + [jnp.ones(7)]
    np.random.default_rng(0).shuffle(tree)
    return [*tree, jnp.full(5, 9.0)]


# What is dropped is measured apart, by flags.
POLICIES = [
    Kind("propagate", "propagate", ("all",)),
    Kind("zero", "zero", ("all",)),
    Kind("drop", "drop", ("some",)),
]
NORMS = [
    Kind("l2", "l2", ("sum",)),
    Kind("inf", "inf", ("maximum",)),
    Kind("3", 3.0, ("relative to the largest",)),
    Kind("rms", "rms", ("sum", "count")),
]


@pytest.mark.covering(policy=POLICIES, norm=NORMS, over=["leaf", optclip.units()])
def test_leaves_of_several_types_are_as_each_alone(policy, norm, over):
    """Each as alone, and so is what is recorded of it."""
    tree = several_types()
    tree[1] = tree[1].at[0].set(jnp.nan)
    tx = optclip.clip_by(
        1.0,
        over=over,
        norm=norm.given,
        nonfinite=policy.given,
        record="leaves",
        name="all",
    )
    update = quick_jit(lambda t: tx.update(t, tx.init(t)))
    found, state = update(tree)
    fields = ("clip_norm", "clip_coefficient", "clip_nonfinite")

    def recorded(state, i):
        return [getattr(state.clip_record["all"], field)[str(i)] for field in fields]

    for i, x in enumerate(tree):
        (expected,), alone = update([x])
        np.testing.assert_allclose(*map(np.float32, (found[i], expected)), rtol=1e-6)
        own, other = recorded(state, i), recorded(alone, 0)
        chex.assert_trees_all_close(own, other, rtol=1e-6)
    assert not np.array_equal(found[-1], tree[-1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_only_whole_leaves_are_put_together(monkeypatch, check_vma):
    """Those that devices share out are not; those that each holds are, on each."""
    counts = joined(monkeypatch)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    tree = {"split": arrays((8,)), "whole": arrays((3,))}
    specs = {"split": P("x"), "whole": P()}
    clip = jax.shard_map(
        lambda t: functional.clip_by_norm(
            t, 1.0, axis_name=None if check_vma else specs
        ),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
        check_vma=check_vma,
    )
    found = quick_jit(clip)(tree)
    assert set(counts) == {NUM_LEAVES + 1}
    expected = {name: clipped_alone(leaves) for name, leaves in tree.items()}
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_on_an_explicit_mesh(monkeypatch):
    """Nothing that may be split is put together with others."""
    counts = joined(monkeypatch)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    place = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        tree = jax.device_put(arrays((8,), num=MANY), place)
        found = quick_jit(lambda t: functional.clip_by_norm(t, 1.0))(tree)
    assert not counts
    assert all(x.sharding == place for x in found)
    chex.assert_trees_all_close(found, clipped_alone(tree), rtol=1e-6)
