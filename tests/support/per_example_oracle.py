"""Compute norms and weighted sums of per-example gradients with float64 `jax.grad`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from optclip._per_example._ghost._formulas import Scaled, shifted
from optclip._per_example._ghost._ghost_backward import (
    backward,
    scaled_squares,
    weighted_gradients,
)

# Private imports: `clipped_grad` compiles a backward pass per norm.
from optclip._per_example._ghost._sites import traced
from tests.support import compiler

# For programs that run once; also with `--full`.
always_quick_jit = functools.partial(jax.jit, compiler_options=compiler.UNOPTIMIZED)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def widened(tree):
    return jax.tree.map(lambda x: np.asarray(x, float) if is_float(x) else x, tree)


def gradients(loss, params, examples):
    """Return losses and the gradients of each leaf."""
    with jax.enable_x64(True):
        params, examples = widened(params), widened(examples)
        of_one = jax.value_and_grad(loss)
        values, grads = always_quick_jit(jax.vmap(of_one, (None, 0)))(params, examples)
        return np.asarray(values), [np.float64(x) for x in jax.tree.leaves(grads)]


def norm(grads):
    return np.sqrt((grads.reshape(len(grads), -1) ** 2).sum(axis=1))


def ghost(loss, params, examples, weights, run):
    """Return losses, norms and weighted sums, without per-example gradients."""

    def function(*arguments):
        back = backward(lambda *given: (loss(*given), None), *arguments)
        squares = jax.tree.leaves(
            scaled_squares(back), is_leaf=lambda x: isinstance(x, Scaled)
        )
        sums = weighted_gradients(back, range(len(back.leaves)), weights)
        return (
            back.values,
            [shifted(jnp.sqrt(x.square), x.exponent) for x in squares],
            sums,
        )

    return jax.tree.map(np.float64, run(function)(params, examples))


def check(loss, params, examples, rtol=1e-6, run=always_quick_jit, least=1e-3):
    """Compare to within `rtol`; near zero, `rtol * least` times the largest norm.

    Weighted sums, in which the weight of the first example is 0, are rounded more.
    """
    expected_values, grads = gradients(loss, params, examples)
    weights = np.linspace(0, 1, len(expected_values))
    values, norms, sums = ghost(loss, params, examples, weights, run)
    np.testing.assert_allclose(values, expected_values, rtol=rtol)
    atol = least * rtol * max(1e-2, *(np.nanmax(norm(x)) for x in grads))
    for measured, want in zip(norms, map(norm, grads), strict=True):
        np.testing.assert_allclose(measured, want, rtol=rtol, atol=atol)
    expected = [np.tensordot(weights, x, 1) for x in grads]
    for total, want in zip(sums, expected, strict=True):
        size = norm(want[None])[0]
        np.testing.assert_allclose(total, want, atol=20 * rtol * size + atol)


def kinds_of(loss, params, examples):
    """Return how ghost norms measure each leaf."""
    leaves, treedef = jax.tree.flatten(params)
    example = jax.tree.map(lambda x: jnp.asarray(x)[0], examples)
    params = treedef.unflatten([jnp.asarray(x) for x in leaves])
    trace = traced(lambda *given: (loss(*given), None), params, example)
    return treedef.unflatten(trace.kinds)
