"""Check the public names, and the errors for names of other libraries."""

import types

import pytest

import optclip

EQUIVALENTS = {
    # Of a submodule.
    "zclip": "optclip.recipes.zclip",
    "quantile": "optclip.thresholds.quantile",
    "global_norm": "optclip.functional.global_norm",
    "clipped": "optclip.keras.clipped",
}


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_missing_name_raises_with_its_equivalent(name):
    equivalent = EQUIVALENTS[name]
    with pytest.raises(AttributeError) as caught:
        getattr(optclip, name)
    assert str(caught.value) == (
        f"module 'optclip' has no attribute '{name}'. Did you mean {equivalent}?"
    )
    found = optclip
    for part in equivalent.split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)


def test_missing_name_without_equivalent_raises_as_usual():
    assert not hasattr(optclip, "clop")
    with pytest.raises(AttributeError, match=r"attribute 'clop'. See docs/mig"):
        optclip.clop  # noqa: B018


def test_each_object_is_public_under_one_name():
    modules = [getattr(optclip, name) for name in optclip.__all__]
    modules = [m for m in modules if isinstance(m, types.ModuleType)]
    names = {}
    for module in (optclip, *modules):
        for name in module.__all__:
            key = id(getattr(module, name))
            names.setdefault(key, []).append(f"{module.__name__}.{name}")
    assert len(names) > 100
    assert not [twice for twice in names.values() if len(twice) > 1]


def test_dir_lists_public_names():
    names = [name for name in dir(optclip) if name != "__version__"]
    assert names == sorted(optclip.__all__)
    assert all(getattr(optclip, name) is not None for name in names)
