"""Scopes: the blocks of elements that share a norm, and the block of each leaf.

`_scope` defines the protocol, and the scopes without labels; `_groups` the groups of
leaves, and the layers of stacks.
"""

from ._groups import Groups, declaring, groups
from ._scope import (
    ELEMENT,
    LEAF,
    TREE,
    AxesByLeaf,
    EachElement,
    EachLeaf,
    PerLeaf,
    Scope,
    ScopeLike,
    Tree,
    as_scope,
    axes,
    blocks_of,
    owners_of,
    units,
)
