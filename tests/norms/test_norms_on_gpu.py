"""The formula for norms on a GPU, run on a CPU, is accurate and guards the range."""

import jax
import numpy as np
import pytest

from optclip import norms

# Private, since only a GPU takes this path.
from optclip._arrays import _xla
from optclip._norms import _sums

# A prime number of elements, which has no rows of one length; small leaves of one type
# and of others; columns that are added in parts; and a long axis between two others.
SHAPES = [(100_003,), (640, 32), (2, 4_096, 3), *[(40,)] * 40, (7, 9), ()]
BLOCKS = {
    "tree": [list(range(len(SHAPES)))],
    "leaves": [[i] for i in range(len(SHAPES))],
    "groups": [list(range(0, len(SHAPES), 2)), list(range(1, len(SHAPES), 2))],
}


def drawn(dtype, size):
    rng = np.random.default_rng(0)
    return [(size * rng.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def compiled(blocks, p, monkeypatch):
    """Return a function of the leaves, their norms by the formula for GPUs."""
    monkeypatch.setattr(_xla, "on_gpu", lambda on_gpu, _, arrays: on_gpu(arrays))
    # Not compiled, since JAX would reuse a program that another test has compiled.
    monkeypatch.setattr(_sums, "_compiled", _sums._compiled.__wrapped__)

    def norm_of(leaves):
        grouped = [
            norms.Block([leaves[i] for i in index], axis) for index, axis in blocks
        ]
        return norms.measure(grouped, p)

    return jax.jit(norm_of)


def measured(leaves, blocks, p, monkeypatch):
    """Return norms by the formula for GPUs, and exact ones."""
    wide = [np.abs(np.asarray(x, np.complex128)) for x in leaves]
    exact = [
        np.sum(wide[index[0]] ** p, axis, keepdims=True) ** (1 / p)
        if axis
        else sum(np.sum(wide[i] ** p) for i in index) ** (1 / p)
        for index, axis in blocks
    ]
    return compiled(blocks, p, monkeypatch)(leaves), exact


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "size", "p"),
    [
        ("float32", 1.0, 2.0), ("float32", 1e30, 2.0), ("float32", 1.0, 1.0),
        ("float16", 1e4, 2.0), ("complex64", 1e30, 2.0),
    ],
)  # fmt: skip
def test_norm_on_gpu_is_accurate(dtype, size, p, blocks, monkeypatch):
    index = [(block, None) for block in BLOCKS[blocks]]
    got, exact = measured(drawn(dtype, size), index, p, monkeypatch)
    np.testing.assert_allclose(got, exact, rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e30])
def test_norm_of_slices_on_gpu_is_accurate(size, monkeypatch):
    axes = [([1], (0,)), ([1], (1,)), ([2], (1,)), ([0], (0,)), ([3], (0,))]
    got, exact = measured(drawn("float32", size), axes, 2.0, monkeypatch)
    for one, other in zip(got, exact, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_norm_on_gpu_of_nan_and_inf_is_not_finite(monkeypatch):
    leaves = drawn("float32", 1.0)
    leaves[0][5], leaves[5][7] = np.nan, np.inf
    blocks = [(block, None) for block in BLOCKS["leaves"]]
    got, _ = measured(leaves, blocks, 2.0, monkeypatch)
    assert np.isnan(got[0])
    assert got[5] == np.inf
    assert np.isfinite(np.delete(got, [0, 5])).all()


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_norm_on_gpu_has_exact_derivatives_also_in_a_batch(p, monkeypatch):
    norm_of = compiled([(BLOCKS["tree"][0], None)], p, monkeypatch)
    leaves, twice = drawn("float32", 1.0), drawn("float32", 2.0)
    batch = [np.stack(pair) for pair in zip(leaves, twice, strict=True)]
    slopes = jax.jit(jax.vmap(jax.grad(lambda x: norm_of(x)[0])))(batch)
    size = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in leaves))
    for slope, x in zip(slopes, leaves, strict=True):
        exact = np.sign(x) if p == 1 else x / size
        np.testing.assert_allclose(slope, [exact, exact], rtol=1e-5)
