"""Pure functions: a tree and a threshold in, a clipped tree out, without a state.

Every function takes any pytree or a bare array and works under jit, grad, vmap, scan
and shard_map. None stays None; integers, bools, float0 and PRNG keys pass untouched
and enter no norm; a `jax.experimental.sparse.BCOO` leaf stands for its dense gradient.
Structure, shapes, dtypes and weak types of the output are those of the input.

Arguments that all clips share:

========== =====================================================================
nonfinite  ``"propagate"`` a NaN or inf norm makes all that share it NaN, a value
           clip sends inf to the bound and keeps NaN; ``"zero"`` all that share
           the norm becomes zero; ``"raise"`` an error under `checkify`, else
           propagate. Leaves outside the norm are seen by raise alone
eps        added to the norm before the division; PyTorch's formula has 1e-6
strict     the true norm of the output is never above the threshold, whatever the
           roundings: clips inside a band of 1.3e-4 below it, then rounds towards
           zero in the dtype of each leaf
mask       which leaves are clipped; the others are left alone, neither measured nor
           scaled: a tree of bools, a prefix of one, or a function tree -> tree
axis_name  mapped axes that leaves are split over: a name, a tuple of names (`()` for
           none), a PartitionSpec, or a tree of these; None reads them off the type of
           each leaf, which `jax.shard_map` keeps
========== =====================================================================

A threshold is 0 or more, a number or array, traced or not: 0 clips to zero, inf
touches nothing, under any policy (though raise still raises). A concrete negative or
NaN raises ValueError, a traced negative counts as 0. A prefix tree may hold None for
'unclipped'. An element below 2**-63 (1.1e-19) counts as 0 in a norm, and so does a norm
below 2**-60 (8.7e-19). A threshold below 2**-60, with `strict` below 2**-36 (1.5e-11),
counts as 0 and makes all zeros. Duplicates in a BCOO leaf are summed in
float32; they come back summed where elements or slices of it are clipped, and with
`strict`. Its norms may be taken over axes of its data alone; a bound for its
elements is a number.
"""

from optclip.attention._clip_logits import (
    clip_attention_logits as clip_attention_logits,
)
from optclip.attention._max_logit import max_attention_logit as max_attention_logit
from optclip.functional._clip_by import clip_by as clip_by
from optclip.functional._leaf_norms import clip_by_average_norm as clip_by_average_norm
from optclip.functional._leaf_norms import clip_by_norm as clip_by_norm
from optclip.functional._leaf_norms import clip_by_rms as clip_by_rms
from optclip.functional._tree_norms import clip_by_global_norm as clip_by_global_norm
from optclip.functional._tree_norms import clip_by_group_norm as clip_by_group_norm
from optclip.functional._tree_norms import global_norm as global_norm
from optclip.functional._values import clip_by_value as clip_by_value
from optclip.spectral._clip_matrices import (
    clip_by_singular_value as clip_by_singular_value,
)
from optclip.spectral._clip_matrices import (
    clip_by_spectral_norm as clip_by_spectral_norm,
)

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
