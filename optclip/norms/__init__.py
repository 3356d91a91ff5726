"""MEASURE: one norm that is right for every dtype and split of the leaves.

A norm is entrywise, taken over a *block*: all the elements that share it. Sums are
kept in float32 or wider. Every element is read once, on CPU again only if a sum of
squares overflowed.
"""

from optclip.norms._measure import measure as measure
from optclip.norms._norm import Block as Block
from optclip.norms._norm import Norm as Norm

__all__ = ["Block", "Norm", "measure"]
