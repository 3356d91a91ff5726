"""What the annotations say; pyright checks that they are true of the code."""

import inspect
import types
import typing
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import recipes
from optclip._clip import _nonfinite
from optclip.responses._resolve import ResponseName


def _functions() -> Iterator[tuple[str, types.FunctionType]]:
    modules = [
        module
        for name in optclip.__all__
        if inspect.ismodule(module := getattr(optclip, name))
    ]
    for module in [optclip, *modules]:
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                yield f"{module.__name__}.{name}", function


FUNCTIONS = dict(_functions())


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_argument_says_what_it_takes(function):
    parameters = inspect.signature(function).parameters.values()
    assert parameters, "the function takes nothing, so this shows nothing"
    said = {p.name: p.annotation for p in parameters}
    vague = (inspect.Parameter.empty, typing.Any, "Any")
    assert [name for name, kind in said.items() if kind in vague] == []


@pytest.mark.parametrize(
    ("options", "function", "fixed"),
    [
        (optclip.typing.ClipOptions, optclip.clip_by, set()),
        (optclip.typing.MomentClipOptions, optclip.clip_by, {"eps"}),
        (optclip.typing.SkipOptions, optclip.skip, {"max_norm"}),
        (optclip.typing.CotangentOptions, optclip.clip_cotangent, {"probe"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_options_passed_on_are_those_of_what_they_make(options, function, fixed):
    takes = typing.get_type_hints(function)
    keywords = {
        p.name: takes[p.name]
        for p in inspect.signature(function).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in fixed
    }
    assert typing.get_type_hints(options) == keywords


def test_recipes_name_the_options_they_pass_on():
    said = {
        name: inspect.signature(getattr(recipes, name)).parameters["options"].annotation
        for name in recipes.__all__
        if "options" in inspect.signature(getattr(recipes, name)).parameters
    }
    skips = {name for name, kind in said.items() if kind == "Unpack[SkipOptions]"}
    moments = {n for n, kind in said.items() if kind == "Unpack[MomentClipOptions]"}
    others = {n for n, kind in said.items() if kind == "Unpack[ClipOptions]"}
    assert skips == {name for name in said if name.endswith("_skip")}
    assert moments == {"acclip", "spectra", "stable_adamw"}
    assert skips | moments | others == set(said)
    assert len(others) >= 10


@pytest.mark.parametrize(
    "value", [1, 1.0, np.float32(1), np.ones(2), jnp.ones(2)], ids=repr
)
def test_a_number_is_what_the_checks_take_for_one(value):
    assert isinstance(value, optclip.typing.Number)
    optclip.clip_by_norm(value)


@pytest.mark.parametrize("value", ["1", None, 1j, [1.0]], ids=repr)
def test_what_is_no_number_is_refused_by_both(value):
    assert not isinstance(value, optclip.typing.Number)
    with pytest.raises(TypeError, match="eps"):
        optclip.clip_by_global_norm(1.0, eps=value)


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (ResponseName, optclip.responses._resolve.BY_NAME),
        (optclip.typing.Nonfinite, _nonfinite.POLICIES),
    ],
    ids=["responses", "nonfinite"],
)
def test_words_are_those_that_are_accepted(words, accepted):
    assert sorted(typing.get_args(words)) == sorted(accepted)


def test_plots_say_what_they_return():
    for name in optclip.plot.__all__:
        assert "return" in typing.get_type_hints(getattr(optclip.plot, name))
