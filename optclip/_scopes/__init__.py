"""Scopes: the blocks of elements that share a norm, and the block of each leaf.

`_scope` defines the protocol and the scopes without options, `_axes` the slices of each
leaf, `_groups` the groups of leaves, and `_layers` the layers of stacks.
"""

from ._axes import AxesByLeaf, axes, units
from ._groups import Groups, declaring, groups
from ._layers import Layers, layers
from ._scope import (
    ELEMENT,
    LEAF,
    TREE,
    EachElement,
    EachLeaf,
    PerLeaf,
    Scope,
    ScopeLike,
    Tree,
    as_scope,
    blocks_of,
    owners_of,
)
