"""Compare methods with their papers' equations in float64 over 240 steps.

The steps have spikes, zeros, NaN, inf and a shift of level. The tolerance is twice the
largest deviation measured on any CPU. Rules of one norm are in tests/thresholds, methods
with code of their authors in `test_official.py`. Methods without a recipe are expressions
on the page of methods, whose block runs here.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes
from tests.support import helpers, methods, oracles, rules
from tests.support.steps import over_steps

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "methods.md"
NAMED = {}
exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1], NAMED)

GRADIENTS = methods.GRADIENTS
FINITE = [methods.sound(*tree.values()) for tree in GRADIENTS]
PARAMS = {
    "w": np.linspace(-2.0, 3.0, 12, dtype=np.float32).reshape(4, 3),
    "b": np.array([0.0, 1e-4, -5.0], np.float32),
}
WIDE = helpers.as_float64(PARAMS)
# Of the updates, for the rounding of the largest number that U-Clip carries.
PEAK = max(np.max(np.abs(x[np.isfinite(x)])) for g in GRADIENTS for x in g.values())


def outputs_of(tx, gradients):
    """Return the updates of each step."""
    rows = {key: np.float32([tree[key] for tree in gradients]) for key in PARAMS}
    params = {key: np.stack([x] * methods.STEPS) for key, x in PARAMS.items()}
    return over_steps(tx, rows, params)[0]


def by_leaf(make, skips=True, **more):
    """Run one oracle per leaf; `skips`: NaN or inf in a leaf skips the step of all."""

    def run(gradients):
        oracles = {key: make() for key in PARAMS}

        def step(key, x):
            given = {name: trees[key] for name, trees in more.items()}
            return oracles[key].step(x, **given)

        return [
            {key: step(key, x) for key, x in tree.items()}
            if finite or not skips
            else tree
            for tree, finite in zip(gradients, FINITE, strict=True)
        ]

    return run


def by_element(make):
    """Run one oracle per element: a bad element leaves the others unchanged."""

    def run(gradients):
        columns = {key: np.stack([g[key].ravel() for g in gradients]) for key in PARAMS}
        expected = {
            key: np.transpose([list(map(make().step, column)) for column in rows.T])
            for key, rows in columns.items()
        }
        return [
            {key: rows[i].reshape(PARAMS[key].shape) for key, rows in expected.items()}
            for i in range(methods.STEPS)
        ]

    return run


def each_step(function):
    """Apply a method without memory to each finite step and its number."""
    steps = range(methods.STEPS)
    return lambda gradients: [
        function(i, gradients[i]) if FINITE[i] else None for i in steps
    ]


def auto_s(_, tree):
    return {key: x * 2.0 / (oracles.tree_norm(tree) + 0.5) for key, x in tree.items()}


def sclip(step, tree):
    oracle = methods.SClip(2.0 + 0.01 * step, 9.0 + 0.1 * step)
    return {key: oracle.step(x) for key, x in tree.items()}


RATE = optax.warmup_constant_schedule(0.5, 2.0, 100)


def spectra(step, tree):
    """Cap twice, higher in a warm-up of 100 steps; outputs are on the first axis."""
    up = 2.0 / float(RATE(step)) if step < 100 else 1.0
    left = 2.0 * methods.spectra(tree["w"], up * (5.0 + 0.01 * step))
    bias = methods.spectra(2.0 * tree["b"], up * 8.0)
    return {"w": methods.spectra(left.T, up * 8.0).T, "b": bias}


def of_params(coefficient):
    """Scale each leaf by a function of its norm and of its parameters' norm."""
    sizes = {key: oracles.tree_norm({key: x}) for key, x in WIDE.items()}
    return each_step(
        lambda _, tree: {
            key: x * coefficient(oracles.tree_norm({key: x}), sizes[key])
            for key, x in tree.items()
        }
    )


def global_adagc(gradients):
    oracle = rules.AdaGC(1.04, 0.99, 100, 1.0)

    def step(tree):
        norm = oracles.tree_norm(tree)
        factor = np.minimum(1.0, oracle.step(np.array([norm])) / max(norm, 1e-30))
        return {key: factor * x for key, x in tree.items()}

    pairs = zip(gradients, FINITE, strict=True)
    return [step(tree) if finite else None for tree, finite in pairs]


