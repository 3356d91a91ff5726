"""Provide trees to clip, comparisons, and functions without implicit promotion."""

import contextlib
import functools
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

import optclip
from tests.support import compiler

# All 8-bit formats with a zero and a sign.
FP8 = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
]
TINY = float(np.finfo(np.float32).tiny)


def unwrapped(text):
    """Return the lines of a text that the package wrapped, after a check of the width."""
    lines = text.split("\n")
    assert all(len(x) <= 80 or x.startswith(" ") for x in lines), text
    return re.sub(r"\n   (?![ >\d]*%  )(?=\S)", " ", text).split("\n")


@contextlib.contextmanager
def compilations():
    """List the compilations inside the context."""
    events = []

    def listen(event, *args, **kwargs):
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def without_promotion(function):
    """Disallow implicit dtype and rank promotion in `function`; optax's code fails."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            return function(*args, **kwargs)

    return run


def tx_without_promotion(tx: optax.GradientTransformationExtraArgs):
    return optax.GradientTransformationExtraArgs(
        without_promotion(tx.init), without_promotion(tx.update)
    )


DTYPES = ("float32", "bfloat16", "float16")


def quick_jit(function, **kwargs):
    """Compile without XLA's optimizations, which take most of a test's time.

    For contracts that do not depend on them, such as the structure of a state, wrappers
    and masks. With `--full` all programs are optimized.
    """
    return jax.jit(function, **compiler.options(compiler.UNOPTIMIZED), **kwargs)


def optimized_jit(function, **kwargs):
    """Compile with XLA's default options, to test numbers and programs."""
    return jax.jit(function, **compiler.options(compiler.OPTIMIZED), **kwargs)


def clipped(tx, tree, params=None):
    """Return the updates of the first step."""
    return tx.update(tree, tx.init(tree), params)[0]


quickly_clipped = quick_jit(clipped, static_argnums=0)


def gradients(seed: int = 0, dtype: chex.ArrayDType = jnp.float32) -> chex.ArrayTree:
    """Return leaves with norms below and above each threshold of the registry."""
    rng = np.random.default_rng(seed)
    tree = {
        "dense": {"bias": rng.normal(size=4) * 0.01, "kernel": rng.normal(size=(3, 4))},
        "out": [rng.normal(size=(2, 4)) * 5.0],
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def as_bcoo(matrix: np.ndarray) -> BCOO:
    """Store every element of a matrix; `BCOO.fromdense` compiles 45 programs."""
    return BCOO((matrix.ravel(), np.argwhere(np.ones_like(matrix))), shape=matrix.shape)


def mixed_gradients(seed: int = 0) -> chex.ArrayTree:
    """Return gradients with one dtype of `DTYPES` per leaf."""
    tree = gradients(seed)
    # Leaves that every transformation clips; a small leaf would be unchanged.
    tree["dense"]["kernel"] = tree["dense"]["kernel"].astype(jnp.bfloat16)
    tree["out"][0] = tree["out"][0].astype(jnp.float16)
    return tree


def memories(state: optclip.typing.ClipState) -> list[Any]:
    """Return the memory of each argument's rules, and of the norm after them."""
    (memory,) = state.clip_memory.values()
    return memory


def as_float64(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Convert a tree to NumPy float64 or complex128."""

    def wide(x):
        kind = np.complex128 if jnp.iscomplexobj(x) else np.float64
        return np.asarray(x).astype(kind)

    return jax.tree.map(wide, tree)


def assert_close(
    actual: chex.ArrayTree, expected: chex.ArrayTree, ulps: chex.Numeric = 8
) -> None:
    """Compare leaves to within `ulps` times the eps of their largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a_wide, b_wide = as_float64(a), as_float64(b)
        if not jnp.issubdtype(jnp.asarray(a).dtype, jnp.inexact):
            np.testing.assert_array_equal(a_wide, b_wide)
            continue
        eps = float(jnp.finfo(jnp.asarray(a).dtype).eps)
        size = np.max(np.abs(b_wide), initial=0.0)
        np.testing.assert_allclose(a_wide, b_wide, rtol=0, atol=ulps * eps * size)


def assert_identical(actual: chex.ArrayTree, expected: chex.ArrayTree) -> None:
    """Compare structure, shape, dtype, weak type and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_type(a, b)
        bits_a, bits_b = np.asarray(a).tobytes(), np.asarray(b).tobytes()
        assert bits_a == bits_b, f"{a} is not {b}"


def assert_same_type(a: Any, b: Any) -> None:
    """Compare shape, dtype and weak type; a Python number is a weak scalar."""
    a, b = (
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(jnp.asarray(x))
        for x in (a, b)
    )
    kind = (a.shape, a.dtype, a.weak_type)
    assert kind == (b.shape, b.dtype, b.weak_type)


def assert_same_types(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_same_type, actual, expected)


def differs(a: chex.ArrayTree, b: chex.ArrayTree) -> bool:
    """Return whether any leaf differs, to show that something was clipped."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(not np.array_equal(as_float64(x), as_float64(y)) for x, y in pairs)


def as_xla_sees(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Return floating leaves in float64, with subnormal float32 numbers set to 0.

    XLA on CPU flushes them to zero.
    """

    def wide(x):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return None
        exact = np.asarray(x).astype(np.float64)
        return np.where(np.abs(exact) < TINY, 0.0, exact)

    return jax.tree.map(wide, tree)


def assert_follows(
    actual: chex.ArrayTree,
    expected: chex.ArrayTree,
    original: chex.ArrayTree,
    roundings: int = 0,
) -> None:
    """Compare the floating leaves of a clipped tree with the formula.

    An element may differ by this many `roundings` in float32 of its leaf's largest.
    """
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(original)]
    kinds = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
    clipped = list(itertools.compress(jax.tree.leaves(actual), kinds))
    for out, wanted in zip(clipped, jax.tree.leaves(expected), strict=True):
        info = jnp.finfo(out.dtype)
        # One rounding of the product, two of the coefficient and one of the norm.
        # Subnormal numbers may be flushed or rounded to the next.
        floor = max(float(info.smallest_subnormal), TINY)
        size = np.abs(wanted)
        room = 4 * float(info.eps) * size + floor
        room += roundings * 2.0**-23 * np.max(size, initial=0.0)
        reachable = np.clip(wanted, -float(info.max), float(info.max))
        assert np.all(np.abs(as_float64(out) - reachable) <= room), (out, reachable)


def equations(jaxpr, times=1):
    """Yield each equation, including those in loops, and how often it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner, times * equation.params.get("length", 1))
