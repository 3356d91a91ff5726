"""Clip gradients with pure functions: a tree and a threshold in, a clipped tree out.

The functions accept any pytree or array and work under `jit`, `grad`, `vmap`, `scan`
and `shard_map`. Structure, shapes, dtypes and weak types of the output equal those
of the input. None stays None. Beside floats, integers and bools are unchanged and enter
no norm, and so are float0 and PRNG keys everywhere. In a tree without floats,
`clip_by_value` clips integers, and functions of norms raise TypeError. A list of
numbers is a tree with one leaf per number, not an array. A
`jax.experimental.sparse.BCOO` leaf represents its dense gradient; duplicate indices are
summed.

Functions whose norms may span several leaves return the clipped tree and the norms:
`clip_by`, `clip_by_global_norm` and `clip_by_group_norm`. Other `clip_by_*` functions
return the tree. `clip_attention_logits` returns the parameters and the coefficients.

A threshold is a number or an array of at least 0, or a prefix tree of these with None
for unclipped. 0 clips to zero, inf clips nothing. A negative or NaN threshold raises
ValueError, as does a leaf without the axes; a traced negative threshold counts as 0.
Responses with `signed = True` receive negative ones.
Norms and thresholds below 2**-60 count as 0, and so do elements below 2**-63 in a norm.
`help(optclip.clip_by)` explains the shared options.
"""

from ._attention._clip_logits import clip_attention_logits
from ._attention._max_logit import max_attention_logit
from ._functional._clipping import (
    clip_by,
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
    global_norm,
)
from ._spectral._clip_matrices import clip_by_singular_value, clip_by_spectral_norm

__all__ = [
    "clip_attention_logits",
    "clip_by",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_norm",
    "clip_by_rms",
    "clip_by_singular_value",
    "clip_by_spectral_norm",
    "clip_by_value",
    "global_norm",
    "max_attention_logit",
]
