"""The spectral norm by power iteration: its error bound, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip.norms import Spectral
from tests.support.helpers import quick_jit

SHAPE = (12, 20)
by_iteration = functools.partial(
    optclip.clip_by_spectral_norm, method="power_iteration"
)


def spectrum(rng, values):
    """Return a float64 matrix with these singular values, and its first left vector."""
    left = np.linalg.qr(rng.standard_normal((SHAPE[0], SHAPE[0])))[0]
    right = np.linalg.qr(rng.standard_normal((SHAPE[1], SHAPE[0])))[0]
    return (left * values) @ right.T, left[:, 0]


def with_top(top, seed=1):
    """Return a float32 matrix with one singular value above eleven values of 1."""
    rng = np.random.default_rng(seed)
    return spectrum(rng, np.r_[top, np.ones(11)])[0].astype(np.float32)


def started(tx, params, vector):
    """Return a state with this vector as that of the previous step."""
    state = tx.init(params)
    unit = np.float32(vector / np.linalg.norm(vector))
    ((key, (*rules, memory)),) = state.clip_memory.items()
    memory = jax.tree.map(lambda _: jnp.asarray(unit), memory)
    return state._replace(clip_memory={key: [*rules, memory]})


def spectral_norm(x):
    return np.linalg.norm(np.asarray(x).astype(np.complex128), 2)


@pytest.mark.parametrize("steps", [1, 3])
def test_estimate_is_within_documented_bound(steps):
    rng = np.random.default_rng(steps)
    tx = by_iteration(0.5, steps=steps)
    update = quick_jit(tx.update)
    missed = 0.0
    # Without a gap it is hardest for power iteration. All rows are about as long.
    for values in (np.linspace(1, 0.9, 12), np.r_[5.0, 4.99, np.ones(10)]):
        for _ in range(8):
            x, first = spectrum(rng, values)
            start = rng.standard_normal(SHAPE[0])
            cosine = abs(first @ start) / np.linalg.norm(start)
            clipped, state = update(np.float32(x), started(tx, np.float32(x), start))
            fraction = float(optclip.metrics(state)["clip/norm"]) / values.max()
            assert fraction <= 1 + 1e-5
            assert fraction >= cosine ** (1 / (2 * steps + 1)) - 1e-5
            assert spectral_norm(clipped) == pytest.approx(0.5 / fraction, rel=1e-5)
            missed = max(missed, 1 - fraction)
    # An estimate that is exact would not test the bound.
    assert missed > 1e-3


def test_spike_orthogonal_to_memory_is_clipped_in_its_step():
    rng = np.random.default_rng(0)
    x, first = spectrum(rng, np.r_[1e3, np.full(11, 0.1)])
    other = rng.standard_normal(SHAPE[0])
    other -= (other @ first) * first
    tx = by_iteration(1.0)
    clipped, _ = quick_jit(tx.update)(np.float32(x), started(tx, np.float32(x), other))
    assert spectral_norm(clipped) == pytest.approx(1, rel=1e-4)


def test_matrix_without_direction_keeps_memory():
    x, first = spectrum(np.random.default_rng(2), np.r_[3.0, np.ones(11)])
    tx = by_iteration(1.0, nonfinite="zero")
    update, state = quick_jit(tx.update), started(tx, np.float32(x), first)
    before = jax.tree.leaves(state.clip_memory)
    for bad in (0.0, np.nan, np.inf):
        out, after = update(np.full(SHAPE, bad, np.float32), state)
        np.testing.assert_array_equal(out, np.zeros(SHAPE))
        for one, other in zip(before, jax.tree.leaves(after.clip_memory), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_skip_by_iteration_skips_by_estimated_norm():
    norm = Spectral(method="power_iteration", steps=20)
    tx = optclip.skip(optax.sgd(1.0), max_norm=2.5, over="leaf", norm=norm)
    x = with_top(3.0)
    update = quick_jit(tx.update)
    out, state = update(x, tx.init(x), x)
    assert not np.any(out)
    out, _ = update(0.5 * x, state, x)
    np.testing.assert_array_equal(out, -0.5 * x)


def test_power_iteration_without_memory_is_exact():
    """A rule may measure parameters, for which there is no previous vector."""
    x = with_top(3.0)
    tx = by_iteration(optclip.thresholds.relative_to_params(0.5), steps=30)
    clipped, _ = quick_jit(tx.update)(x, tx.init(x), x)
    assert spectral_norm(clipped) == pytest.approx(1.5, rel=1e-3)


def test_power_iteration_under_jit_keeps_vectors_with_their_matrices():
    """`jit` sorts the keys of the memory, "10" before "2"; the last leaf is a stack."""
    tops = np.arange(1.0, 13.0)
    tree = [with_top(top, seed=i) for i, top in enumerate(tops)]
    tree[-1] = np.stack([with_top(2.0), tree[-1]])
    tx = by_iteration(2.5, record="leaves")
    update, state = quick_jit(tx.update), tx.init(tree)
    for _ in range(30):
        clipped, state = update(tree, state)
    np.testing.assert_array_equal(clipped[-1][0], tree[-1][0])
    assert spectral_norm(clipped[-1][1]) == pytest.approx(2.5, rel=1e-3)
    metrics = optclip.metrics(state)
    norms = [metrics[f"clip/norm/{i}"] for i in range(len(tree))]
    np.testing.assert_allclose(norms, tops, rtol=1e-3)


def test_power_iteration_memory_of_other_matrices_raises(run):
    tx = by_iteration(1.0, record=False)
    state = tx.init({"a": with_top(3.0)})
    words = r"other leaves.*\['b'\].*key is \['1_.*one structure"
    with pytest.raises(ValueError, match=words):
        run(lambda: tx.update({"b": with_top(3.0)}, state))()
