"""No public name is outside the registry, and no transformation outside the engine."""

import dataclasses
import inspect
import pathlib
import sys

import jax.numpy as jnp
import optax
import pytest

import optclip
from optclip import functional
from optclip.transforms import _leaf_norms, _matrices, _tree_norms, _values
from tests.support.registry import ENTRIES, OTHER_NAMES
from tools import public_api


def _factories():
    return {entry.factory for entry in ENTRIES}


def test_every_public_name_is_registered():
    registered = {factory.__name__ for factory in _factories()} | set(OTHER_NAMES)
    assert set(optclip.__all__) == registered


def test_the_public_api_is_as_written():
    """A change of a default is to be seen: `python -m tools.public_api` writes it."""
    assert public_api.text() == public_api.FILE.read_text()


def test_every_name_has_its_test_file():
    here = pathlib.Path(__file__).parents[1]
    assert not [f for f in OTHER_NAMES.values() if not list(here.rglob(f))]


def test_exports_are_what_all_says():
    public = {name for name in vars(optclip) if not name.startswith("_")}
    # The modules of named clips and wrappers are reached through their functions.
    assert public - {"cotangents", "monitor", "transforms", "wrappers"} == set(
        optclip.__all__
    )


@pytest.mark.parametrize("factory", sorted(_factories(), key=lambda f: f.__name__))
def test_a_threshold_comes_first_and_all_else_by_keyword(factory):
    """One threshold first, all else by keyword; defaults are structural or floats."""
    parameters = list(inspect.signature(factory).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert 1 <= len(positional) <= 2
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    for parameter in parameters:
        default = parameter.default
        if default is parameter.empty or default is None:
            continue
        # optax.inject_hyperparams traces ints and takes callables for schedules.
        assert isinstance(default, (bool, str, float)) or not callable(default)
        assert not isinstance(default, int) or isinstance(default, bool)


def test_nothing_is_strict_unless_asked():
    """Rounding towards zero is for those who ask: it moves .1 in float32."""
    functions = [f for f in vars(functional).values() if inspect.isfunction(f)]
    parameters = [inspect.signature(f).parameters for f in [*_factories(), *functions]]
    defaults = [p["strict"].default for p in parameters if "strict" in p]
    assert len(defaults) > 10
    assert not any(defaults)
    limit = functional.clip_by_value(jnp.ones(2), lower=-0.1, upper=0.1)
    strict = functional.clip_by_value(jnp.ones(2), lower=-0.1, upper=0.1, strict=True)
    assert float(strict[0]) < 0.1 < float(limit[0])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_returns_extra_args_transformation(entry):
    assert isinstance(entry.make(), optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_without_the_engine_there_is_no_clip(entry, monkeypatch):
    if entry.factory is optclip.clip_by:
        return

    def gone(*args, **kwargs):
        raise NotImplementedError

    for module in (_leaf_norms, _matrices, _tree_norms, _values):
        monkeypatch.setattr(module, "clip_by", gone)
    with pytest.raises(NotImplementedError):
        entry.make()


def test_nothing_public_can_be_changed_by_accident():
    """A rule or scope that changes after `jit` has seen it would not be seen again."""
    modules = [m for name, m in sys.modules.items() if name.startswith("optclip")]
    found = {
        x for m in modules for x in vars(m).values() if dataclasses.is_dataclass(x)
    }
    classes = [x for x in found if isinstance(x, type)]
    assert len(classes) > 20
    assert not [x for x in classes if not x.__dataclass_params__.frozen]
