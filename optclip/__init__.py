"""Gradient clipping for JAX: optax transformations and pure functions.

Most runs need five names::

    tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
    tx = optclip.skip(tx)                    # skips steps with NaN or inf
    optclip.metrics(opt_state)               # norm, threshold, fraction clipped
    print(optclip.summary(opt_state))        # the same as text
    clipped, norm = optclip.functional.clip_by_global_norm(grads, 1.0)

`help(optclip.clip_by_global_norm)` prints one page, `help(optclip.clip_by)` the options
that the transformations share, and `help(optclip.recipes)` the published methods.

Index::

    Transformations     clip_by_global_norm, clip_by_norm, clip_by_value, clip_by_rms,
                        clip_by_average_norm, clip_by_group_norm
    General form        clip_by(threshold, over=, norm=, response=)
    Pure functions      functional, with the same names and global_norm
    Scopes, masks       axes, units, groups, layers, matrices, singular_values, by_path
    Thresholds          thresholds: quantile, ema, zscore, ... learn from past norms
    Responses, norms    responses, norms
    Published methods   recipes: agc, adagc, zclip, autoclip, spam, ...
    Wrappers            skip, with_history, with_periodic_reset, clip_after,
                        clip_before, constrain, carry_over
    Monitoring          metrics, history, summary, explain, suggest, plot,
                        check_norms
    Private training    per_example: clipped_grad, clipped_sum, norms, aggregate
    Backward pass       clip_cotangent, cotangent_probe
    Attention           clip_attention_logits (QK-Clip), Heads, find_heads
    Matrices            clip_by_singular_value, clip_by_spectral_norm
    Keras               keras: clipped, for `model.fit` of Keras 3 on JAX
    Types               typing
    Command line        python -m optclip report run.jsonl
    Other libraries     docs/migrating.md lists calls of PyTorch, Keras and optax
"""

import inspect as _inspect
from typing import get_type_hints as _get_type_hints

from . import (
    functional,
    keras,
    norms,
    per_example,
    plot,
    recipes,
    responses,
    scopes,
    thresholds,
    typing,
)
from ._arrays._call_errors import no_attribute as _no_attribute
from ._arrays._prefix import by_path
from ._attention._clip_logits_transform import clip_attention_logits
from ._attention._heads import Heads, find_heads
from ._cotangents._clip_cotangent import clip_cotangent
from ._cotangents._probe import cotangent_probe
from ._explain._explain import explain
from ._monitor._history import history
from ._monitor._metrics import metrics
from ._monitor._norm_check import check_norms
from ._monitor._suggest import suggest
from ._monitor._summary import summary
from ._scopes._groups import groups, layers
from ._scopes._scope import axes, units
from ._spectral._clip_matrices_transform import (
    clip_by_singular_value,
    clip_by_spectral_norm,
)
from ._spectral._matrix_scopes import matrices, singular_values
from ._transforms._clipping import (
    clip_by,
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
)
from ._wrappers._carry_over import carry_over
from ._wrappers._clip_after import clip_after
from ._wrappers._clip_before import clip_before
from ._wrappers._constrain import constrain
from ._wrappers._periodic_reset import with_periodic_reset
from ._wrappers._skip import skip
from ._wrappers._with_history import with_history

__version__ = "0.1.0"


__all__ = [
    "Heads",
    "axes",
    "by_path",
    "carry_over",
    "check_norms",
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
    "constrain",
    "cotangent_probe",
    "explain",
    "find_heads",
    "functional",
    "groups",
    "history",
    "keras",
    "layers",
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
    "with_history",
    "with_periodic_reset",
]


_MODULES = (
    functional, recipes, thresholds, responses, scopes, norms, per_example, plot, keras,
    typing,
)  # fmt: skip


def __getattr__(name: str) -> object:
    found = (f"{m.__name__}.{name}" for m in _MODULES if name in m.__all__)
    raise _no_attribute(__name__, name, next(found, None))


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _name_public_modules() -> None:
    """Let classes name the module to import them from, so pickles outlive moves."""
    public = [(m.__name__, vars(m), m.__all__) for m in _MODULES]
    for module, members, names in [*public, (__name__, globals(), __all__)]:
        for value in map(members.get, names):
            if isinstance(value, type) and value.__module__.startswith(__name__):
                # Strings would be evaluated in the public module, which lacks names.
                hints, own = _get_type_hints(value), _inspect.get_annotations(value)
                value.__annotations__ = {key: hints[key] for key in own}
                value.__module__ = module


_name_public_modules()
