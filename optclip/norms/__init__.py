"""Compute norms of trees, leaves or slices, over all devices of a mesh.

A norm covers a *block*: all elements that share it. It is entrywise, or the largest
singular value. Sums are accumulated in float32 or wider.
"""

from optclip.norms._block import Block as Block
from optclip.norms._measure import measure as measure
from optclip.norms._norm import Norm as Norm
from optclip.spectral._spectral_norm import Spectral as Spectral

__all__ = ["Block", "Norm", "Spectral", "measure"]
