"""Norms of each example's gradient by `jax.grad` in float64, leaf by leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from optclip.per_example._ghost import _squares
from optclip.per_example._ghost._backward import backward, weighted_gradients
from optclip.per_example._ghost._formulas import Scaled
from optclip.per_example._ghost._plan import is_inexact

# XLA works less at a program that runs once: it compiles in a fifth of the time.
HASTE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.cache
def _is_known(name):
    """Whether the compiler has this option: its versions differ."""
    try:
        jax.jit(lambda: 0, compiler_options={name: HASTE[name]})()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def in_haste(function):
    """Like `jax.jit`, for what runs once."""
    known = {name: value for name, value in HASTE.items() if _is_known(name)}
    return jax.jit(function, compiler_options=known)


def widened(tree):
    def wide(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, jnp.float64) if is_float else x

    return jax.tree.map(wide, tree)


def norms(loss, params, examples):
    """Losses, and a list of arrays with one norm for each example."""
    values, grads = gradients(loss, params, examples)
    return values, [norm(x) for x in grads]


def gradients(loss, params, examples):
    """Losses, and the gradients of each leaf; zeros for integers."""
    with jax.enable_x64(True):
        params, examples = widened(params), widened(examples)
        of_one = jax.value_and_grad(loss, allow_int=True)
        values, grads = in_haste(jax.vmap(of_one, (None, 0)))(params, examples)
        is_float = [x.dtype != jax.dtypes.float0 for x in jax.tree.leaves(grads)]
        pairs = zip(jax.tree.leaves(grads), is_float, strict=True)
        wide = [np.float64(x) if live else np.zeros(x.shape) for x, live in pairs]
        return np.asarray(values), wide


def norm(grads):
    return np.sqrt((grads.reshape(len(grads), -1) ** 2).sum(axis=1))


def scaled_squares(loss, params, examples, has_aux=False):
    """Losses, aux, and the squared norms of each leaf, with their exponents."""
    back = backward(loss, params, examples, has_aux=has_aux)
    return back.values, back.aux, _squares.scaled_squares(back)


def ghost(loss, params, examples, weights, run=jax.jit):
    """Losses, norms and the weighted sums of gradients, without gradients."""

    def function(*given):
        back = backward(loss, *given)
        squares = jax.tree.leaves(
            _squares.scaled_squares(back), is_leaf=lambda x: isinstance(x, Scaled)
        )
        which = [i for i, x in enumerate(back.leaves) if is_inexact(x)]
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
        if is_inexact(jnp.asarray(leaf))
    ]
    for one, right in zip(sums, expected, strict=True):
        size = norm(right[None])[0]
        np.testing.assert_allclose(one, right, atol=20 * rtol * size + atol)
