"""optclip: gradient clipping for JAX, right in every dtype and on every mesh.

In an optimizer, as a function, and what it did::

    tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
    clipped, norm = optclip.functional.clip_by_global_norm(grads, 1.0)
    optclip.metrics(opt_state)
"""

import sys as _sys
from types import ModuleType as _ModuleType

from optclip import functional as functional
from optclip import norms as norms
from optclip import plot as plot
from optclip import recipes as recipes
from optclip import responses as responses
from optclip import scopes as scopes
from optclip import thresholds as thresholds
from optclip import typing as typing
from optclip._arrays._prefix import by_path as by_path
from optclip.monitor import Suggestion as Suggestion
from optclip.monitor import metrics as metrics
from optclip.monitor import suggest as suggest
from optclip.monitor import summary as summary
from optclip.scopes import ELEMENT as ELEMENT
from optclip.scopes import LEAF as LEAF
from optclip.scopes import TREE as TREE
from optclip.scopes import axes as axes
from optclip.scopes import groups as groups
from optclip.scopes import units as units
from optclip.transforms import ClipRecord as ClipRecord
from optclip.transforms import ClipState as ClipState
from optclip.transforms import SkipRecord as SkipRecord
from optclip.transforms import clip_by as clip_by
from optclip.transforms import clip_by_average_norm as clip_by_average_norm
from optclip.transforms import clip_by_global_norm as clip_by_global_norm
from optclip.transforms import clip_by_group_norm as clip_by_group_norm
from optclip.transforms import clip_by_norm as clip_by_norm
from optclip.transforms import clip_by_rms as clip_by_rms
from optclip.transforms import clip_by_value as clip_by_value
from optclip.wrappers import after as after
from optclip.wrappers import skip as skip
from optclip.wrappers import with_carry as with_carry
from optclip.wrappers import with_reset as with_reset

__version__ = "0.1.0"


def _name_public_paths(*modules: _ModuleType) -> None:
    """Classes name where they are imported from, so that pickles outlive moves."""
    for module in modules:
        for name in module.__all__:
            found = getattr(module, name)
            if isinstance(found, type) and found.__module__.startswith("optclip."):
                found.__module__ = module.__name__


__all__ = [
    "ELEMENT",
    "LEAF",
    "TREE",
    "ClipRecord",
    "ClipState",
    "SkipRecord",
    "Suggestion",
    "after",
    "axes",
    "by_path",
    "clip_by",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_norm",
    "clip_by_rms",
    "clip_by_value",
    "functional",
    "groups",
    "metrics",
    "norms",
    "plot",
    "recipes",
    "responses",
    "scopes",
    "skip",
    "suggest",
    "summary",
    "thresholds",
    "typing",
    "units",
    "with_carry",
    "with_reset",
]

_name_public_paths(norms, responses, scopes, thresholds, _sys.modules[__name__])
