"""Measure norms, accurate in every dtype and for every split of the leaves.

A norm is taken over a *block*: all the elements that share it. It is entrywise, or the
largest singular value. Sums are kept in float32 or wider. For p = 1 and 2 every element
is read once, on CPU again only if a sum of squares overflowed.
"""

from optclip.norms._block import Block as Block
from optclip.norms._measure import measure as measure
from optclip.norms._norm import Norm as Norm
from optclip.spectral._spectral_norm import Spectral as Spectral

__all__ = ["Block", "Norm", "Spectral", "measure"]
