"""Choose which elements share a norm: the tree, each leaf, slices, groups, or elements.

A scope arranges the leaves of a tree into blocks that share a norm, and maps each leaf
to its block. A custom scope is a class with the methods `blocks` and
`spread`; see `Scope`.
"""

from ._scopes._axes import axes, units
from ._scopes._groups import groups
from ._scopes._scope import Scope
from ._spectral._matrix_scopes import matrices, singular_values

__all__ = ["Scope", "axes", "groups", "matrices", "singular_values", "units"]
