"""APPLY: the one clip. It has no state and knows nothing of optax.

`_layout` says whose norm scales which leaf; `_clip` measures, responds and scales;
`_elements` moves single elements to a bound.
"""
