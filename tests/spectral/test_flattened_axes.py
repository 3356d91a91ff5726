"""A leaf whose axes are flattened to a matrix is clipped as the reshaped leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from optclip import responses, thresholds
from tests.support import covering, helpers
from tests.support.registry import square_root_capper
from tests.support.steps import over_steps

KERNEL = np.float32(2 * np.random.default_rng(0).normal(size=(3, 2, 4, 5)))
# The batch, the rows and the columns of the matrices of `KERNEL`.
FLAT = {
    (..., -1): ((), (0, 1, 2), (3,)),
    (0, ...): ((), (0,), (1, 2, 3)),
    ((-2, 0), (1, 3)): ((), (0, 2), (1, 3)),
    (-1, (0, 2)): ((1,), (3,), (0, 2)),
    (-1, 1): ((0, 2), (3,), (1,)),
}


def reshaped(x, axes):
    """Return a leaf with the two axes of its matrices last, by NumPy's functions."""
    batch, *sides = FLAT[axes]
    order = (*batch, *sides[0], *sides[1])
    lengths = [np.prod([x.shape[a] for a in side]) for side in sides]
    last = jnp.transpose(x, order)
    return last.reshape(*last.shape[: len(batch)], *lengths)


def by_values(response, method="eigh", limit=2.0):
    return lambda axes: optclip.clip_by(
        limit, over=optclip.singular_values(axes, method=method), response=response
    )


def by_norm(norm="spectral", limit=2.0, **options):
    return lambda axes: optclip.clip_by(
        limit, over=optclip.matrices(axes), norm=norm, **options
    )


def learned(make):
    return functools.partial(make, limit=thresholds.ema(0.5, warmup=1))


MAKE = {
    "spectral norm": lambda axes: optclip.clip_by_spectral_norm(2.0, matrix_axes=axes),
    "spectral norm, smooth": by_norm(response="smooth", eps=0.5),
    "spectral norm, learned": learned(by_norm)(),
    "spectral norm, of parameters": by_norm(limit=thresholds.relative_to_params(0.5)),
    "power iteration": by_norm(optclip.norms.Spectral("power_iteration", 9)),
    "l2": by_norm("l2", response="proportional"),
    "rms, strict": by_norm("rms", 0.5, strict=True),
    "eigh": lambda axes: optclip.clip_by_singular_value(2.0, matrix_axes=axes),
    "eigh, learned": learned(by_values)("hard"),
    "spectra": lambda axes: optclip.recipes.spectra(
        optax.identity(), 2.0, max_gradient=3.0, matrix_axes=axes
    ),
    "eigh, user": by_values(square_root_capper),
    "eigh, band": by_values(responses.band(0.75)),
    **{f"eigh, {x}": by_values(x) for x in ("smooth", "normalize", "drop", "tanh")},
    **{
        f"products, {x}": by_values(x, "newton_schulz")
        for x in ("hard", "smooth", "normalize")
    },
}


@pytest.mark.parametrize(
    ("make", "axes", "dtype"),
    [
        (make, axes, ("float32", "bfloat16")[i // 4 % 2])
        for i, make in enumerate(MAKE)
        for axes in covering.rotated(list(FLAT), i)
    ],
)
def test_flattened_axes_equal_reshaped_leaf(make, axes, dtype):
    """Over steps, with the same record and memory; vectors and numbers are as usual."""
    kernels = np.stack([KERNEL, 9 * KERNEL[::-1], 0.1 * KERNEL]).astype(dtype)
    others = {"vector": np.ones((3, 7), dtype), "number": np.ones(3, dtype)}
    flat = jax.vmap(lambda x: reshaped(x, axes))(kernels)
    found, expected = (
        over_steps(MAKE[make](of), tree, tree)
        for of, tree in (
            (axes, {"kernel": kernels, **others}),
            ((-2, -1), {"kernel": flat, **others}),
        )
    )
    found[0]["kernel"] = jax.vmap(lambda x: reshaped(x, axes))(found[0]["kernel"])
    assert helpers.differs(found[0]["kernel"], flat)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        atol = 2e-5 if dtype == "float32" else 0.02
        np.testing.assert_allclose(np.ravel(x), np.float64(np.ravel(y)), atol=atol)


PRODUCTS = functools.partial(F.clip_by_singular_value, method="newton_schulz")


@pytest.mark.parametrize(
    "clip", [F.clip_by_spectral_norm, F.clip_by_singular_value, PRODUCTS]
)
def test_flattened_axes_have_derivatives_and_batches(clip):
    def changes(axes, *shape):
        def change(x):
            along = (jnp.roll(x, 1, -1),)
            return jax.jvp(lambda x: clip(x, 2.0, matrix_axes=axes), (x,), along)[1]

        xs = np.stack([KERNEL, KERNEL[::-1]]).reshape(2, *shape)
        return helpers.quick_jit(jax.vmap(change))(xs).reshape(2, 24, 5)

    expected = changes((-2, -1), 24, 5)
    np.testing.assert_allclose(changes((..., -1), 3, 2, 4, 5), expected, atol=2e-5)


def test_orthogonalized_convolution_points_along_optax_muon():
    """Both flatten a kernel `(h, w, inputs, outputs)`; Muon's values are near 1."""
    over = optclip.singular_values((..., -1), method="newton_schulz")
    dims = {"kernel": optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)}
    txs = (
        optclip.clip_by(1.0, over=over, response="normalize"),
        optax.contrib.scale_by_muon(beta=0.0, weight_dimension_numbers=dims),
    )
    tree = {"kernel": KERNEL}
    both = [
        helpers.quick_jit(tx.update)(tree, tx.init(tree))[0]["kernel"] for tx in txs
    ]
    steps = np.reshape(both, (2, -1))
    assert np.dot(*steps) > 0.98 * np.prod(np.linalg.norm(steps, axis=1))


def test_plain_matrix_is_clipped_by_the_same_program():
    """So one transformation is for a whole model."""
    programs = {
        str(
            jax.make_jaxpr(functools.partial(MAKE["eigh"](axes).update, state=None))(
                KERNEL[0, 0]
            )
        )
        for axes in ((-2, -1), (..., -1), (0, ...), ((0,), 1))
    }
    assert len(programs) == 1
