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
    # Of another library.
    "clip_grad_norm_": "optclip.functional.clip_by_global_norm",
    "adaptive_grad_clip": "optclip.recipes.agc",
    "per_example_global_norm_clip": "optclip.per_example.clipped_sum",
    "zero_nans": "optclip.skip",
}


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_missing_name_raises_with_its_equivalent(name):
    equivalent = EQUIVALENTS[name]
    with pytest.raises(AttributeError) as caught:
        getattr(optclip, name)
    start = f"module 'optclip' has no attribute '{name}'. Did you mean {equivalent}"
    ends = {
        "zero_nans": ", or optax.zero_nans() before the clipping (docs/nan_and_inf.md)"
    }
    assert str(caught.value) == f"{start}{ends.get(name, '')}?"
    found = optclip
    for part in equivalent.split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)


@pytest.mark.parametrize("name", ["MaxNorm", "UnitNorm", "non_neg", "ClipConstraint"])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (optclip, r"constrain\(.*docs/clipping_parameters.md"),
        (optclip.keras, r"kernel_constraint=, .*constraints.MaxNorm\(2\)"),
    ],
)
def test_missing_constraint_raises_with_its_equivalent(module, words, name):
    with pytest.raises(AttributeError, match=words):
        getattr(module, name)


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
