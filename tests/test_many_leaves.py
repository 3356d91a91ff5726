"""Many small leaves of one type, each with a norm of its own: reduced at once on CPU."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import _alike, functional, norms
from optclip._alike import MANY
from tests import oracles
from tests.helpers import strictly

NUM_LEAVES = 2 * MANY
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.float8_e4m3fn]


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


def joined(monkeypatch):
    """The number of arrays that are reduced at once, each time."""
    counts = []
    reduced = _alike.reduced

    def counted(reduce, on_cpu, terms, scales):
        counts.append(len(terms))
        return reduced(reduce, on_cpu, terms, scales)

    monkeypatch.setattr(_alike, "reduced", counted)
    jax.clear_caches()
    return counts


@pytest.mark.parametrize("ord", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5), (4095,)])
def test_norms_to_two_units(run, monkeypatch, ord, dtype, shape):
    tree = arrays(shape, dtype)
    counts = joined(monkeypatch)
    blocks = [norms.Block([x]) for x in tree]
    measure = strictly(lambda: [m.norm for m in norms.measure(blocks, norms.Norm(ord))])
    found = np.asarray(run(measure)(), np.float64)
    is_wide_or_small = tree[0].dtype.itemsize >= 4 or tree[0].size < 1000
    assert (NUM_LEAVES + 1 in counts) == is_wide_or_small
    wide = jnp.complex128 if dtype == jnp.complex64 else jnp.float64
    expected = np.array([oracles.norm(np.asarray(x).astype(wide), ord) for x in tree])
    assert (np.abs(found - expected) <= 2 * np.spacing(np.float32(expected))).all()
    assert expected[:-1].all() or not tree[0].size


@pytest.mark.parametrize("num", [NUM_LEAVES, 2 * _alike._LOT + 1])
@pytest.mark.parametrize("ord", [1.0, 2.0])
def test_some_leave_the_range(run, monkeypatch, ord, num):
    """Norms that overflow, or vanish, beside some that do neither; in several lots."""
    counts = joined(monkeypatch)
    tree = arrays((31,), spread=120, num=num)
    np.random.default_rng(1).shuffle(tree)
    blocks = [norms.Block([x]) for x in tree]
    measured = run(lambda: norms.measure(blocks, norms.Norm(ord)))()
    found = [np.float64(m.root) * np.float64(m.unit) for m in measured]
    expected = [oracles.norm(np.asarray(x), ord) for x in tree]
    np.testing.assert_allclose(found, expected, rtol=3e-7)
    assert num + 1 in counts
    assert max(expected) ** 2 > float(np.finfo(np.float32).max)
    assert min(filter(None, expected)) ** 2 < float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("over", [optclip.LEAF, optclip.axes(0), optclip.units()])
def test_scopes_that_have_one_number_a_leaf(run, monkeypatch, over):
    counts = joined(monkeypatch)
    tree = arrays((6,))
    tx = optclip.clip_by(1.0, over=over)
    found, _ = run(tx.update)(tree, tx.init(tree))
    for x, clipped in zip(tree, found, strict=True):
        expected = np.asarray(x) * oracles.hard(oracles.norm(np.asarray(x)), 1.0)
        np.testing.assert_allclose(clipped, expected, rtol=1e-6)
    assert NUM_LEAVES + 1 in counts
    assert any((x != y).any() for x, y in zip(found, tree, strict=True))


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_few_reductions_on_cpu(platform):
    """In lots, in each of two passes; elsewhere a leaf is reduced where it lies."""
    tree = [jax.ShapeDtypeStruct((64,), jnp.float32)] * 2000
    traced = jax.jit(lambda t: functional.clip_by_norm(t, 1.0)).trace(tree)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = len(re.findall(r"stablehlo\.reduce\b", text))
    lots = -(-len(tree) // _alike._LOT)
    assert 2 * lots <= found <= (2 * lots if platform == "cpu" else 4000) + 20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_rows_are_one_copy(dtype):
    tree = [jax.ShapeDtypeStruct((1000,), dtype)] * 100
    program = jax.jit(lambda t: functional.clip_by_norm(t, 1.0)).lower(tree).compile()
    size = 100 * 1000 * jnp.dtype(dtype).itemsize
    assert 0.5 * size < program.memory_analysis().temp_size_in_bytes < 1.1 * size


def test_few_of_a_type_are_not(run, monkeypatch):
    """Nor slices, nor leaves that share a norm with others."""
    counts = joined(monkeypatch)
    tree = [jnp.ones(i // (MANY - 1) + 1) for i in range(NUM_LEAVES)]
    found = run(lambda t: functional.clip_by_norm(t, 0.5))(tree)
    assert float(found[-1][0]) < 0.5
    run(lambda t: functional.clip_by_global_norm(t, 0.5))(arrays((3,)))
    run(lambda t: functional.clip_by_norm(t, 0.5, axis=0))(arrays((3, 4)))
    assert not counts


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives(monkeypatch, order):
    """Of many as of each alone: the norm of zeros too."""
    counts = joined(monkeypatch)
    tree = arrays((3,))
    tx = optclip.clip_by_norm(1.0, response="smooth")

    def clip(tree):
        return tx.update(tree, tx.init(tree))[0]

    def loss(tree, each):
        clipped = [clip([x])[0] for x in tree] if each else clip(tree)
        weights = jnp.arange(1.0, 4.0)
        return sum((x * weights).sum() ** 2 for x in clipped)

    def derivative(each):
        found = jax.grad(loss)
        if order == 2:
            first = found
            found = jax.grad(lambda t, e: sum((g**2).sum() for g in first(t, e)))
        return jax.jit(found, static_argnums=1)(tree, each)

    pairs = list(zip(derivative(False), derivative(True), strict=True))
    for together, alone in pairs:
        np.testing.assert_allclose(together, alone, rtol=2e-5, atol=2e-5)
    assert all(np.any(alone) for _, alone in pairs[:-1])
    assert NUM_LEAVES + 1 in counts


def test_under_vmap(monkeypatch):
    counts = joined(monkeypatch)
    tree = arrays((3,))
    batch = jax.tree.map(lambda x: jnp.stack([x, 100 * x]), tree)
    found = jax.jit(jax.vmap(lambda t: functional.clip_by_norm(t, 1.0)))(batch)
    for i, scale in enumerate((1, 100)):
        expected = functional.clip_by_norm([scale * x for x in tree], 1.0)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-6)
    assert NUM_LEAVES + 1 in counts


def several_types():
    """Of two dtypes and two shapes, many of each, and some that have no like."""
    tree = [*arrays((3,)), *arrays((3,), jnp.bfloat16), *arrays((2, 2)), jnp.ones(7)]
    np.random.default_rng(0).shuffle(tree)
    return [*tree, jnp.full(5, 9.0)]


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
@pytest.mark.parametrize("norm", [norms.L2, norms.INF, norms.Norm(3.0), norms.RMS])
@pytest.mark.parametrize("over", [optclip.LEAF, optclip.units()])
def test_of_several_types(run, policy, norm, over):
    """Each as alone, and so is what is recorded of it."""
    tree = several_types()
    tree[1] = tree[1].at[0].set(jnp.nan)
    tx = optclip.clip_by(
        1.0, over=over, norm=norm, nonfinite=policy, record="leaves", name="all"
    )
    update = run(lambda t: tx.update(t, tx.init(t)))
    found, state = update(tree)
    for i, x in enumerate(tree):
        (expected,), alone = update([x])
        np.testing.assert_allclose(*map(np.float32, (found[i], expected)), rtol=1e-6)
        for field in ("clip_norm", "clip_coefficient", "clip_nonfinite"):
            values = [getattr(s.clip_record["all"], field) for s in (state, alone)]
            np.testing.assert_allclose(values[0][i], values[1][0], rtol=1e-6)
    assert not np.array_equal(found[-1], tree[-1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(monkeypatch, check_vma):
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
    found = jax.jit(clip)(tree)
    assert set(counts) == {NUM_LEAVES + 1}
    alone = [functional.clip_by_norm([x], 1.0)[0] for x in jax.tree.leaves(tree)]
    for x, y in zip(jax.tree.leaves(found), alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_on_an_explicit_mesh(monkeypatch):
    """Nothing that may be split is put together with others."""
    counts = joined(monkeypatch)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    place = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        tree = jax.device_put(arrays((8,)), place)
        found = jax.jit(lambda t: functional.clip_by_norm(t, 1.0))(tree)
    assert not counts
    for x, clipped in zip(tree, found, strict=True):
        assert clipped.sharding == place
        expected = functional.clip_by_norm([np.asarray(x)], 1.0)[0]
        np.testing.assert_allclose(clipped, expected, rtol=1e-6)
