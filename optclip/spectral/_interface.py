"""Export the parts of `spectral` that other packages of optclip use.

Registers its norm and its scope, since no module of the core may import this package.
"""

from optclip._clip import parts_of
from optclip.norms._interface import BY_NAME
from optclip.spectral._matrix_scopes import Method as Method
from optclip.spectral._matrix_scopes import SingularValues
from optclip.spectral._scale_by_shape import scale_by_shape as scale_by_shape
from optclip.spectral._singular_values import parts_of_singular_values
from optclip.spectral._spectral_norm import Spectral

BY_NAME["spectral"] = Spectral()
parts_of.register(SingularValues, parts_of_singular_values)
