"""Norms of each example's gradient by `jax.grad` in float64, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np

from optclip.per_example import _ghost


def widened(tree):
    def wide(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, jnp.float64) if is_float else x

    return jax.tree.map(wide, tree)


def norms(loss, params, examples):
    """Losses, and a list of arrays with one norm for each example."""
    with jax.enable_x64(True):
        params, examples = widened(params), widened(examples)
        of_one = jax.value_and_grad(loss, allow_int=True)
        values, grads = jax.jit(jax.vmap(of_one, (None, 0)))(params, examples)
        return np.asarray(values), [norm(x) for x in jax.tree.leaves(grads)]


def norm(grads):
    if grads.dtype == jax.dtypes.float0:
        return np.zeros(len(grads))
    wide = np.asarray(grads, np.float64).reshape(len(grads), -1)
    return np.sqrt((wide**2).sum(axis=1))


def ghost(loss, params, examples, run=jax.jit):
    """The same by ghost norms."""
    found = run(lambda *given: _ghost.ghost_squares(loss, *given))(params, examples)
    values, _, squares = found
    return values, [
        np.sqrt(np.asarray(x, np.float64)) for x in jax.tree.leaves(squares)
    ]


def check(loss, params, examples, rtol=1e-6, run=jax.jit, least=1e-3):
    """Right to `rtol`, and where a gradient is nearly 0 to `least` of that of all."""
    values, expected = norms(loss, params, examples)
    found_values, found = ghost(loss, params, examples, run)
    np.testing.assert_allclose(found_values, values, rtol=rtol)
    atol = least * rtol * max(1e-2, *map(np.nanmax, expected))
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=rtol, atol=atol)
