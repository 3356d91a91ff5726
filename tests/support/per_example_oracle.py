"""Norms of each example's gradient by `jax.grad` in float64, leaf by leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from optclip.per_example._ghost import _squares
from optclip.per_example._ghost._backward import backward
from optclip.per_example._ghost._formulas import Scaled

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
    with jax.enable_x64(True):
        params, examples = widened(params), widened(examples)
        of_one = jax.value_and_grad(loss, allow_int=True)
        values, grads = in_haste(jax.vmap(of_one, (None, 0)))(params, examples)
        return np.asarray(values), [norm(x) for x in jax.tree.leaves(grads)]


def norm(grads):
    if grads.dtype == jax.dtypes.float0:
        return np.zeros(len(grads))
    wide = np.asarray(grads, np.float64).reshape(len(grads), -1)
    return np.sqrt((wide**2).sum(axis=1))


def scaled_squares(loss, params, examples, has_aux=False):
    """Losses, aux, and the squared norms of each leaf, with their exponents."""
    back = backward(loss, params, examples, has_aux=has_aux)
    return back.values, back.aux, _squares.scaled_squares(back)


def ghost(loss, params, examples, run=jax.jit):
    """The same by ghost norms."""

    def normed(*given):
        values, _, squares = scaled_squares(loss, *given)
        leaves = jax.tree.leaves(squares, is_leaf=lambda x: isinstance(x, Scaled))
        return values, [x.norm() for x in leaves]

    values, found = run(normed)(params, examples)
    return values, [np.asarray(x, np.float64) for x in found]


def check(loss, params, examples, rtol=1e-6, run=jax.jit, least=1e-3):
    """Right to `rtol`, and where a gradient is nearly 0 to `least` of that of all."""
    values, expected = norms(loss, params, examples)
    found_values, found = ghost(loss, params, examples, run)
    np.testing.assert_allclose(found_values, values, rtol=rtol)
    atol = least * rtol * max(1e-2, *map(np.nanmax, expected))
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=rtol, atol=atol)
