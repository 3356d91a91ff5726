"""Norms and weighted sums of each example's gradient by `jax.grad` in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Private: `clipped_grad` takes no weights and compiles a backward pass for each norm.
from optclip.per_example._ghost._formulas import Scaled
from optclip.per_example._ghost._ghost_backward import backward, weighted_gradients
from optclip.per_example._ghost._squares import scaled_squares
from tests.support import compiler

# For a program that runs once, with `--full` too.
in_haste = functools.partial(jax.jit, compiler_options=compiler.UNOPTIMIZED)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def widened(tree):
    return jax.tree.map(lambda x: np.asarray(x, float) if is_float(x) else x, tree)


def gradients(loss, params, examples):
    """Losses, and the gradients of each leaf; zeros for integers."""
    with jax.enable_x64(True):
        params, examples = widened(params), widened(examples)
        of_one = jax.value_and_grad(loss, allow_int=True)
        values, grads = in_haste(jax.vmap(of_one, (None, 0)))(params, examples)
        leaves = jax.tree.leaves(grads)
        return np.asarray(values), [
            np.zeros(x.shape) if x.dtype == jax.dtypes.float0 else np.float64(x)
            for x in leaves
        ]


def norm(grads):
    return np.sqrt((grads.reshape(len(grads), -1) ** 2).sum(axis=1))


def ghost(loss, params, examples, weights, run=jax.jit):
    """Losses, norms and the weighted sums of gradients, without gradients."""

    def function(*given):
        back = backward(loss, *given)
        squares = jax.tree.leaves(
            scaled_squares(back), is_leaf=lambda x: isinstance(x, Scaled)
        )
        which = [i for i, x in enumerate(back.leaves) if is_float(x)]
        sums = weighted_gradients(back, which, weights)
        return back.values, [x.norm() for x in squares], sums

    return jax.tree.map(np.float64, run(function)(params, examples))


def check(loss, params, examples, rtol=1e-6, run=jax.jit, least=1e-3):
    """Accurate to `rtol`; near zero to `least` of the largest norm, times `rtol`.

    A weighted sum, in which the first example has no part, is rounded more.
    """
    values, grads = gradients(loss, params, examples)
    weights = np.linspace(0, 1, len(values))
    found_values, norms, sums = ghost(loss, params, examples, weights, run)
    np.testing.assert_allclose(found_values, values, rtol=rtol)
    atol = least * rtol * max(1e-2, *(np.nanmax(norm(x)) for x in grads))
    for one, right in zip(norms, map(norm, grads), strict=True):
        np.testing.assert_allclose(one, right, rtol=rtol, atol=atol)
    expected = [
        np.tensordot(weights, x, 1)
        for x, leaf in zip(grads, jax.tree.leaves(params), strict=True)
        if is_float(leaf)
    ]
    for one, right in zip(sums, expected, strict=True):
        size = norm(right[None])[0]
        np.testing.assert_allclose(one, right, atol=20 * rtol * size + atol)
