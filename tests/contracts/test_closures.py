"""Everything that functions of optclip close over can be hashed.

Equinox opens functions and hashes the contents of their closures, as Optimistix does
with `init` and `update`. Arrays, dicts and lists cannot be hashed.
"""

import functools
import math
import types

import jax.numpy as jnp
import optax
import pytest

import optclip
from optclip import _thresholds, recipes, thresholds
from tests.support.registry import FACTORIES

# Thresholds, rates and masks that cannot be hashed.
ONE = jnp.ones(())
MASK = {"a": True, "b": False}
CLIP = optclip.clip_by_global_norm(ONE)
LAYERS = {"layer": optclip.Heads("query", "key")}


def held_by(function):
    """Return what a function, or a tuple of functions, holds; None for others."""
    if isinstance(function, tuple):
        return function
    if isinstance(function, types.MethodType):
        return (function.__self__,)
    if isinstance(function, functools.partial):
        return (function.func, *function.args, *function.keywords.values())
    if isinstance(function, types.FunctionType):
        return tuple(cell.cell_contents for cell in function.__closure__ or ())
    return None


def unhashable_in(value, *, is_ours=True):
    """Return the types that functions of optclip hold and that have no hash."""
    if (held := held_by(value)) is not None:
        module = getattr(value, "__module__", None)
        if isinstance(value, types.FunctionType):
            is_ours = str(module).startswith("optclip")
        return [x for each in held for x in unhashable_in(each, is_ours=is_ours)]
    try:
        hash(value)
    except TypeError:
        return [type(value).__name__] if is_ours else []
    return []


TRANSFORMATIONS = {
    **FACTORIES,
    "array": lambda: CLIP,
    "no-record": lambda: optclip.clip_by_global_norm(ONE, record=False),
    "by-leaf": lambda: optclip.clip_by_norm({"a": ONE, "b": None}, record="leaves"),
    "schedule": lambda: optclip.clip_by_norm(optax.linear_schedule(ONE, 2.0, 9)),
    "rules": lambda: optclip.clip_by_norm({"a": thresholds.ema(ONE), "b": 1.0}),
    "element-rule": lambda: optclip.clip_by_value(_thresholds.second_moment(ONE)),
    "mask": lambda: optclip.clip_by_global_norm(1.0, mask=MASK, eps=ONE),
    "axes": lambda: optclip.clip_by_norm(1.0, axis=0, axis_name={"a": None, "b": ()}),
    "groups": lambda: optclip.clip_by_group_norm({"x": ONE}, {"a": "x", "b": None}),
    "array-band": lambda: optclip.clip_by(1.0, response=optclip.responses.band(ONE)),
    "use-norm": lambda: optclip.clip_by_global_norm(ONE, use_norm="norm"),
    "spectral-norms": lambda: optclip.clip_by_spectral_norm({"a": ONE}),
    "singular-values": lambda: optclip.clip_by_singular_value({"a": ONE}, mask=MASK),
    "attention": lambda: optclip.clip_attention_logits(ONE, LAYERS),
    "skip": lambda: optclip.skip(CLIP, max_norm={"a": ONE}, over="leaf", mask=MASK),
    "skip-by-loss": lambda: optclip.skip(CLIP, max_loss=ONE),
    "skip-by-rule": lambda: optclip.skip(CLIP, max_loss=thresholds.ema(ONE)),
    "error-feedback": lambda: optclip.recipes.uclip(CLIP),
    "periodic-reset": lambda: optclip.with_periodic_reset(CLIP),
    "constrain": lambda: optclip.constrain(optax.sgd(0.1), CLIP),
    "after": lambda: optclip.clip_after(optax.sgd(0.1), CLIP),
    "before": lambda: optclip.clip_before(optax.sgd(0.1), CLIP),
    "sclip": lambda: recipes.sclip(ONE, ONE, mask=MASK),
    "agc": lambda: recipes.agc(ONE, mask=MASK),
    "aggc": lambda: recipes.aggc({"a": "x", "b": "y"}, high=ONE, low=ONE),
    "clippy": lambda: recipes.clippy(ONE, ONE, mask=MASK),
    "adamw": lambda: recipes.stable_adamw(0.9 * ONE, eps=ONE, weight_decay=ONE),
    "acclip": lambda: recipes.acclip(0.9 * ONE, 0.9 * ONE, ONE, ONE),
    "spam": lambda: recipes.spam(theta=ONE, b2=0.9 * ONE),
    "spectra": lambda: recipes.spectra(
        max_value=ONE, max_gradient=ONE, mask=MASK,
        learning_rate=optax.linear_schedule(1.0, 0.0, 9), warmup=2,
    ),
    "aggregate": lambda: optclip.per_example.aggregate(
        {"x": ONE}, normalize_by=ONE, over=optclip.groups({"a": "x", "b": "x"})
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_closures_of_transformation_are_hashable(name):
    assert not unhashable_in(TRANSFORMATIONS[name]())


@pytest.mark.parametrize(
    "function",
    [
        optclip.by_path(lambda path: path == "a"),
        optclip.per_example.clipped_grad(jnp.dot, ONE, normalize_by=ONE),
    ],
)
def test_closures_of_other_functions_are_hashable(function):
    assert not unhashable_in(function)


def test_two_transformations_of_one_threshold_are_separate_keys():
    tx, other = (optclip.skip(optax.sgd(1.0), max_norm=math.inf) for _ in range(2))
    assert len({tx, other, tx}) == 2
