"""The calls elsewhere that docs/comparison.md and the README list, and the same ones here."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from tests.support import helpers, oracles

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `((?:tf|keras|torch|optax)\..*?)` \| `(.*?)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "comparison.md").read_text())

x = jnp.array([[3.0, -0.5], [4.0, 0.2]])
grads = [x, jnp.array([-2.0, 1.0])]
norm = 6.0
WIDE = [np.asarray(g, np.float64) for g in grads]


def _global(c, n=None, eps=0.0):
    n = oracles.tree_norm(WIDE) if n is None else n
    return [g * min(1.0, c / (n + eps)) for g in WIDE]


def _steps(clipped):
    return [-0.1 * g for g in clipped]


INF_NORM = oracles.tree_norm(WIDE, np.inf)
# What each call elsewhere gives for the values above, by its documented formula.
EXPECTED = {
    "tf.clip_by_value": np.clip(WIDE[0], -1, 2),
    "tf.clip_by_norm(x, 1.0)": oracles.by_leaf(WIDE[0], 1.0),
    "tf.clip_by_norm(x, 1.0, axes": oracles.by_first_axis(WIDE[0], 1.0),
    "tf.compat.v1": oracles.by_leaf(WIDE[0], 0.1, oracles.average_norm),
    "tf.linalg.global_norm": oracles.tree_norm(WIDE),
    "tf.clip_by_global_norm(grads, 1.0)": (_global(1.0), oracles.tree_norm(WIDE)),
    "tf.clip_by_global_norm(grads, 1.0, use_norm": (_global(1.0, 6.0), 6.0),
    "keras.optimizers.SGD(0.1, clipvalue": _steps(oracles.by_value(WIDE, -0.5, 0.5)),
    "keras.optimizers.SGD(0.1, clipnorm": _steps(oracles.by_leaf(WIDE, 1.0)),
    "keras.optimizers.SGD(0.1, global_clipnorm": _steps(_global(1.0)),
    "torch.nn.utils.clip_grad_norm_(params, 1.0)": (
        _global(1.0, eps=1e-6),
        oracles.tree_norm(WIDE),
    ),
    "torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type": (
        _global(1.0, INF_NORM, 1e-6),
        INF_NORM,
    ),
    "torch.nn.utils.get_total_norm": oracles.tree_norm(WIDE),
    "torch.nn.utils.clip_grads_with_norm_": (_global(1.0, 6.0, 1e-6), 6.0),
    "torch.nn.utils.clip_grad_value_": oracles.by_value(WIDE, -0.5, 0.5),
    "optax.clip(": oracles.by_value(WIDE, -0.5, 0.5),
    "optax.clip_by_global_norm": _global(1.0),
    "optax.clip_by_block_rms": oracles.by_leaf(WIDE, 0.1, oracles.rms),
    "optax.tree.norm": oracles.tree_norm(WIDE),
}


WRAPPERS = {
    "optax.adaptive_grad_clip(0.01)": "optclip.recipes.agc(0.01)",
    "optax.apply_if_finite(tx, 5)": "optclip.skip(tx, max_consecutive=5)",
}
CALLS = [(a, b) for a, b in ROWS if not any(a.startswith(w) for w in WRAPPERS)]
CALLS = [row for row in CALLS if "MultiSteps" not in row[0]]


def test_the_table_is_found_whole():
    assert len(CALLS) == len(EXPECTED) == 19


def test_the_readme_has_some_of_them_as_they_are():
    found = ROW.findall((ROOT / "README.md").read_text())
    assert len(found) == 6
    assert set(found) <= {*CALLS, *WRAPPERS.items()}


def run(tx, steps, params):
    state, found = tx.init(params), []
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        found.append(updates)
    return found


def test_agc_of_matrices_is_that_of_optax():
    params = {"kernel": 0.1 * x, "bias": jnp.array([0.3, -0.2])}
    updates = {"kernel": x, "bias": jnp.array([2.0, 1.0])}
    pair = [
        run(eval(call, {"optax": optax, "optclip": optclip}), [updates], params)[0]
        for call in (
            "optax.adaptive_grad_clip(0.01)",
            WRAPPERS["optax.adaptive_grad_clip(0.01)"],
        )
    ]
    assert helpers.differs(pair[1], updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *pair)


def test_a_skip_is_that_of_apply_if_finite():
    tx, params = optax.sgd(1.0, momentum=0.9), jnp.ones(1)
    bad = [jnp.array([value]) for value in (1.0, np.nan, 2.0, np.inf, 3.0)]
    pair = [
        run(eval(call, {"optax": optax, "optclip": optclip, "tx": tx}), bad, params)
        for call in (
            "optax.apply_if_finite(tx, 5)",
            WRAPPERS["optax.apply_if_finite(tx, 5)"],
        )
    ]
    np.testing.assert_allclose(*pair)
    assert float(pair[1][1][0]) == 0


def of(call, **names):
    """What a call of the table gives, or the transformation that it makes does."""

    def run():
        found = eval(call, {"optax": optax, "grads": grads, **names})
        if isinstance(found, optax.GradientTransformation):
            found, _ = found.update(grads, found.init(grads), grads)
        return found

    return helpers.quick_jit(run)()


def assert_known(found, elsewhere):
    keys = [key for key in EXPECTED if elsewhere.startswith(key)]
    expected = EXPECTED[max(keys, key=len)]
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.parametrize(("elsewhere", "here"), CALLS, ids=[row[0] for row in CALLS])
def test_row(elsewhere, here):
    """The call of ours, as written, gives what the other call is known to give."""
    found = of(here, F=F, optclip=optclip, x=x, norm=norm)
    assert helpers.differs(found, grads) if isinstance(found, list) else True
    assert_known(found, elsewhere)


@pytest.mark.parametrize("elsewhere", [r[0] for r in CALLS if r[0].startswith("optax")])
def test_what_optax_gives(elsewhere):
    """The expected values of the table are optax's own; tests/integration/parity has the rest."""
    assert_known(of(elsewhere), elsewhere)
