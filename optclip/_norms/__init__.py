"""Norms of blocks of elements, over all devices of a mesh.

`_norm` defines a block and its measurement, and `_sums` adds powers. `_spectral` adds
the spectral norm.
"""

from ._norm import (
    BY_NAME,
    INF,
    L2,
    Block,
    Measured,
    Measurement,
    NormLike,
    accumulator,
    as_norm,
    declared_of,
    of_order,
)
from ._sums import LEAST, flush_small
