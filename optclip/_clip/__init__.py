"""Implement the one clipping operation: measure, decide, apply, without state or optax.

`_clip` holds the request as plain data, `_layout` the leaves and blocks of a tree. In
`_run`, `decide` measures and fits thresholds, and `apply` changes the leaves. An
`_action` defines that change: `_scale` multiplies leaves by the coefficients that
`_coefficient` computes, `_move` moves elements to their `_element_bounds`, and
`spectral` adds one for singular values. `_nonfinite` lists the policies and where each
is applied. `_build` chooses the action for a scope and a response.

Norms, thresholds and coefficients are lists with one entry per block, each in a
`_arrays._batching.Batched`, which stacks scalars of one type into a vector.
"""

from optclip._clip._action import Action as Action
from optclip._clip._build import Parts as Parts
from optclip._clip._build import clip_of as clip_of
from optclip._clip._build import parts_of as parts_of
from optclip._clip._clip import Clip as Clip
from optclip._clip._clip import Decision as Decision
from optclip._clip._clip import Thresholds as Thresholds
from optclip._clip._coefficient import coefficients_of as coefficients_of
from optclip._clip._coefficient import one_where_unscaled as one_where_unscaled
from optclip._clip._coefficient import respond as respond
from optclip._clip._layout import LaidOutLeaf as LaidOutLeaf
from optclip._clip._layout import Layout as Layout
from optclip._clip._layout import lay_out as lay_out
from optclip._clip._layout import layout_of as layout_of
from optclip._clip._move import MOVE as MOVE
from optclip._clip._run import ThresholdFunction as ThresholdFunction
from optclip._clip._run import apply as apply
from optclip._clip._run import check_agreement as check_agreement
from optclip._clip._run import clipped_norms as clipped_norms
from optclip._clip._run import decide as decide
from optclip._clip._run import decided as decided
from optclip._clip._run import fixed as fixed
from optclip._clip._scale import SCALE as SCALE
from optclip._clip._scale import cast as cast
from optclip._clip._scale import scale as scale
from optclip._clip._scale import scaled_leaf as scaled_leaf
