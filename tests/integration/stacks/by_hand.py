"""Check training runs, and steps of clipped SGD with NumPy in float64."""

from typing import Any

import jax
import numpy as np

import optclip


def wide(tree: Any) -> list[np.ndarray]:
    """Convert the leaves to float64."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def norm(tree: Any) -> float:
    """Return the L2 norm of all leaves."""
    return float(np.sqrt(sum((leaf**2).sum() for leaf in wide(tree))))


def check_trained(losses: list[float], opt_state: Any) -> None:
    """Check that the loss fell below half, and that some steps were clipped."""
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 2
    logged = optclip.metrics(opt_state)
    assert 0 < logged["clip/rate"] < 1
    assert logged["clip/nonfinite"] == 0


def check_sgd_step(before: Any, after: Any, grads: Any, rate: float) -> None:
    """Check that the step is SGD on larger gradients clipped to 1."""
    assert norm(grads) > 2
    steps = [-rate * leaf / norm(grads) for leaf in wide(grads)]
    moves = [b - a for a, b in zip(wide(before), wide(after), strict=True)]
    # The tolerance is the error of the difference of float32 parameters of about 1.
    for step, move in zip(steps, moves, strict=True):
        np.testing.assert_allclose(move, step, rtol=1e-4, atol=5e-7)
    assert np.isclose(norm(moves), rate, rtol=1e-4)
