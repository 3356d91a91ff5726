"""The annotations of public functions; pyright checks the code against them."""

import inspect
import typing

import pytest

import optclip

# No union of words and no options are public, but users may pass each word.
from optclip import _typing
from optclip._clip import _clip
from optclip._norms import _norm
from optclip._responses import _response_argument

# Recipes measure and clip the same leaves.
SEPARATE_MASKS = {"norm_mask", "clip_mask"}


@pytest.mark.parametrize(
    ("options", "function", "fixed"),
    [
        (_typing.ClipOptions, optclip.clip_by, SEPARATE_MASKS),
        (_typing.MomentClipOptions, optclip.clip_by, {"eps", *SEPARATE_MASKS}),
        (_typing.SkipOptions, optclip.skip, {"max_norm"}),
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


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (_norm.NormName, _norm.BY_NAME),
        (_response_argument.ResponseName, _response_argument.BY_NAME),
        (_typing.Nonfinite, _clip.POLICIES),
    ],
    ids=["norms", "responses", "nonfinite"],
)
def test_literal_lists_every_accepted_word(words, accepted):
    assert sorted(typing.get_args(words)) == sorted(accepted)
