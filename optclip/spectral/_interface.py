"""What other packages of optclip use of `spectral`, beside its public names."""

from optclip.spectral._matrix_scopes import Method as Method
from optclip.spectral._scale_by_shape import scale_by_shape as scale_by_shape
