"""Choose which elements share a norm: the tree, each leaf, slices, groups, or elements.

A scope arranges the leaves of a tree into blocks that share a norm, and maps each leaf
to its block. A custom scope is a class with the methods `blocks` and
`spread`; see `Scope`.
"""

from optclip.scopes._axes import axes as axes
from optclip.scopes._axes import units as units
from optclip.scopes._groups import groups as groups
from optclip.scopes._scope import Scope as Scope
from optclip.spectral._matrix_scopes import matrices as matrices
from optclip.spectral._matrix_scopes import singular_values as singular_values

__all__ = ["Scope", "axes", "groups", "matrices", "singular_values", "units"]
