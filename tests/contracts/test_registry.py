"""Every public name is in the registry, and signatures equal `public_api.txt`."""

import dataclasses
import inspect
import pathlib
import sys

import numpy as np
import optax
import pytest

import optclip
from optclip import functional

# Private imports: `clip_by` is replaced in the modules that call it.
from optclip.spectral import _clip_matrices_transform
from optclip.transforms import (
    _leaf_norm_transforms,
    _tree_norm_transforms,
    _value_transform,
)
from tests.support.registry import ENTRIES, OTHER_NAMES
from tools import public_api

FACTORIES = {entry.factory for entry in ENTRIES}


def test_public_names_are_registered_and_have_a_test_file():
    registered = {factory.__name__ for factory in FACTORIES} | set(OTHER_NAMES)
    assert set(optclip.__all__) == registered
    public = {name for name in vars(optclip) if not name.startswith("_")}
    # The modules of named clips and wrappers are reached through their functions.
    folders = {
        "attention", "cotangents", "monitor", "spectral", "transforms", "wrappers",
    }  # fmt: skip
    assert public - folders == registered
    here = pathlib.Path(__file__).parents[1]
    assert not [f for f in OTHER_NAMES.values() if not list(here.rglob(f))]


def test_the_public_api_is_as_written():
    """`python -m tools.public_api` writes the file: a changed default is reviewed."""
    lines, written = public_api.text().split(), public_api.FILE.read_text().split()
    assert lines == written, "Run `python -m tools.public_api` and review the change."


@pytest.mark.parametrize("factory", sorted(FACTORIES, key=lambda f: f.__name__))
def test_factory_takes_threshold_first_and_options_by_keyword(factory):
    parameters = list(inspect.signature(factory).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert 1 <= len(positional) <= 2
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    for default in (p.default for p in parameters if p.default is not p.empty):
        # optax.inject_hyperparams traces ints and takes callables for schedules.
        assert isinstance(default, (bool, str, float)) or not callable(default)
        assert not isinstance(default, int) or isinstance(default, bool)


def test_strict_is_off_by_default():
    """Rounding towards zero moves 0.1 in float32, so users have to ask for it."""
    functions = [f for f in vars(functional).values() if inspect.isfunction(f)]
    parameters = [inspect.signature(f).parameters for f in [*FACTORIES, *functions]]
    defaults = [p["strict"].default for p in parameters if "strict" in p]
    assert len(defaults) > 10
    assert not any(defaults)
    x = np.ones(2, np.float32)
    limit = functional.clip_by_value(x, lower=-0.1, upper=0.1)
    strict = functional.clip_by_value(x, lower=-0.1, upper=0.1, strict=True)
    assert float(strict[0]) < 0.1 < float(limit[0])


# Without `clip_by`, a `clip_by_*` function works only if it has its own code.
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_factory_builds_its_clip_with_clip_by(entry, monkeypatch):
    assert isinstance(entry.make(), optax.GradientTransformationExtraArgs)
    if entry.factory is optclip.clip_by:
        return

    def gone(*args, **kwargs):
        raise NotImplementedError

    modules = (
        _leaf_norm_transforms,
        _clip_matrices_transform,
        _tree_norm_transforms,
        _value_transform,
    )
    for module in modules:
        monkeypatch.setattr(module, "clip_by", gone)
    with pytest.raises(NotImplementedError):
        entry.make()


def test_nothing_public_can_be_changed_by_accident():
    """`jit` would not notice a rule or scope that changes after its first call."""
    modules = [m for name, m in sys.modules.items() if name.startswith("optclip")]
    members = {
        x for m in modules for x in vars(m).values() if dataclasses.is_dataclass(x)
    }
    classes = [x for x in members if isinstance(x, type)]
    assert len(classes) > 20
    assert not [x for x in classes if not x.__dataclass_params__.frozen]
