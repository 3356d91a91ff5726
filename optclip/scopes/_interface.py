"""Export the parts of `scopes` that other packages of optclip use."""

from optclip.scopes._axes import AxesByLeaf as AxesByLeaf
from optclip.scopes._axes import counted_from_zero as counted_from_zero
from optclip.scopes._groups import Groups as Groups
from optclip.scopes._scope import ELEMENT as ELEMENT
from optclip.scopes._scope import LEAF as LEAF
from optclip.scopes._scope import TREE as TREE
from optclip.scopes._scope import EachElement as EachElement
from optclip.scopes._scope import EachLeaf as EachLeaf
from optclip.scopes._scope import PerLeaf as PerLeaf
from optclip.scopes._scope import Scope as Scope
from optclip.scopes._scope import ScopeLike as ScopeLike
from optclip.scopes._scope import Tree as Tree
from optclip.scopes._scope import as_scope as as_scope
from optclip.scopes._scope import blocks_of as blocks_of
from optclip.scopes._scope import owners_of as owners_of
