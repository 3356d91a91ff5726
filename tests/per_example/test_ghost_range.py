"""Ghost norms where squares overflow, vanish or cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optclip.per_example import norms
from tests.support import per_example_oracle

T, K, P = 3, 32, 8


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def loss(p, example):
    """Compute a loss with gradients `x^T d` (matrix) and sums of `d` (bias, rows)."""
    x, d, ids = example
    return jnp.sum((x @ p["w"] + p["b"] + p["rows"][ids]) * d)


PARAMS = {
    "w": np.zeros((K, P), np.float32),
    "b": np.zeros(P, np.float32),
    "rows": np.zeros((9, P), np.float32),
}
IDS = np.array([[1, 1, 2]])
NORMS = {over: norms(loss, method="ghost", over=over) for over in ("leaf", "tree")}
RUN = {over: jax.jit(f) for over, f in NORMS.items()}


def found_and_expected(x, d):
    """Norms of each leaf and the tree for one example, and those in float64."""
    x, d = (np.asarray(each, np.float32) for each in (x, d))
    (_, found), (_, whole) = (f(PARAMS, (x[None], d[None], IDS)) for f in RUN.values())
    x, d = np.float64(x), np.float64(d)
    rows = [d[0] + d[1], d[2]]
    expected = {"w": x.T @ d, "b": d.sum(0), "rows": rows}
    expected = {name: np.linalg.norm(g) for name, g in expected.items()}
    expected["tree"] = np.hypot.reduce([*expected.values()])
    return {
        k: float(norm[0]) for k, norm in (found | {"tree": whole}).items()
    }, expected


@pytest.mark.parametrize(
    ("of_x", "of_d"),
    [
        (1, 1), (0, 0), (1e-25, 1e15), (1e25, 1e-20), (1e10, 1e20), (1e-12, 1e-6),
        (1, 1e30), (1e20, 1e20), (1e-20, 1e-20), (1e-30, 1e20), (1e-30, 1e30),
        # Leaves of unequal size.
        (1e25, 1e-15), (0, 1e15), (1e-20, 1e10),
    ],
)  # fmt: skip
def test_ghost_norm_of_any_size_is_accurate_or_inf_or_0(of_x, of_d):
    found, expected = found_and_expected(
        normal(T, K) * of_x, normal(T, P, seed=1) * of_d
    )
    for name, right in expected.items():
        if right < 2.0**-60:
            right = 0
        elif right > np.finfo(np.float32).max:
            right = np.inf
        np.testing.assert_allclose(found[name], right, rtol=1e-6)


def test_ghost_norm_ignores_overflow_at_position_without_activation():
    """The squares of its cotangent overflow, but it does not enter the gradient."""
    x, d = normal(T, K), normal(T, P, seed=1)
    x[0], d[0] = 0, 1e30
    x[1], d[1] = 1e-20 * x[1], 1e20 * d[1]
    d[2] = 0
    x[2] *= 1e30
    found, expected = found_and_expected(x, d)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_ghost_norm_of_nonfinite_data_is_nonfinite(bad, place):
    arrays = [normal(T, K), normal(T, P, seed=1)]
    arrays[place][1, 2] = bad
    with np.errstate(invalid="ignore"):
        found, _ = found_and_expected(*arrays)
    assert not np.isfinite(found["w"])
    assert np.isfinite(found["b"]) == (place == 0)


@pytest.mark.parametrize("rest", [0, 1e-6, 1e-4, 1e-2, 0.1, 0.5])
def test_ghost_norm_of_canceling_positions_keeps_precision(rest):
    """As accurate as float32; products would keep half of the digits."""
    x, d = normal(T, K), normal(T, P, seed=1)
    x[1], d[1] = x[0] + rest * x[1], -d[0]
    d[2] *= rest
    example = (x[None], d[None], IDS)
    assert per_example_oracle.kinds_of(loss, PARAMS, example)["w"] == "formula"
    found, expected = found_and_expected(x, d)
    least = 1e-7 * np.linalg.norm(x) * np.linalg.norm(d)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6, atol=least)
