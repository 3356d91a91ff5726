"""Define custom scopes, which choose the elements that share a norm.

A scope arranges the leaves of a tree into blocks that share a norm, and maps each leaf
to its block. A custom scope is a subclass of `Scope` with the methods `blocks` and
`spread`.

The scopes of optclip are `"tree"`, `"leaf"`, `"element"`, `optclip.axes`,
`optclip.units`, `optclip.groups`, `optclip.layers`, `optclip.matrices` and
`optclip.singular_values`.
"""

from ._scopes._scope import Scope

__all__ = ["Scope"]
