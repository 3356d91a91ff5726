"""Handle arrays and trees of them: leaves, prefix trees, mesh axes, XLA.

Nothing here depends on clipping.
"""
