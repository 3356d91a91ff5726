"""The names of the package, and what it answers to those of others."""

import pytest

import optclip

CALLED_OTHERWISE = {
    "zclip": "optclip.recipes.zclip",
    "quantile": "optclip.thresholds.quantile",
    "global_norm": "optclip.functional.global_norm",
    "clip": "optclip.clip_by_value",
    "adaptive_grad_clip": "optclip.recipes.agc",
    "clip_by_block_rms": "optclip.clip_by_rms",
    "clip_grad_norm_": "optclip.functional.clip_by_global_norm",
    "apply_if_finite": "optclip.skip",
    "TREE": "over='tree'",
    "with_carry": "optclip.with_error_feedback",
}


@pytest.mark.parametrize("name", CALLED_OTHERWISE)
def test_a_name_of_others_or_of_before_says_what_it_is_here(name):
    wanted = CALLED_OTHERWISE[name]
    with pytest.raises(AttributeError) as caught:
        getattr(optclip, name)
    assert str(caught.value) == (
        f"module 'optclip' has no attribute '{name}'. Did you mean {wanted}?"
    )


@pytest.mark.parametrize("name", optclip._ELSEWHERE)
def test_what_it_names_is_there(name):
    found = optclip
    place = optclip._ELSEWHERE[name]
    if place.startswith("over="):
        optclip.clip_by(1.0, over=place.removeprefix("over=").strip("'"))
        return
    for part in place.split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)


def test_a_name_that_nobody_has_is_missing_as_usual():
    assert not hasattr(optclip, "clop")
    with pytest.raises(AttributeError, match=r"has no attribute 'clop'$"):
        optclip.clop  # noqa: B018


def test_dir_has_the_public_names_only():
    names = [name for name in dir(optclip) if name != "__version__"]
    assert names == sorted(optclip.__all__)
    assert all(getattr(optclip, name) is not None for name in names)
