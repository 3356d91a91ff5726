"""The one clipping operation: measure, decide, apply, without state or optax.

`_clip` holds the operation as plain data, the leaves and blocks of a tree, and the
calls `decide` and `apply`; `clip_of` in `_move` chooses the action that changes the
leaves. `_scale` multiplies them by coefficients, `_move` moves elements to bounds, and
`optclip/_spectral` caps singular values.

Norms, thresholds and coefficients are lists with one entry per block, each in a
`_arrays._batching.Batched`, which stacks scalars of one type into a vector.
"""

from ._clip import (
    ActingScope,
    Action,
    BlockOutcome,
    ByArgument,
    Clip,
    Decision,
    Layout,
    apply,
    check_axes_known,
    decide,
    lay_out,
    layout_of,
)
from ._move import MOVE, clip_of
from ._scale import (
    SCALE,
    cast,
    coefficients_of,
    one_where_unscaled,
    respond,
    scale,
    scaled_leaf,
)
