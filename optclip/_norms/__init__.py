"""Norms of blocks of elements, over all devices of a mesh.

`_norm` defines a block and its measurement, `_sums` adds powers, and
`_norm_argument` converts an argument to a norm. `_spectral` adds the spectral norm.
"""

from ._norm import (
    INF,
    L2,
    Block,
    Measured,
    Measurement,
    accumulator,
    declared_of,
    of_order,
)
from ._norm_argument import BY_NAME, NormLike, as_norm
from ._sums import LEAST, flush_small
