"""Gradient clipping for JAX: optax transformations and pure functions.

In an optimizer, as a function, and the record of a step::

    tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
    clipped, norm = optclip.functional.clip_by_global_norm(grads, 1.0)
    optclip.metrics(opt_state)  # norm, threshold, coefficient, fraction clipped

Index::

    Transformations     clip_by_value, clip_by_norm, clip_by_average_norm, clip_by_rms,
                        clip_by_group_norm, clip_by_global_norm
    General form        clip_by(threshold, over=, norm=, response=)
    Pure functions      functional, with the same names and global_norm
    Scopes, masks       axes, units, groups, matrices, singular_values, by_path
    Thresholds          thresholds: quantile, ema, zscore, ... learn from past norms
    Responses, norms    responses, norms
    Published methods   recipes: agc, adagc, zclip, autoclip, spam, ...
    Wrappers            skip, with_error_feedback, with_periodic_reset, clip_after,
                        clip_before
    Monitoring          metrics, summary, suggest, plot
    Private training    per_example: clipped_grad, clipped_sum, norms, aggregate
    Backward pass       clip_cotangent, with_clipped_cotangent, cotangent_probe
    Attention           clip_attention_logits (QK-Clip), Heads, find_heads
    Matrices            clip_by_singular_value, clip_by_spectral_norm
    Types               typing

`help(optclip.clip_by)` explains the options that the transformations share.
"""

import sys as _sys

from optclip import _public_names
from optclip import functional as functional
from optclip import norms as norms
from optclip import per_example as per_example
from optclip import plot as plot
from optclip import recipes as recipes
from optclip import responses as responses
from optclip import scopes as scopes
from optclip import thresholds as thresholds
from optclip import typing as typing
from optclip._arrays._prefix import by_path as by_path
from optclip.attention import Heads as Heads
from optclip.attention import clip_attention_logits as clip_attention_logits
from optclip.attention import find_heads as find_heads
from optclip.cotangents import clip_cotangent as clip_cotangent
from optclip.cotangents import cotangent_probe as cotangent_probe
from optclip.cotangents import with_clipped_cotangent as with_clipped_cotangent
from optclip.monitor import Suggestion as Suggestion
from optclip.monitor import metrics as metrics
from optclip.monitor import suggest as suggest
from optclip.monitor import summary as summary
from optclip.scopes import axes as axes
from optclip.scopes import groups as groups
from optclip.scopes import matrices as matrices
from optclip.scopes import singular_values as singular_values
from optclip.scopes import units as units
from optclip.spectral._clip_matrices_transform import (
    clip_by_singular_value as clip_by_singular_value,
)
from optclip.spectral._clip_matrices_transform import (
    clip_by_spectral_norm as clip_by_spectral_norm,
)
from optclip.transforms import clip_by as clip_by
from optclip.transforms import clip_by_average_norm as clip_by_average_norm
from optclip.transforms import clip_by_global_norm as clip_by_global_norm
from optclip.transforms import clip_by_group_norm as clip_by_group_norm
from optclip.transforms import clip_by_norm as clip_by_norm
from optclip.transforms import clip_by_rms as clip_by_rms
from optclip.transforms import clip_by_value as clip_by_value
from optclip.wrappers import clip_after as clip_after
from optclip.wrappers import clip_before as clip_before
from optclip.wrappers import skip as skip
from optclip.wrappers import with_error_feedback as with_error_feedback
from optclip.wrappers import with_periodic_reset as with_periodic_reset

__version__ = "0.1.0"


__all__ = [
    "Heads",
    "Suggestion",
    "axes",
    "by_path",
    "clip_after",
    "clip_attention_logits",
    "clip_before",
    "clip_by",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_norm",
    "clip_by_rms",
    "clip_by_singular_value",
    "clip_by_spectral_norm",
    "clip_by_value",
    "clip_cotangent",
    "cotangent_probe",
    "find_heads",
    "functional",
    "groups",
    "matrices",
    "metrics",
    "norms",
    "per_example",
    "plot",
    "recipes",
    "responses",
    "scopes",
    "singular_values",
    "skip",
    "suggest",
    "summary",
    "thresholds",
    "typing",
    "units",
    "with_clipped_cotangent",
    "with_error_feedback",
    "with_periodic_reset",
]

# Names in other libraries, and their counterparts here.
_ELSEWHERE = {
    "adaptive_grad_clip": "optclip.recipes.agc",
    "apply_if_finite": "optclip.skip",
    "clip": "optclip.clip_by_value",
    "clip_by_block_rms": "optclip.clip_by_rms",
    "clip_grad_norm": "optclip.functional.clip_by_global_norm",
    "clip_grad_norm_": "optclip.functional.clip_by_global_norm",
    "clip_grad_value_": "optclip.functional.clip_by_value",
    "skip_not_finite": "optclip.skip",
    "qk_clip": "optclip.clip_attention_logits",
}


def __getattr__(name: str) -> object:
    places = (
        functional, recipes, thresholds, responses, scopes, norms, per_example, typing
    )  # fmt: skip
    found = [f"{m.__name__}.{name}" for m in places if name in m.__all__]
    found = [_ELSEWHERE[name]] if name in _ELSEWHERE else found
    hint = f". Did you mean {' or '.join(found)}?" if found else ""
    raise AttributeError(f"module 'optclip' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_MODULES = (
    functional, norms, per_example, plot, recipes, responses, scopes, thresholds,
    typing, _sys.modules[__name__],
)  # fmt: skip
_public_names.name_public_paths(*_MODULES)
_public_names.print_names_of_types(*_MODULES)
