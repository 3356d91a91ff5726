"""Explain calls with arguments that a function does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Keywords of TensorFlow, Keras, PyTorch and optax, with the candidates for ours.
_FOREIGN: dict[str, tuple[str, ...]] = {
    "axes": ("axis", "over"),
    "dim": ("axis", "over"),
    "clip": ("max_norm", "limit"),
    "clip_norm": ("max_norm", "max_rms"),
    "clip_value": ("limit",),
    "clip_value_max": ("upper",),
    "clip_value_min": ("lower",),
    "clipnorm": ("max_norm",),
    "clipvalue": ("limit",),
    "error_if_nonfinite": ("nonfinite",),
    "global_clipnorm": ("max_norm",),
    "l2_clip_norm": ("threshold",),
    "l2_norm_clip": ("threshold",),
    "max_grad_norm": ("threshold", "max_norm"),
    "grads": ("tree",),
    "gradients": ("tree",),
    "max": ("upper",),
    "max_delta": ("limit",),
    "min": ("lower",),
    "norm": ("ord",),
    "norm_type": ("ord",),
    "p": ("ord",),
    "parameters": ("tree",),
    "t": ("tree",),
    "t_list": ("tree",),
    "threshold": ("max_norm", "max_rms", "limit"),
    "updates": ("tree",),
    "values": ("tree",),
    # Of papers and their code.
    **dict.fromkeys(("alpha", "beta"), ("decay",)),
    **dict.fromkeys(("clip_factor", "clipping", "lambda_rel"), ("ratio",)),
    **dict.fromkeys(("percentile", "clip_percentile"), ("q",)),
    "lambda_abs": ("max_norm",),
    "rolling_interval_length": ("window",),
    "sigma_factor": ("sigma",),
    "z_thresh": ("z",),
}
# The values that differ from those of the other library.
_VALUES = {
    "error_if_nonfinite": 'nonfinite="raise" inside checkify',
    "norm": "ord=, or clip_by(..., norm=...),",
}
# What has no argument, and needs none.
_NEEDLESS = {
    "foreach": "XLA compiles the norms of all leaves together.",
    "name": "a function has no record to name.",
}
# Functions of optax, PyTorch and TensorFlow, with ours.
_FUNCTIONS = {
    "adaptive_grad_clip": "optclip.recipes.agc",
    "apply_if_finite": "optclip.skip",
    "clip": "optclip.clip_by_value",
    "clip_by_block_rms": "optclip.clip_by_rms",
    "clip_grad_norm_": "optclip.functional.clip_by_global_norm",
    "clip_grad_value_": "optclip.functional.clip_by_value",
    "differentially_private_aggregate": "optclip.per_example.aggregate",
    "get_total_norm": "optclip.functional.global_norm",
    "per_example_global_norm_clip": "optclip.per_example.clipped_sum",
    "per_example_layer_norm_clip": "optclip.per_example.clipped_sum",
    "skip_large_updates": "optclip.skip",
    "zero_nans": "optclip.skip, or optax.zero_nans() before the clipping"
    " (docs/nan_and_inf.md)",
}
# Constraints of parameters, in lower case and without underscores.
_CONSTRAINTS = frozenset(
    {"clipconstraint", "keepparamsnonnegative", "maxnorm", "maxnormconstraint"}
    | {"minmaxnorm", "nonneg", "nonnegative", "unitnorm"}
)
# Options of the general form alone.
_GENERAL = ("over", "norm")
_GRADIENTS = ("t_list", "t", "grads", "gradients", "values", "parameters", "updates")


def explains_call(function: Callable[P, T]) -> Callable[P, T]:
    """Make a public function explain keywords and positions that it does not have."""
    parameters = inspect.signature(function).parameters.values()
    accepted = frozenset(p.name for p in parameters)
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
    name = getattr(function, "__name__", "")
    # Only a factory of a transformation has a name for its record. Arguments that it
    # does not have may be those of the pure function of the same name.
    is_factory = "record" in accepted

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > len(names):
            takes = f"takes only {', '.join(names)} by position, got {len(args)}"
            advice = f"Pass others by keyword: {', '.join(others)}."
            if is_factory:
                has_bounds = len(args) > 2 and "lower" in accepted
                pure = pure_call(name, *(("lower", "upper") if has_bounds else names))
                takes = f"builds a transformation and {takes}"
                advice += f" To clip gradients directly, call {pure}."
            raise TypeError(f"{name}() {takes} arguments. {advice}")
        for keyword in kwargs.keys() - accepted:
            hint = ""
            if is_factory and keyword in _GRADIENTS:
                hint = f"To clip gradients directly, call {pure_call(name, '...')}."
            raise TypeError(unknown(name, keyword, accepted, hint))
        return function(*args, **kwargs)

    return checked


def no_attribute(module: str, name: str, ours: str | None = None) -> AttributeError:
    """Return the error for a name that a module does not have."""
    hint, ours = "See docs/migrating.md.", ours or _FUNCTIONS.get(name)
    if ours is not None:
        hint = f"Did you mean {ours}?"
    elif name.replace("_", "").lower() in _CONSTRAINTS:
        hint = (
            "Use optclip.constrain(optimizer, clip), see docs/clipping_parameters.md"
            " for each `clip`. In model.fit, constraints of Keras work too."
        )
        if module == "optclip.keras":
            hint = (
                "Pass layers kernel_constraint=, such as keras.constraints.MaxNorm(2);"
                " optclip.constrain is for optax."
            )
    return AttributeError(f"module {module!r} has no attribute {name!r}. {hint}")


def pure_call(function: str, *names: str) -> str:
    """Return the call of the pure function of a factory, as an error prints it."""
    return f"optclip.functional.{function}({', '.join(['updates', *names])})"


def unknown(name: str, keyword: str, accepted: Iterable[str], hint: str = "") -> str:
    """Return the text of the error for a keyword that a function does not have."""
    ours = [x for x in _FOREIGN.get(keyword, ()) if x in accepted]
    close = difflib.get_close_matches(keyword, sorted(accepted), n=1)
    hints = (
        hint,
        f"Use {_VALUES.get(keyword, f'{ours[0]}=')} instead." if ours else "",
        f"Use clip_by(..., {keyword}=...)." if keyword in _GENERAL else "",
        f"Remove it: {_NEEDLESS[keyword]}" if keyword in _NEEDLESS else "",
        f"Did you mean {close[0]}=?" if close else "",
        f"Its arguments are {', '.join(sorted(accepted))}.",
    )
    return f"{name}() has no argument '{keyword}'. {next(filter(None, hints))}"