@dataclasses.dataclass(frozen=True)
class Method:
    """Hold a method, its oracle, and the fraction of steps that it must change."""

    tx: Any
    expected: Callable[[list], list]
    rtol: float = 1e-5
    atol: float = 0.0
    most: float = 1.0


METHODS = {
    "olmo_ratio": Method(
        recipes.olmo_ratio(1.1, 0.9),
        by_leaf(lambda: methods.OlmoRatio(1.1, 0.9), skips=False),
        most=0.9,
    ),
    "acclip": Method(
        optclip.skip(recipes.acclip(b2=0.9, alpha=1.5)),
        by_leaf(lambda: methods.Acclip(b2=0.9, alpha=1.5)),
        rtol=2e-5,
    ),
    "stable_adamw": Method(
        optclip.skip(recipes.stable_adamw(b2=0.9, weight_decay=0.1)),
        by_leaf(lambda: methods.StableAdamW(b2=0.9, weight_decay=0.1), w=WIDE),
        rtol=2e-5,
    ),
    "spectra": Method(
        recipes.spectra(
            optax.scale(2.0), 8.0, max_gradient=lambda step: 5.0 + 0.01 * step,
            learning_rate=RATE, warmup=100, transposed=lambda path: True, method="eigh",
        ),
        each_step(spectra),
        rtol=1e-4,
    ),
    "uclip": Method(
        recipes.uclip(optclip.clip_by_value(3.0)),
        by_element(lambda: methods.UClip(lambda x: np.clip(x, -3.0, 3.0))),
        atol=PEAK * 2**-24,
    ),
    "sclip": Method(
        recipes.sclip(lambda step: 2.0 + 0.01 * step, lambda step: 9.0 + 0.1 * step),
        each_step(sclip),
    ),
    "auto_s": Method(recipes.auto_s(2.0, 0.5), each_step(auto_s)),
    "global_adagc": Method(NAMED["global_adagc"], global_adagc),
    "dreamerv3_agc": Method(
        NAMED["dreamerv3_agc"],
        of_params(lambda n, size: 1 / max(1.0, n / (0.3 * max(1e-3, size)))),
    ),
    "gradient_stabilizer": Method(
        NAMED["gradient_stabilizer"], by_leaf(methods.GradientStabilizer, skips=False)
    ),
    "update_floor": Method(
        optax.chain(optax.scale(0.1), NAMED["update_floor"]),
        of_params(lambda n, size: max(0.1, 0.35 * size / n) if n else 0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_method_follows_its_equations(name):
    method = METHODS[name]
    updates = outputs_of(method.tx, GRADIENTS)
    expected, changed = method.expected(GRADIENTS), []
    for i in np.flatnonzero(FINITE):
        for key, wanted in expected[i].items():
            atol = method.atol + 0.1 * method.rtol * np.max(np.abs(wanted))
            found = updates[key][i]
            np.testing.assert_allclose(found, wanted, rtol=method.rtol, atol=atol)
        pairs = [(wanted, GRADIENTS[i][key]) for key, wanted in expected[i].items()]
        changed.append(not all(np.allclose(a, b, rtol=1e-4) for a, b in pairs))
    assert 0.1 <= np.mean(changed) <= method.most


def test_dp_psac_weights_examples_by_their_norms_as_its_paper():
    """In the direction of an example its sum has `C / (n + r / (n + r))` per norm n."""
    n = np.float64([1e-4, 0.02, 1.0, 300.0])
    f = NAMED["dp_psac"](lambda w, x: w @ x, 2.0, 0.1)
    sums, _ = f(np.zeros(4, np.float32), np.diag(n).astype(np.float32))
    # The factor keeps the sum below its bound after rounding.
    expected = 2.0 * n / (n + 0.1 / (n + 0.1)) * (1 - 2**-13)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert f.sensitivity() == 2.0


def test_clip21_memories_follow_its_equation_and_reach_gradients():
    g = np.float32(np.random.default_rng(0).normal(size=(5, 7)) * 10)
    h, expected = np.zeros_like(g), np.zeros(g.shape)
    step = helpers.quick_jit(jax.vmap(lambda h, g: NAMED["clip21"](h, g, 4.0)))
    for _ in range(12):
        h, rest = step(h, g), g - expected
        norms = np.linalg.norm(rest, axis=1, keepdims=True)
        expected += rest * np.minimum(1.0, 4.0 / np.maximum(norms, 1e-30))
        np.testing.assert_allclose(h, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(h, g, rtol=1e-5)
