"""The annotations of public functions; pyright checks the code against them."""

import inspect
import types
import typing
from collections.abc import Iterator

import numpy as np
import pytest

import optclip

# No union of words is public, but users may pass each word.
from optclip._clip import _nonfinite
from optclip.norms import _norm_argument
from optclip.responses import _response_argument


def _functions() -> Iterator[tuple[str, types.FunctionType]]:
    modules = filter(inspect.ismodule, map(vars(optclip).get, optclip.__all__))
    for module in [optclip, *modules]:
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                yield f"{module.__name__}.{name}", function


FUNCTIONS = dict(_functions())


def test_annotation_is_specific_for_every_argument():
    assert len(FUNCTIONS) > 70
    vague = (inspect.Parameter.empty, typing.Any, "Any")
    for path, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters.values()
        assert parameters, path
        assert not [p for p in parameters if p.annotation in vague], path
    for name in optclip.plot.__all__:
        assert "return" in typing.get_type_hints(getattr(optclip.plot, name))


# Recipes measure and clip the same leaves.
SEPARATE_MASKS = {"norm_mask", "clip_mask"}


@pytest.mark.parametrize(
    ("options", "function", "fixed"),
    [
        (optclip.typing.ClipOptions, optclip.clip_by, SEPARATE_MASKS),
        (optclip.typing.MomentClipOptions, optclip.clip_by, {"eps", *SEPARATE_MASKS}),
        (optclip.typing.SkipOptions, optclip.skip, {"max_norm"}),
        (optclip.typing.CotangentOptions, optclip.clip_cotangent, {"probe"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_options_equal_keywords_of_the_function(options, function, fixed):
    hints = typing.get_type_hints(function)
    keywords = {
        p.name: hints[p.name]
        for p in inspect.signature(function).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in fixed
    }
    assert typing.get_type_hints(options) == keywords


def test_recipe_options_name_the_clip_they_go_to():
    moments = {"acclip", "spectra", "stable_adamw"}
    annotations = {}
    for name in optclip.recipes.__all__:
        parameters = inspect.signature(getattr(optclip.recipes, name)).parameters
        if "options" in parameters:
            annotations[name] = parameters["options"].annotation
    assert len(annotations) > 12
    for name, annotation in annotations.items():
        default = "MomentClip" if name in moments else "Clip"
        kind = "Skip" if name.endswith("_skip") else default
        assert annotation == f"Unpack[{kind}Options]", name


@pytest.mark.parametrize(
    "value", [1, 1.0, np.float32(1), np.ones(2), "1", None, 1j, [1.0]], ids=repr
)
def test_number_type_agrees_with_the_check(value):
    if isinstance(value, optclip.typing.Number):
        optclip.clip_by_value(value)
        return
    with pytest.raises(TypeError, match="eps"):
        optclip.clip_by_global_norm(1.0, eps=value)


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (_norm_argument.NormName, _norm_argument.BY_NAME),
        (_response_argument.ResponseName, _response_argument.BY_NAME),
        (optclip.typing.Nonfinite, _nonfinite.POLICIES),
    ],
    ids=["norms", "responses", "nonfinite"],
)
def test_literal_lists_every_accepted_word(words, accepted):
    assert sorted(typing.get_args(words)) == sorted(accepted)
