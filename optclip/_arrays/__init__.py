"""Arrays and trees of them: what a leaf is, prefix trees, mesh axes, XLA.

Nothing here knows of clips.
"""
