"""Clip matrices by their spectral norm, or each of their singular values.

`_matrix_scopes` selects the matrices of each leaf, and `_matrix_blocks` arranges them
for `_matrix_algebra`. `_spectral_norm` measures the largest singular value.
`_singular_values` measures and caps all of them, by a `_factorization`, or by the
products of `_newton_schulz`.
`_clip_matrices` holds the pure functions, `_clip_matrices_transform` the optax
transformations.
"""

from .._norms import BY_NAME
from ._clip_matrices_transform import scale_by_shape
from ._matrix_scopes import MatrixAxes, Method, matrices, singular_values
from ._spectral_norm import Spectral

BY_NAME["spectral"] = Spectral()
