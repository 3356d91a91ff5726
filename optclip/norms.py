"""Compute norms of trees, leaves or slices, over all devices of a mesh.

A norm covers a *block*: all elements that share it. It is entrywise, or the largest
singular value. Sums are accumulated in float32 or wider.
"""

from ._norms._norm import Block, Norm, measure
from ._spectral._spectral_norm import Spectral

__all__ = ["Block", "Norm", "Spectral", "measure"]
